"""Methods without gradients, which correct predictions by those of the other images in a batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Correction(Protocol):
    """Corrects the predictions of a batch of images."""

    def __call__(self, logits: Tensor, features: Tensor) -> Tensor:
        """Return corrected logits, from logits `(N, K)` and the inputs `(N, D)` of the last linear layer."""
        ...


class Lame:
    """Laplacian-adjusted maximum-likelihood estimation (LAME, Boudiaf et al. 2022).

    Maximises the likelihood under the network's predictions plus the agreement of neighbours, by fixed-point iteration.

    Args:
        neighbours: Number of nearest neighbours, by cosine similarity of the features.
        iterations: Maximum number of iterations.
    """

    def __init__(self, neighbours: int = 5, iterations: int = 100) -> None:
        self.neighbours, self.iterations = neighbours, iterations

    def __call__(self, logits: Tensor, features: Tensor) -> Tensor:
        sound = logits.isfinite().all(-1) & features.isfinite().all(-1)
        if not sound.all():  # an image of NaN has no neighbours
            corrected = logits.clone()
            corrected[sound] = self(logits[sound], features[sound])
            return corrected
        known = logits.log_softmax(-1)
        probabilities, affinity = known.exp(), self._affinity(features)
        for _ in range(self.iterations):
            pulled = affinity @ probabilities
            updated = (known + pulled).softmax(-1)
            if torch.allclose(updated, probabilities, rtol=0, atol=1e-8):
                break
            probabilities = updated
        return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()

    def _affinity(self, features: Tensor) -> Tensor:
        """Return the adjacency matrix `(N, N)` of the nearest neighbours, excluding the image itself."""
        count = len(features)
        unit = F.normalize(features.float(), dim=-1)
        similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
        nearest = similarity.topk(min(self.neighbours, max(0, count - 1)), dim=-1).indices
        return torch.zeros_like(similarity).scatter_(1, nearest, 1.0)
