"""Recorded episodes on a CPU, where something else stands in for a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testtime import METHODS, Adapter, Episodic, Online, Streams, collect, kernels, resnet26
from testtime.adaptation import recorder
from testtime.adaptation.learner import Learner
from testtime.kernels import graphs
from testtime.networks.ynet import YNet
from testtime.randomness import Draws


@pytest.mark.parametrize("fault", [RuntimeError("no graph"), torch.OutOfMemoryError("too small")])
def test_a_recording_that_fails_leaves_the_learner_as_it_was(fault: RuntimeError) -> None:
    """Without a graph it goes on, unless the memory is too small, which the caller sees to."""
    online = Online(resnet26(depth=8, size=16, seed=1), copies=2)
    online.predict(torch.zeros(1, 3, 16, 16))
    learner = online._learned
    assert isinstance(learner, Learner)
    before, learner.eager = learner.state(), False

    def fail() -> Any:
        learner.replicas.packed.numbers.add_(1)
        raise fault

    too_small = isinstance(fault, torch.OutOfMemoryError)
    expected = pytest.raises(torch.OutOfMemoryError) if too_small else pytest.warns(UserWarning, match="no graph")
    with expected:
        recorder._find(learner, (), fail)
    assert learner.eager == (not too_small)
    assert not learner.recordings
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state().items())


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
        "online, some": lambda net: Online(net, copies=2, update=["encoder.*.bias"]),
        "streams": lambda net: Streams(net, 2, copies=2),
        "episodic": lambda net: Episodic(net, steps=2, copies=2, parallel=2),
    }


@pytest.mark.parametrize("name", list(adapters()))
def test_a_recorded_episode_reads_nothing_that_is_gone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph goes on reading the memory that the function read, even where that was given away since."""
    for module in (graphs, recorder):
        monkeypatch.setattr(module, "Captured", Remembered)
    monkeypatch.setattr("testtime.adaptation.learner.can_record", lambda device: True)
    tuning = replace(kernels.tuning(torch.device("cpu")), waits=True)
    monkeypatch.setattr(kernels, "tuning", lambda device: tuning)
    adapter = adapters()[name](resnet26(depth=8, size=16, seed=1).eval())
    adapter.predict(Draws.of(0, torch.arange(2)).uniform(3, 16, 16))
    gc.collect()
    assert len(Remembered.read) > 5
    assert not any(memory.expired() for memory in Remembered.read)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of methods for other networks
@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if one.settings.get("steps") != 0])
def test_what_is_recorded_is_kept_by_a_reset_and_nothing_else(method: str) -> None:
    net = resnet26(depth=8, size=16, seed=1, norm="batch").eval()
    count = 72 if method == "rotta" else 12  # it waits for 64 images
    images = Draws.of(0, torch.arange(count + 8)).uniform(3, 16, 16)
    collect(net, images[:16])
    online, fresh = (Online(net, method=method, lr=0.01, copies=2) for _ in range(2))
    online.predict(images[:count])
    learner = online._learned
    assert isinstance(learner, Learner)
    learner.recordings["a shape"] = "a graph"
    online.reset()
    assert online._learned is None
    found, expected = (adapter.predict(images[8:]) for adapter in (online, fresh))
    assert online._learned is learner
    assert learner.recordings == {"a shape": "a graph"}
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss_before, expected.loss_before)
    ours, theirs = online.state_dict(), fresh.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
