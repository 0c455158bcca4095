"""How an adapter learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from testtime.augment import Augment
from testtime.networks.replicas import Statistics
from testtime.precision import Precision, check_precision
from testtime.tasks import Task

Update = Literal["norm", "encoder", "encoder+ssl", "all"]
Share = Literal["image", "batch"]


@dataclass(frozen=True)
class Settings:
    """How an adapter learns. The defaults are the paper's for CIFAR-10.

    Attributes:
        steps: Gradient steps on each image, each on fresh views; 0 adapts nothing.
        lr: Learning rate.
        copies: Augmented copies of the image in each step.
        threshold: Adapt only where the confidence in the plain image is below this; 1 adapts always.
        update: What learns: "encoder+ssl" (as the authors' program), "encoder" alone (as the paper writes), "norm"
            (scale and shift of normalisation layers in encoder and classifier), or "all" (encoder and classifier).
        share: "image": every image learns for itself. "batch": the images of one call share their updates.
        statistics: What Batch Normalization normalises with: "running", statistics that follow the views while it
            learns; "source", those of training; "batch", those of the images at hand.
        optimizer: Any `torch.optim` class, or a callable `(parameters, lr=lr)` that makes one.
        seed: Seed of the augmentations.
        guard: Undo an update after which the loss on the image is not finite, or has risen by more than this.
        precision: "fp32" is exact; "tf32" and "bf16" are faster on a GPU. Weights and updates are always float32.
        mirrored: Answer with the mean of the logits of the image and of its mirror image.
        task: The self-supervised task; None takes the one the network was trained with.
        augment: What makes the copies; None takes the network's training augmentation.
    """

    steps: int
    lr: float = 0.001
    copies: int = 32
    threshold: float = 1.0
    update: Update = "encoder+ssl"
    share: Share = "image"
    statistics: Statistics = "running"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    seed: int = 0
    guard: float = 3.0
    precision: Precision = "fp32"
    mirrored: bool = False
    task: Task | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"`steps` must be at least 0, got {self.steps}.")
        if self.copies < 1:
            raise ValueError(f"`copies` must be at least 1, got {self.copies}.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"`lr` must be positive, got {self.lr}.")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"`threshold` must be in [0, 1], got {self.threshold}.")
        if not self.guard > 0:
            raise ValueError(f"`guard` must be positive (infinity allows any finite rise), got {self.guard}.")
        check_precision(self.precision)
        for name, kind in (("update", Update), ("share", Share), ("statistics", Statistics)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}.")

    def describe(self) -> dict[str, Any]:
        """The settings as plain text and numbers, for records and for comparing two."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["optimizer"] = getattr(self.optimizer, "__qualname__", repr(self.optimizer))
        for name in ("task", "augment"):
            plain[name] = getattr(plain[name], "__qualname__", repr(plain[name]))
        if self.statistics == "running":  # records of version 0.1 do not have it
            del plain["statistics"]
        return plain
