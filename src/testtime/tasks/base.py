"""The interface of a self-supervised task, and what tasks with classes have in common."""

from __future__ import annotations

import abc
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.randomness import Draws


class Task(Protocol):
    """The interface of a self-supervised task.

    Views are grouped by image: with V views per image, views `n·V … n·V + V - 1` belong to image n. Outputs and targets
    of M views are tensors `(M, ...)`. `ClassTask` implements everything but `name`, `outputs`, `views` and `probe` for
    tasks whose targets are class numbers.
    """

    @property
    def name(self) -> str:
        """The name used in checkpoints and reports."""
        ...

    @property
    def outputs(self) -> int | None:
        """Number of outputs of the self-supervised branch; None if these are not `(M, outputs)`, as of a decoder."""
        ...

    @property
    def chance(self) -> float:
        """The error at chance level."""
        ...

    def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return views `(N·V, C, h, w)` of images `(N, C, H, W)` and targets `(N·V, ...)`; draws has keys `(N,)`."""
        ...

    def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return deterministic views and targets, to measure the task's loss, error and confidence on.

        If the views have the shape of the images, the first one of each is the unchanged image.
        """
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss per view, `(M,)`, of outputs `(M, ...)` and targets `(M, ...)`."""
        ...

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the error per view, float `(M,)`; 0 is perfect."""
        ...

    def confidence(self, losses: Tensor) -> Tensor:
        """Return the confidence in [0, 1], `(...)`, given the losses of an image's probe, `(..., V)`."""
        ...


class ClassTask(abc.ABC):
    """A task whose targets are class numbers, int64 `(M,)`, with as many outputs as classes.

    The loss is cross-entropy, the error is 1 where another class is predicted, the confidence is the probability of the
    correct class of the first view, the unchanged image.
    """

    @property
    @abc.abstractmethod
    def outputs(self) -> int:
        """Number of classes."""

    @property
    def chance(self) -> float:
        return 1 - 1 / self.outputs

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets, reduction="none")

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) != targets).float()

    def confidence(self, losses: Tensor) -> Tensor:
        return torch.exp(-losses[..., 0])
