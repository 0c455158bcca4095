"""Adam for replicas, against torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.adaptation.adam import Adam
from testtime.adaptation.optimizers import has_rows, is_rowwise
from testtime.adaptation.settings import Settings
from testtime.randomness import Draws


def follow(kind: type[torch.optim.Optimizer], start: Tensor, gradients: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], lr=0.1)  # type: ignore[call-arg]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_the_updates_are_those_of_torch() -> None:
    numbers = Draws.of(0, torch.arange(11)).normal(3, 4, 2)
    start, gradients = numbers[0], numbers[1:]
    torch.testing.assert_close(follow(Adam, start, gradients), follow(torch.optim.Adam, start, gradients))


def test_the_first_step_by_hand() -> None:
    """The corrected averages of one gradient are it and its square: a step of lr, whatever its size."""
    found = follow(Adam, torch.zeros(1, 2), torch.tensor([[[3.0, -0.01]]]))
    torch.testing.assert_close(found, torch.tensor([[-0.1, 0.1]]))


def test_a_row_that_starts_again_does_not_see_the_others() -> None:
    numbers = Draws.of(0, torch.arange(9)).normal(2, 3)
    parameter = torch.nn.Parameter(numbers[0].clone())
    optimizer = Adam([parameter], lr=0.1)
    for step, gradient in enumerate(numbers[1:]):
        if step == 4:
            for tensor in optimizer.state[parameter].values():
                tensor[1] = 0
            parameter.data[1] = numbers[0, 1]
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(parameter.data[:1], follow(Adam, numbers[0, :1], numbers[1:, :1]))
    torch.testing.assert_close(parameter.data[1:], follow(Adam, numbers[0, 1:], numbers[5:, 1:]))


def test_streams_can_use_it() -> None:
    settings = Settings(steps=1, optimizer=Adam)
    assert is_rowwise(settings)
    assert has_rows(settings)
