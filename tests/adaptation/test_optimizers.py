"""Optimizers of stacked parameters: the same results and state whether parameters are updated one by one or packed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.adaptation.methods import METHODS
from testtime.adaptation.optimizers import StackedOptimizer
from testtime.adaptation.settings import Settings
from testtime.networks.packed import PackedParameters

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "weight decay": functools.partial(torch.optim.SGD, weight_decay=0.1),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}


STILL = ("SGD", "momentum", "Adam")
"""Those that leave parameters without a gradient alone."""


class Problem:
    """Two replicas with three parameters, of which the loss uses two; of these, one may be fixed."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], fixed: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"weight": (2, 3, 3), "bias": (2, 3), "unused": (2, 5)}
        numbers = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
        self.parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in numbers.items()}
        self.packed = PackedParameters(self.parameters, 2, CPU, ())
        moving = {name: one for name, one in self.packed.parameters.items() if name != "bias" or not fixed}
        for parameter in moving.values():
            parameter.requires_grad_(True)
        settings: Settings = METHODS["ttt"].make_settings("online", {"optimizer": optimizer, "lr": 0.05})
        self.optimizer = StackedOptimizer(settings, self.packed, moving)

    def loss(self) -> Tensor:
        given = torch.linspace(-1, 1, 6).view(2, 1, 3)
        made = given @ self.parameters["weight"] + self.parameters["bias"].unsqueeze(1)
        return made.square().sum()

    def step(self) -> None:
        self.optimizer.step(self.loss, lambda: None)


def make(name: str, packed: bool, fixed: bool = False) -> Problem:
    """Return a problem as on a device where launches take time, or as on one where they do not."""
    with pytest.MonkeyPatch.context() as patch:
        tuning = replace(kernels.tuning(CPU), waits=packed)
        patch.setattr(kernels, "tuning", lambda device: tuning)
        made = Problem(OPTIMIZERS[name], fixed)
    assert made.optimizer.flat == (packed and (name in STILL or not fixed))
    return made


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, packed: bool, fixed: bool) -> None:
    problem = make(name, packed, fixed)
    tensors = {key: nn.Parameter(tensor.detach().clone()) for key, tensor in problem.parameters.items()}
    tensors["bias"].requires_grad_(not fixed)
    plain = OPTIMIZERS[name]([tensor for tensor in tensors.values() if tensor.requires_grad], lr=0.05)
    alone = make(name, packed, fixed)
    alone.parameters = tensors
    for _ in range(3):
        problem.step()
        plain.zero_grad()
        alone.loss().backward()
        if name in STILL or not fixed:
            tensors["unused"].grad = torch.zeros_like(tensors["unused"])
        plain.step()
    for key, tensor in tensors.items():
        torch.testing.assert_close(problem.packed.parameters[key], tensor)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_continues_on_the_other_kind_of_device(name: str, saved: bool, fixed: bool) -> None:
    first, second = make(name, saved, fixed), make(name, not saved, fixed)
    for _ in range(2):
        first.step()
    state: dict[str, Any] = {key: tensor.clone() for key, tensor in first.optimizer.state().items()}
    second.packed.numbers.data.copy_(first.packed.numbers)
    second.optimizer.load(state)
    for problem in (first, second):
        problem.step()
        problem.step()
    assert torch.equal(first.packed.numbers, second.packed.numbers)
    memory = second.optimizer.state()
    assert not any("bias" in key for key in memory) or not fixed
    assert all(torch.equal(memory[key], tensor) for key, tensor in first.optimizer.state().items() if key in memory)


def test_a_snapshot_of_an_optimizer_that_mixes_rows_can_be_restored_again() -> None:
    problem, rows = Problem(torch.optim.NAdam), torch.ones(2, dtype=torch.bool)
    problem.step()
    before, snapshot = copy.deepcopy(problem.optimizer.state()), problem.optimizer.snapshot()
    for _ in range(2):
        problem.step()
        problem.optimizer.restore(snapshot, rows)
    found = problem.optimizer.state()
    assert found.keys() == before.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in before.items())


def test_gradients_are_not_stored_between_steps() -> None:
    problem = make("SGD", packed=False)
    problem.step()
    assert all(parameter.grad is None for parameter in problem.parameters.values())
