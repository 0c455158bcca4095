"""ETA and EATA: the entropy of reliable images that are not redundant (Niu et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.networks.statistics import find_statistics
from testtime.randomness import Draws


class ReliableEntropy(Entropy):
    """The entropy of reliable images that are not redundant (ETA, Niu et al. 2022).

    An image is reliable if its entropy is below `margin` · ln K, and redundant if the cosine similarity of its
    probabilities to their moving mean is at least `similarity`. It is weighted by exp(margin · ln K - entropy). A
    replica without such images takes no step.
    """

    margin, similarity, momentum = 0.4, 0.4, 0.9

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        device = replicas.packed.numbers.device
        self.state = {"mean": torch.zeros(replicas.count, self.count_classes(), dtype=torch.float32, device=device)}

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        logits = self.replicas(images).float()
        entropy, margin = measure_entropy(logits), self.margin * math.log(logits.shape[-1])
        chosen = self._choose(logits.detach(), (entropy < margin) & (weights > 0)).float()
        weighted = entropy * (margin - entropy.detach()).exp()
        return torch.where(chosen > 0, weighted * share(chosen), 0).sum()

    def _choose(self, logits: Tensor, reliable: Tensor) -> Tensor:
        """Return which images to learn from, bool `(S, B)`, and update the moving mean with them."""
        probabilities, mean = logits.softmax(-1), self.state["mean"]
        known = mean.any(-1, keepdim=True)  # (S, 1)
        alike = F.cosine_similarity(probabilities, mean[:, None], dim=-1).abs() >= self.similarity
        chosen = reliable & ~(alike & known)
        self.skipped = ~chosen.any(1)
        found = torch.where(chosen[..., None], probabilities * share(chosen.float())[..., None], 0).sum(1)
        found = torch.where(known, mean.lerp(found, 1 - self.momentum), found)
        mean.copy_(torch.where(self.skipped[:, None], mean, found))
        return chosen


class AnchoredEntropy(ReliableEntropy):
    """ETA with a penalty on changes of parameters that matter to the source network (EATA, Niu et al. 2022).

    The penalty is `penalty` times the squared changes, weighted by the Fisher information that `testtime.collect` adds
    to the network.
    """

    penalty = 1.0

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        fisher, device = find_statistics(replicas.net).fisher, replicas.packed.numbers.device
        self._anchors = [
            (tensor, tensor.detach()[:1].clone(), fisher[name].to(device))
            for name, tensor in self.list_moving().items()
            if name in fisher
        ]

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        changes = [(weight * (tensor - source).square()).sum() for tensor, source, weight in self._anchors]
        return super().total(images, draws, weights) + self.penalty * torch.stack(changes).sum()


def share(chosen: Tensor) -> Tensor:
    """Return the weight of each image in the mean over the chosen ones of its replica, from flags 0 or 1 `(S, B)`."""
    return chosen / chosen.sum(1, keepdim=True).clamp(min=1)
