"""How an optimizer treats stacked parameters, determined by trying it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from testtime.adaptation.settings import Settings
from testtime.randomness import Draws


def is_rowwise(settings: Settings) -> bool:
    """Return whether the optimizer updates each row of stacked parameters as it would update the row alone.

    Zeroed state must also be equivalent to no state, since that is how a row is reset.
    """
    numbers = Draws.of(0, torch.arange(2, device="cpu")).normal(4, 3, 3)  # two rows: a start and three gradients
    ends = []
    for rows, from_zeros in (([slice(0, 1), slice(1, 2)], False), ([slice(0, 2)], False), ([slice(0, 2)], True)):
        parts = []
        for row in rows:
            parameter = nn.Parameter(numbers[row, 0].clone())
            optimizer = settings.optimizer([parameter], lr=settings.lr)
            try:
                if from_zeros:
                    _step(optimizer, parameter, numbers[row, 1])
                    for value in optimizer.state[parameter].values():
                        if isinstance(value, Tensor):
                            value.zero_()
                    parameter.data.copy_(numbers[row, 0])
                for step in (1, 2, 3):
                    _step(optimizer, parameter, numbers[row, step])
            except TypeError:  # it needs a closure
                return False
            parts.append(parameter.detach())
        ends.append(torch.cat(parts))
    return all(torch.allclose(end, ends[0], rtol=1e-6, atol=0) for end in ends)


def has_rows(settings: Settings) -> bool:
    """Return whether the optimizer's state is all elementwise, so that rows can be updated independently."""
    held = find_memory(settings).values()
    return all(value is None or (isinstance(value, Tensor) and value.shape == (2, 3)) for value in held)


def find_memory(settings: Settings) -> dict[str, Any]:
    """Return the optimizer's state of a parameter `(2, 3)` after a step, by name."""
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.float32, device="cpu"))
    optimizer = settings.optimizer([parameter], lr=settings.lr)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)  # some need a closure
    return optimizer.state[parameter]


def _step(optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()
    optimizer.step()
