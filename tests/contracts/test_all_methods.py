"""The contract of all methods: what holds for every name in METHODS, in every mode."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import COUNT, NAN, network, pictures, same, samples
from loops import sharpen
from testtime import METHODS, Adapter, Episodic, Online, Streams, YNet, collect

pytestmark = [
    pytest.mark.filterwarnings("ignore:The method .* needs several images"),
    pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics"),
]
DRAWING = {"ttt", "best", "mirrored", "rehearsal", "dua", "cotta", "memo", "roid", "rotta"}  # those with random views
MODES: dict[str, Callable[..., Adapter]] = {
    "online": Online,
    "episodic": Episodic,
    "streams": lambda net, **given: Streams(net, COUNT, **given),
}
EVERY = [(name, mode) for name in METHODS for mode in MODES]
LEARNING = [(name, mode) for name, mode in EVERY if METHODS[name].settings.get("steps") != 0]
REMEMBERING = [(name, mode) for name, mode in LEARNING if mode != "episodic"]


@functools.cache
def _network() -> YNet:
    # Batch Normalization, since some methods need it; sharp, since some leave out uncertain images.
    return collect(sharpen(network("batch")), pictures(8, seed=9))


def make(name: str, mode: str, **more: Any) -> Adapter:
    given = {"copies": 2, **({"steps": 1} if "steps" not in METHODS[name].settings else {})}
    return MODES[mode](_network(), method=name, **given | more)


def learned(adapter: Adapter) -> dict[str, Tensor]:
    """What the adapter has learned; nothing of the optimizer, which makes its state when it is first needed."""
    state = adapter.state_dict()
    return {key: tensor for key, tensor in state.items() if "optimizer/" not in key and key != "counts"}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_the_model_stays_as_it_is_and_answers_follow_from_seed_and_images(name: str, mode: str) -> None:
    net = _network()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    one, again, other = (make(name, mode, seed=seed) for seed in (3, 3, 4))
    for call in range(2):
        expected = one.predict(pictures(seed=call))
        assert same(again.predict(pictures(seed=call)), expected)
        if name not in DRAWING:
            assert torch.equal(other.predict(pictures(seed=call)).logits, expected.logits)
        assert expected.logits.isfinite().all()
        assert expected.adapted.all() == ((name, mode) in LEARNING)
    assert equal(before, net.state_dict())
    assert modes == [module.training for module in net.modules()]
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_a_reset_is_exact(name: str, mode: str) -> None:
    adapter = make(name, mode)
    first = [adapter.predict(pictures(seed=call)) for call in range(2)]
    adapter.reset()
    assert all(same(adapter.predict(pictures(seed=call)), expected) for call, expected in enumerate(first))


@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_a_saved_stream_continues_bit_for_bit(name: str, mode: str, tmp_path: Path) -> None:
    adapter, other = make(name, mode), make(name, mode)
    adapter.predict(pictures(seed=0))
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    for call in (1, 2):
        assert same(other.predict(pictures(seed=call)), adapter.predict(pictures(seed=call)))
    twin = copy.deepcopy(adapter)
    assert same(twin.predict(pictures(seed=3)), adapter.predict(pictures(seed=3)))


@pytest.mark.parametrize(("name", "mode"), LEARNING)
def test_bad_pictures_leave_no_trace(name: str, mode: str) -> None:
    adapter, untouched = make(name, mode), make(name, mode)
    for one in (adapter, untouched):
        one.predict(pictures(), samples())
    with pytest.raises(ValueError, match=r"`images` must be \(N, C, H, W\)"):
        adapter.predict(pictures()[0])
    assert adapter.predict(torch.full_like(pictures(), NAN), samples(3)).rolled_back.all()
    assert equal(learned(adapter), learned(untouched)) or "streams" in mode  # whose counters move on
    for call in (6, 9):
        found = adapter.predict(pictures(seed=call), samples(call))
        assert same(found, untouched.predict(pictures(seed=call), samples(call)))
        assert found.logits.isfinite().all()


@pytest.mark.parametrize(("name", "mode"), REMEMBERING)
def test_something_is_learned(name: str, mode: str) -> None:
    adapter, untouched = make(name, mode), make(name, mode)
    adapter.predict(pictures(), samples())
    untouched.predict(torch.full_like(pictures(), NAN), samples())  # undone
    found, start = (
        {key: tensor for key, tensor in learned(one).items() if key != "learner/updates"}
        for one in (adapter, untouched)
    )
    assert found.keys() == start.keys()
    assert not equal(found, start)


@pytest.mark.parametrize(("name", "mode"), REMEMBERING)
def test_a_guard_of_nothing_undoes_what_raises_the_loss(name: str, mode: str) -> None:
    """With an absurd learning rate either the loss is still finite and within the guard, or nothing was learned."""
    adapter = make(name, mode, lr=1e6, guard=1e-9)
    fresh = learned(make(name, mode))
    found = adapter.predict(pictures(), samples())
    assert (found.adapted ^ found.rolled_back).all()
    assert found.logits.isfinite().all()
    assert ((found.loss_after - found.loss_before).mean() <= 1e-6) | found.rolled_back.any()
    if found.rolled_back.all():
        kept = learned(adapter)
        assert all(torch.equal(kept[key], tensor) for key, tensor in fresh.items() if key.startswith("learner/"))


@pytest.mark.parametrize(("name", "mode"), REMEMBERING)
def test_resets_start_again_from_the_source(name: str, mode: str) -> None:
    plain, fresh = make(name, mode), make(name, mode)
    updates = COUNT if mode == "online" and plain.settings.share == "image" else 1  # of a call
    adapter = make(name, mode, resets=2 * updates)
    for call in range(2):
        expected = plain.predict(pictures(seed=call), samples(call))
        assert same(adapter.predict(pictures(seed=call), samples(call)), expected)
    found = adapter.predict(pictures(seed=2), samples(2))
    assert same(found, fresh.predict(pictures(seed=2), samples(2)))


@pytest.mark.parametrize("name", [name for name, mode in LEARNING if mode == "streams"])
def test_streams_are_as_if_alone(name: str) -> None:
    together, alone = make(name, "streams"), [make(name, "online", share="image") for _ in range(COUNT)]
    for call in range(2):
        images = pictures(seed=call)
        found = together.predict(images)
        for row, adapter in enumerate(alone):
            expected = adapter.predict(images[row : row + 1])
            torch.testing.assert_close(found.logits[row : row + 1], expected.logits, rtol=1e-3, atol=1e-3)


def test_memory_does_not_grow() -> None:
    def count() -> int:
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))

    def predict(calls: int) -> None:
        for adapter in adapters:
            for call in range(calls):
                adapter.predict(pictures(seed=call))

    adapters = [make(name, mode) for name, mode in EVERY]
    predict(3)
    before = count()
    predict(4)
    assert count() == before


def test_resets_are_in_records_only_if_there_are_any() -> None:
    assert "resets" not in make("tent", "online").describe()
    assert make("tent", "online", resets=5).describe()["resets"] == 5
    for bad in (0, -1, 2.5, True, "always"):
        with pytest.raises(ValueError, match="`resets` must be"):
            make("tent", "online", resets=bad)
