"""Objectives: losses on unlabelled images.

An `Objective` belongs to S replicas. It defines the loss to minimise (`loss`) and the outputs on plain images before
and after learning (`observe`). It may have state, e.g. a teacher or moving averages: tensors with a row per replica,
which are saved, reset and restored together with the replicas.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws
from testtime.tasks import make_views


class Observation(NamedTuple):
    """Outputs of S replicas on B plain images each.

    Attributes:
        logits: Class logits `(S, B, K)`.
        loss: The objective's loss `(S, B)`.
        confidence: Confidence in [0, 1], `(S, B)`.
    """

    logits: Tensor
    loss: Tensor
    confidence: Tensor


class Objective(abc.ABC):
    """Base class of the objectives of S replicas.

    Args:
        replicas: The replicas.
        settings: The settings; task and augmentation must be set.
        later: Starts a function concurrently and returns a future with `result()`.
    """

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        self.replicas, self.settings, self.later = replicas, settings, later
        self.state: dict[str, Tensor] = {}
        """State of the objective by name, `(S, ...)` each."""

    @abc.abstractmethod
    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the loss `(S, B)` of images `(S, B, C, H, W)`; `draws` has keys `(S, B)`."""

    @abc.abstractmethod
    def observe(self, images: Tensor) -> Observation:
        """Return the outputs of the replicas on plain images `(S, B, C, H, W)`."""

    def descend(self, descend: Callable[[Callable[[], Tensor]], None], loss: Callable[[], Tensor]) -> None:
        """Minimise the loss that a function computes; by default with one optimizer step."""
        descend(loss)

    def update(self, draws: Draws) -> None:  # noqa: B027 (optional)
        """Update the state of the objective after a step."""

    def classify(self, images: Tensor, features: Tensor | None = None) -> Tensor:
        """Return class logits `(S, B, K)` of images, reusing their features if given."""
        logits = self.replicas.classify(self.replicas.encode(images) if features is None else features).float()
        if self.settings.mirrored:
            logits = (logits + self.replicas(images.flip(-1)).float()) / 2
        return logits


class SelfSupervision(Objective):
    """The self-supervised task of the network's second branch, on augmented copies of the image (Sun et al. 2020)."""

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        settings, count = self.settings, len(images)
        assert settings.task is not None
        assert settings.augment is not None
        given = images.flatten(0, 1), draws.flatten(), settings.copies, settings.augment, settings.task
        views, targets = make_views(*given)  # (S·B·copies·V, C, h, w)
        outputs = self.replicas.self_supervise(views.unflatten(0, (count, -1)))
        losses = settings.task.loss(outputs.flatten(0, 1), targets)
        return losses.view(*images.shape[:2], -1).mean(-1)

    def observe(self, images: Tensor) -> Observation:
        task, (count, number) = self.settings.task, images.shape[:2]
        assert task is not None
        views, targets = task.probe(images.flatten(0, 1))
        views = views.unflatten(0, (count, -1))  # (S, B·V, C, h, w)
        features = self.replicas.encode(views)
        # The first view is the plain image, unless the task cropped it.
        plain = features[:, :: views.shape[1] // number] if views.shape[-2:] == images.shape[-2:] else None
        logits = self.later(self.classify, images, plain)
        losses = task.loss(self.replicas.supervise(features).flatten(0, 1), targets).view(count, number, -1)
        return Observation(logits.result(), losses.mean(-1), torch.exp(-losses[..., 0]))


class Entropy(Objective):
    """The entropy of the predicted classes (TENT, Wang et al. 2021)."""

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        return measure_entropy(self.replicas(images).float())

    def observe(self, images: Tensor) -> Observation:
        logits = self.classify(images)
        return Observation(logits, measure_entropy(logits), logits.softmax(-1).amax(-1))


def measure_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) `(..., K)`, in nats, `(...)`."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


class Teacher(Objective):
    """Cross entropy to a mean teacher (CoTTA, Wang et al. 2022).

    Where the source network is unsure of a batch, the target is the teacher's mean over augmented copies. After every
    step a small random fraction of the student's weights is restored from the source.
    """

    momentum, sure, restored = 0.999, 0.92, 0.01

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        self.teacher, self.source = replicas.twin(), replicas.twin()
        self.state = {"teacher": self.teacher.packed.numbers}

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        with torch.no_grad():
            target = self._teach(images, draws)  # (S, B, K)
        return -(target * self.replicas(images).float().log_softmax(-1)).sum(-1)

    def observe(self, images: Tensor) -> Observation:
        logits = self.teacher(images).float()
        loss = -(logits.softmax(-1) * self.replicas(images).float().log_softmax(-1)).sum(-1)
        return Observation(logits, loss, logits.softmax(-1).amax(-1))

    def update(self, draws: Draws) -> None:
        student = self.replicas.packed.numbers
        self.teacher.packed.numbers.lerp_(student, 1 - self.momentum)
        chosen = Draws(draws.keys[:, 0]).purpose("restore").uniform(student.shape[1]) < self.restored  # (S, P)
        student.copy_(torch.where(chosen, self.source.packed.numbers, student))

    def _teach(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the teacher's probabilities `(S, B, K)`."""
        plain = self.teacher(images).float().softmax(-1)
        assert self.settings.augment is not None
        copies = self.settings.augment(images.flatten(0, 1), draws.flatten().copies(self.settings.copies))
        views = copies.flatten(0, 1).unflatten(0, (len(images), -1))  # (S, B·copies, C, h, w)
        mean = self.teacher(views).float().softmax(-1).unflatten(1, (images.shape[1], -1)).mean(2)
        unsure = self.source(images).float().softmax(-1).amax(-1).mean(1) < self.sure  # (S,)
        return torch.where(unsure[:, None, None], mean, plain)
