"""What needs no gradient: answers corrected by those of the other images in a batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Correction(Protocol):
    """Corrects the answers to a batch of images."""

    def __call__(self, logits: Tensor, features: Tensor) -> Tensor:
        """Class logits `(N, K)` from the network's own and the features `(N, D)` in front of its last layer."""
        ...


class Lame:
    """Answers that agree with those of similar images (LAME, Boudiaf et al. 2022).

    Maximises the likelihood of the network's own answers plus the agreement of neighbours, by fixed-point iteration.

    Args:
        neighbours: How many nearest images count, by the cosine of their features.
        iterations: At most so many.
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
        answers, affinity = known.exp(), self._affinity(features)
        for _ in range(self.iterations):
            pulled = affinity @ answers
            renewed = (known + pulled).softmax(-1)
            if torch.allclose(renewed, answers, rtol=0, atol=1e-8):
                break
            answers = renewed
        return answers.clamp(min=torch.finfo(answers.dtype).tiny).log()

    def _affinity(self, features: Tensor) -> Tensor:
        """1 where an image is among another's nearest neighbours, itself left out, `(N, N)`."""
        count = len(features)
        unit = F.normalize(features.float(), dim=-1)
        similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
        nearest = similarity.topk(min(self.neighbours, max(0, count - 1)), dim=-1).indices
        return torch.zeros_like(similarity).scatter_(1, nearest, 1.0)
