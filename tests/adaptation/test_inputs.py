"""Images of another size: streams that store images refuse them, episodes do not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from adapters import COUNT, network, pictures, same, samples
from testtime import Adapter, Episodic, Online
from testtime.adaptation.streams import Streams


@pytest.mark.parametrize("kind", [Online, functools.partial(Streams, count=COUNT)])
@pytest.mark.parametrize("method", ["best", "rotta"])
def test_a_stream_that_stores_images_takes_one_size(method: str, kind: Callable[..., Adapter]) -> None:
    adapter = kind(network(), method=method, copies=2)
    adapter.predict(pictures())
    before = adapter.state_dict()
    with pytest.raises(ValueError, match=r"\(N, 3, 16, 16\).*got \(3, 3, 20, 20\)"):
        adapter.predict(pictures(size=20))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state_dict().items())
    adapter.reset()
    assert adapter.predict(pictures(size=20)).logits.isfinite().all()


def test_a_stream_without_a_memory_takes_any_size() -> None:
    adapter = Online(network(), method="best", copies=2, constants={"memory": 0})
    adapter.predict(pictures())
    assert adapter.predict(pictures(size=20)).adapted.all()


@pytest.mark.parametrize("method", ["best", "rotta"])
def test_episodes_take_any_size(method: str) -> None:
    used, fresh = (Episodic(network(), method=method, copies=2, steps=1) for _ in range(2))
    used.predict(pictures())
    assert same(used.predict(pictures(size=20), samples()), fresh.predict(pictures(size=20), samples()))
