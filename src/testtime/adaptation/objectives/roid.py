"""ROID: weighted certainty, consistency, and weights that stay near the source (Marsden et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.objectives.entropy import measure_entropy
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws


class LikelihoodRatio(Objective):
    """The soft likelihood ratio of the predictions, and their consistency with augmented copies (Marsden et al. 2024).

    Images are weighted by certainty and by diversity, i.e. the distance of their probabilities to the moving mean;
    those of less than mean diversity are left out. In a batch of one the weight is 1. After a step the parameters are
    mixed with those of the source. Predicted probabilities are multiplied by the smoothed class frequencies of the
    batch, as in the paper; its code multiplies the logits.
    """

    augments = True
    source_momentum, momentum, temperature, most = 0.99, 0.9, 1 / 3, 0.99

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        numbers, classes = replicas.packed.numbers, self.count_classes()
        self._source = numbers.detach().clone()
        mean = torch.full((replicas.count, classes), 1 / classes, dtype=torch.float32, device=numbers.device)
        self.state = {"mean": mean}
        self._found = mean  # mean probabilities (S, K) of the current batch

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        return self._compare(self.replicas(images).float(), images, draws)

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        logits = self.replicas(images).float()
        losses = self._compare(logits, images, draws)
        self._found = (logits.detach().softmax(-1) * weights.unsqueeze(-1)).sum(1)
        return (self._weigh(logits.detach(), weights) * losses * weights).sum()

    def observe(self, images: Tensor) -> Observation:
        logits = self.classify(images)
        logs = logits.log_softmax(-1)
        valid, classes = ~logs.isnan().any(-1, keepdim=True), logits.shape[-1]  # (S, B, 1)
        count = valid.sum(1)  # (S, 1)
        prior = torch.where(valid, logs.exp(), 0).sum(1) / count.clamp(min=1)  # (S, K)
        smoothing = 1 / (count.clamp(1, classes) * prior.amax(-1, keepdim=True))
        prior = (prior + smoothing) / (1 + smoothing * classes)
        corrected = (logs + prior.log().unsqueeze(1)).log_softmax(-1)
        return Observation(corrected, self._measure_ratio(logits), corrected.exp().amax(-1))

    def update(self, draws: Draws) -> None:
        self.state["mean"].lerp_(self._found, 1 - self.momentum)
        self.replicas.packed.numbers.lerp_(self._source, 1 - self.source_momentum)

    def _compare(self, logits: Tensor, images: Tensor, draws: Draws) -> Tensor:
        """Return the loss `(S, B)` of images with these logits, not yet weighted by certainty and diversity."""
        views = self.replicas(self.make_copies(images, draws)).float().unflatten(1, (images.shape[1], -1))
        return self._measure_ratio(logits) + _symmetric_cross_entropy(logits.unsqueeze(2), views).mean(2)

    def _weigh(self, logits: Tensor, shares: Tensor) -> Tensor:
        """Return the weight of each image, `(S, B)`, compared with those whose share in the batch is positive."""
        distance, wanted = 1 - F.cosine_similarity(logits.softmax(-1), self.state["mean"][:, None], dim=-1), shares > 0
        diversity, certainty = _rescale(distance, wanted), _rescale(-measure_entropy(logits), wanted)
        weights = (diversity * certainty / self.temperature).exp()
        return torch.where(diversity < (diversity * shares).sum(1, keepdim=True), 0, weights)

    def _measure_ratio(self, logits: Tensor) -> Tensor:
        """Return minus the expected logarithm of p / (1 - p), `(S, B)`; p is clipped at `most`."""
        p = logits.softmax(-1).clamp(max=self.most)
        return -(p * (p / (1 - p) + 1e-5).log()).sum(-1)


def _rescale(values: Tensor, wanted: Tensor) -> Tensor:
    """Shift and scale the wanted values `(S, B)` to [0, 1] in each row, to 0 if all are equal; clip the others."""
    low = values.masked_fill(~wanted, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~wanted, -torch.inf).amax(1, keepdim=True)
    return ((values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)).clamp(0, 1)


def _symmetric_cross_entropy(one: Tensor, other: Tensor) -> Tensor:
    """Return the mean of the cross entropies between softmax(one) and softmax(other), in both directions."""
    logs, others = one.log_softmax(-1), other.log_softmax(-1)
    return -(others.exp() * logs + logs.exp() * others).sum(-1) / 2
