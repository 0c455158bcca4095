"""Optimizers of stacked parameters: the same results and state whether parameters are updated one by one or packed."""

from __future__ import annotations

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


class Problem:
    """Two replicas with three parameters, of which the loss uses two."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"weight": (2, 3, 3), "bias": (2, 3), "unused": (2, 5)}
        numbers = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
        self.parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in numbers.items()}
        self.packed = PackedParameters(self.parameters, 2, CPU, ())
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        settings: Settings = METHODS["ttt"].make_settings("online", {"optimizer": optimizer, "lr": 0.05})
        self.optimizer = StackedOptimizer(settings, self.packed, dict(self.packed.parameters))

    def loss(self) -> Tensor:
        given = torch.linspace(-1, 1, 6).view(2, 1, 3)
        made = given @ self.parameters["weight"] + self.parameters["bias"].unsqueeze(1)
        return made.square().sum()

    def step(self) -> None:
        self.optimizer.step(self.loss, lambda: None)


def make(name: str, packed: bool) -> Problem:
    """Return a problem as on a device where launches take time, or as on one where they do not."""
    with pytest.MonkeyPatch.context() as patch:
        tuning = replace(kernels.tuning(CPU), waits=packed)
        patch.setattr(kernels, "tuning", lambda device: tuning)
        made = Problem(OPTIMIZERS[name])
    assert made.optimizer.flat == packed
    return made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, packed: bool) -> None:
    problem = make(name, packed)
    tensors = {key: nn.Parameter(tensor.detach().clone()) for key, tensor in problem.parameters.items()}
    plain = OPTIMIZERS[name](list(tensors.values()), lr=0.05)
    alone = make(name, packed)
    alone.parameters = tensors
    for _ in range(3):
        problem.step()
        plain.zero_grad()
        alone.loss().backward()
        tensors["unused"].grad = torch.zeros_like(tensors["unused"])
        plain.step()
    for key, tensor in tensors.items():
        torch.testing.assert_close(problem.packed.parameters[key], tensor)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_continues_on_the_other_kind_of_device(name: str, saved: bool) -> None:
    first, second = make(name, saved), make(name, not saved)
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
    assert all(torch.equal(memory[key], tensor) for key, tensor in first.optimizer.state().items() if key in memory)


def test_gradients_are_not_stored_between_steps() -> None:
    problem = make("SGD", packed=False)
    problem.step()
    assert all(parameter.grad is None for parameter in problem.parameters.values())
