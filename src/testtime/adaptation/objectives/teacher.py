"""CoTTA: a mean teacher (Wang et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws


class Teacher(Objective):
    """Cross entropy to a mean teacher (CoTTA, Wang et al. 2022).

    Where the source network is unsure of a batch, the target is the teacher's mean over augmented copies. After every
    step a small random fraction of the student's weights is restored from the source.
    """

    augments = True
    momentum, sure, restored = 0.999, 0.92, 0.01

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        self.teacher, self.source = replicas.twin(), replicas.twin()
        self.state = {"teacher": self.teacher.packed.numbers}

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        return self._compare(images, draws, images.new_full(images.shape[:2], 1 / images.shape[1], dtype=torch.float32))

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        return (self._compare(images, draws, weights) * weights).sum()

    def observe(self, images: Tensor) -> Observation:
        logits = self.teacher(images).float()
        loss = -(logits.softmax(-1) * self.replicas(images).float().log_softmax(-1)).sum(-1)
        return Observation(logits, loss, logits.softmax(-1).amax(-1))

    def update(self, draws: Draws) -> None:
        student = self.replicas.packed.numbers
        self.teacher.packed.numbers.lerp_(student, 1 - self.momentum)
        chosen = Draws(draws.keys[:, 0]).purpose("restore").uniform(student.shape[1]) < self.restored  # (S, P)
        student.copy_(torch.where(chosen, self.source.packed.numbers, student))

    def _compare(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        with torch.no_grad():
            target = self._teach(images, draws, weights)  # (S, B, K)
        return -(target * self.replicas(images).float().log_softmax(-1)).sum(-1)

    def _teach(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        """Return the teacher's probabilities `(S, B, K)`; `weights` `(S, B)` are those of images in the batch."""
        plain = self.teacher(images).float().softmax(-1)
        views = self.make_copies(images, draws)  # (S, B·copies, C, h, w)
        mean = self.teacher(views).float().softmax(-1).unflatten(1, (images.shape[1], -1)).mean(2)
        confidence = self.source(images).float().softmax(-1).amax(-1)  # (S, B)
        unsure = (confidence * weights).sum(1) < self.sure  # (S,)
        return torch.where(unsure[:, None, None], mean, plain)
