"""The hyperparameters of `fit_branch`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from testtime.precision import Precision, check_precision

Optimizer = Literal["sgd", "adamw"]
Start = Literal["own", "copy"]
LRS: dict[tuple[str, bool], float] = {
    ("sgd", False): 0.05,
    ("sgd", True): 0.02,
    ("adamw", False): 1e-3,
    ("adamw", True): 1e-4,
}
"""Optimizer and `joint` → default learning rate."""
STATES = {"sgd": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""Optimizer → the tensors that it stores per parameter."""


@dataclass(frozen=True)
class BranchRecipe:
    """How to train a self-supervised branch; see `fit_branch`.

    Attributes:
        epochs: Maximum number of passes over the images.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        lr: Initial learning rate, decreased to 0 along half a cosine; None for that of `LRS`.
        batch: Images per step.
        weight_decay: Weight decay.
        patience: Epochs without a lower held-out error after which training stops; None: never.
        start: "own": from the branch's weights; "copy": from a copy of the classifier with a new last layer.
        joint: Whether the encoder is trained too.
        distillation: Weight of the distillation loss, with `joint`.
        seed: Seed of shuffling, augmentation and the new last layer.
        precision: "fp32", "tf32" or "bf16".
    """

    epochs: int = 10
    optimizer: Optimizer = "sgd"
    lr: float | None = None
    batch: int = 256
    weight_decay: float = 5e-4
    patience: int | None = 5
    start: Start = "own"
    joint: bool = False
    distillation: float = 1.0
    seed: int = 0
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        for name, known in (("optimizer", get_args(Optimizer)), ("start", get_args(Start))):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        check_precision(self.precision)
        for name in ("epochs", "batch", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.lr is None:
            object.__setattr__(self, "lr", LRS[self.optimizer, self.joint])
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"`lr` must be positive, got {self.lr}.")
        for name in ("weight_decay", "distillation"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` must be at least 0, got {value}.")

    @property
    def rate(self) -> float:
        """The initial learning rate."""
        assert self.lr is not None
        return self.lr

    def lr_at(self, epoch: float) -> float:
        """Return the learning rate after a number of epochs, possibly fractional."""
        return self.rate * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs))) / 2

    def make_optimizer(self, moved: list[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of some tensors."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(moved, lr=self.rate, weight_decay=self.weight_decay)
        return torch.optim.SGD(moved, lr=self.rate, momentum=0.9, weight_decay=self.weight_decay)

    def is_finished(self, history: list[dict[str, Any]]) -> bool:
        """Whether a training with these entries of finished epochs is complete."""
        if len(history) >= self.epochs:
            return True
        return self.patience is not None and len(history) - find_best(history) >= self.patience

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON-serializable data."""
        return asdict(self)


def find_best(history: list[dict[str, Any]]) -> int:
    """Return the number of the epoch with the lowest held-out error, of several the last; without errors the last."""
    best, lowest = 0, math.inf
    for number, error in enumerate(_held_out_errors(history), start=1):
        if error is None or error <= lowest:
            best, lowest = number, math.inf if error is None else error
    return best


def _held_out_errors(history: list[dict[str, Any]]) -> Iterator[float | None]:
    yield from (entry.get("held_out_error") for entry in history)
