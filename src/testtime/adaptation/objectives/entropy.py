"""TENT: the entropy of the predicted classes (Wang et al. 2021)."""

from __future__ import annotations

from torch import Tensor

from testtime.adaptation.objectives.base import Objective, Observation
from testtime.randomness import Draws


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
