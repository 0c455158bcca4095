"""TENT: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import COUNT, network, pictures
from loops import CLOSE, LR, entropy, list_norms, make_batches, plain_network, use_batch_statistics
from testtime import Episodic, Online, Streams, YNet

SGD: dict[str, Any] = {"lr": LR, "optimizer": torch.optim.SGD}


def tent(net: YNet, batches: list[Tensor], kind: Any = torch.optim.SGD, lr: float = LR) -> Iterator[Tensor]:
    """Wang et al. 2021: one step on the mean entropy of each batch, by scale and shift of the norms."""
    model = use_batch_statistics(net)
    optimizer = kind(list_norms(model), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        entropy(model(batch)).mean().backward()
        optimizer.step()
        yield model(batch).detach()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_tent(norm: str) -> None:
    net, batches = network(norm), make_batches()
    adapter = Online(net, method="tent", **SGD)
    for batch, expected in zip(batches, tent(net, batches), strict=True):
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits, expected, **CLOSE)
        torch.testing.assert_close(found.loss_after, entropy(expected), **CLOSE)
        assert found.loss_after.mean() < found.loss_before.mean()
        once = Episodic(net, method="tent", **SGD).predict(batch)  # a call is an episode
        torch.testing.assert_close(once.logits, next(tent(net, [batch])), **CLOSE)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_by_default_the_optimizer_is_the_papers(norm: str) -> None:
    net, batches = network(norm), make_batches()
    adapter = Online(net, method="tent")
    for batch, expected in zip(batches, tent(net, batches, torch.optim.Adam, 0.001), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The method 'tent' needs several images")
def test_tent_in_streams_of_single_images() -> None:
    net, calls = network(), [pictures(seed=seed) for seed in range(3)]
    streams = Streams(net, COUNT, method="tent", **SGD)
    alone = [tent(net, [call[row : row + 1] for call in calls]) for row in range(COUNT)]
    for call in calls:
        torch.testing.assert_close(streams.predict(call).logits, torch.cat([next(one) for one in alone]), **CLOSE)


@pytest.mark.filterwarnings("ignore:The method 'tent' needs several images")
def test_a_step_computed_by_hand() -> None:
    """A pixel of (1, 0) is normalised to (1, -1), of probabilities 0.8808 and 0.1192 and entropy 0.3653.

    The entropy's gradient for a logit of log-probability l is -p (l + H): -0.2100 and 0.2100.
    """
    adapter = Online(plain_network(), method="tent", **SGD)
    adapter.predict(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.bias, torch.tensor([0.0105, -0.0105]), rtol=0, atol=1e-4)
    torch.testing.assert_close(learned.weight, torch.tensor([1.0105, 1.0105]), rtol=0, atol=1e-4)


def test_a_batch_of_one_image_warns_once() -> None:
    adapter = Online(network(), method="tent", **SGD)
    with pytest.warns(UserWarning, match="'tent' needs several images"):
        first = adapter.predict(pictures(1))
    assert first.adapted.all()
    adapter.predict(pictures(1))  # no second warning, which would be an error here
