"""The settings of an adapter."""

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
    """The settings of an adapter. The defaults are the paper's for CIFAR-10.

    Attributes:
        steps: Gradient steps per image, each on newly drawn views; 0 disables learning.
        lr: Learning rate.
        copies: Augmented copies of the image per step.
        threshold: Adapt only if the confidence on the plain image is below this; 1 always adapts.
        update: Which parameters learn: "encoder+ssl" (as in the authors' code), "encoder" (as in the paper), "norm"
            (affine parameters of the normalization layers in encoder and classifier) or "all" (encoder and classifier).
        share: "image" updates on every image separately, "batch" on all images of a call together.
        statistics: Statistics used by Batch Normalization: "running", updated with the views while learning; "source",
            those of training; "batch", those of the current batch.
        optimizer: A `torch.optim` class, or a callable `(parameters, lr=lr)` that returns an optimizer.
        seed: Seed of the augmentations.
        guard: Undo an update if the loss on the image becomes non-finite or increases by more than this.
        precision: "fp32" is exact; "tf32" and "bf16" are faster on a GPU. Weights and updates are always float32.
        mirrored: Average the logits of the image and its mirror image.
        task: The self-supervised task; None: the network's.
        augment: The augmentation of the copies; None: the one the network was trained with.
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
        """Return the settings, JSON-serializable."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["optimizer"] = getattr(self.optimizer, "__qualname__", repr(self.optimizer))
        for name in ("task", "augment"):
            plain[name] = getattr(plain[name], "__qualname__", repr(plain[name]))
        if self.statistics == "running":  # records of version 0.1 do not have it
            del plain["statistics"]
        return plain
