"""What surrounds a CUDA graph, on a CPU: a function that is called stands in for a graph that is replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testtime import Adapter, Episodic, Online, Streams, capture, recording, resnet26
from testtime.capture import Beside, Series
from testtime.networks.ynet import YNet
from testtime.randomness import Draws, has_triton


class Called:
    """Stands in for `Captured`."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        self.function = function
        for _ in range(2):  # as before a recording
            function(*inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(*inputs))


@pytest.mark.parametrize("count", [1, 4, 5, 11])
def test_a_series_is_one_call_after_another(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "Captured", Called)
    total = torch.zeros(2, 3)

    def add(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        total.add_(x * factor)
        return total.clone(), total > 1

    x, factor = torch.rand(11, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(11) % 3
    series = Series(add, 4, x[0], factor[0])
    total.zero_()
    sums, high = series(x[:count], factor[:count])
    kept = sums.clone()
    expected = (x[:count] * factor[:count, None, None]).cumsum(0)
    assert torch.allclose(sums, expected)
    assert torch.equal(high, sums > 1)
    series(x[:3], factor[:3])  # goes on, and what was given stays as it was
    assert torch.equal(sums, kept)
    assert torch.allclose(total, expected[-1] + (x[:3] * factor[:3, None, None]).sum(0))


@pytest.mark.parametrize("fault", [RuntimeError("no graph"), torch.OutOfMemoryError("too small")])
def test_a_recording_that_fails_leaves_the_learner_as_it_was(fault: RuntimeError) -> None:
    """Without a graph it goes on, unless the memory is too small, which the caller sees to."""
    online = Online(resnet26(depth=8, size=16, seed=1), copies=2)
    online.predict(torch.zeros(1, 3, 16, 16))
    learner = online._learner
    assert learner is not None
    before, learner.eager = learner.state(), False

    def fail() -> Any:
        learner.replicas.numbers.add_(1)
        raise fault

    if isinstance(fault, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError, match="too small"):
            recording._record(learner, (), fail)
    else:
        with pytest.warns(UserWarning, match="capture failed, going on without it: no graph"):
            recording._record(learner, (), fail)
    assert learner.eager == (not isinstance(fault, torch.OutOfMemoryError))
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state().items())


def test_beside_on_a_cpu_is_in_turn() -> None:
    beside, done = Beside(torch.device("cpu")), []
    with beside:
        done.append(1)
    beside.join()
    with pytest.raises(ValueError, match="within"), beside:
        raise ValueError("within")
    assert done == [1]


class Reading(TorchDispatchMode):
    """Notes what memory is read that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[StorageWeakRef] = set()
        self.made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= _memories((args, kwargs)) - self.made
        result = func(*args, **(kwargs or {}))
        self.made |= _memories(result) - self.found
        return result


def _memories(tree: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


class Remembered:
    """Stands in for `Captured`: gives what it once found, and has nothing but what a graph has."""

    read: set[StorageWeakRef]

    def __init__(self, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        function(*self.inputs)
        with Reading() as reading:
            self.outputs = function(*self.inputs)
        Remembered.read = reading.found

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in self.outputs)


def adapters() -> dict[str, Callable[[YNet], Adapter]]:
    return {
        "online": lambda net: Online(net, copies=2),
        "online, encoder": lambda net: Online(net, copies=2, update="encoder"),
        "online, shared": lambda net: Online(net, copies=2, share="batch"),
        "streams": lambda net: Streams(net, 2, copies=2),
        "episodic": lambda net: Episodic(net, steps=2, copies=2, parallel=2),
    }


@pytest.mark.skipif(has_triton(), reason="our CUDA kernels would be launched")
@pytest.mark.parametrize("name", list(adapters()))
def test_a_recorded_episode_reads_nothing_that_is_gone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph goes on reading the memory that the function read, even where that was given away since."""
    monkeypatch.setattr(capture, "Captured", Remembered)
    monkeypatch.setattr(recording, "Captured", Remembered)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    adapter = adapters()[name](resnet26(depth=8, size=16, seed=1).eval())
    adapter.predict(Draws.of(0, torch.arange(2)).uniform(3, 16, 16))
    gc.collect()
    assert len(Remembered.read) > 5
    assert not any(memory.expired() for memory in Remembered.read)
