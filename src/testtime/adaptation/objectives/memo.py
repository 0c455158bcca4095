"""MEMO: the entropy of the mean prediction over augmented views of an image (Zhang et al. 2022)."""

from __future__ import annotations

import math

from torch import Tensor

from testtime.adaptation.objectives.entropy import Entropy
from testtime.augment import AugMix
from testtime.randomness import Draws


class MarginalEntropy(Entropy):
    """The entropy of the mean prediction over augmented views of an image (MEMO, Zhang et al. 2022).

    A view is an augmented copy, as in training, processed by AugMix with strength `severity`.
    """

    augments = True
    severity = 1.0

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        count, copies = images.shape[1], self.settings.copies
        views = self.make_copies(images, draws)  # (S, B·copies, C, h, w)
        keys = draws.flatten().copies(copies).keys.view(-1, 1)  # those of the copies
        mixed = AugMix(self.severity)(views.flatten(0, 1), Draws(keys)).reshape(views.shape)
        logs = self.replicas(mixed).float().log_softmax(-1).unflatten(1, (count, copies))
        mean = logs.logsumexp(2) - math.log(copies)  # logarithm of the mean probabilities, (S, B, K)
        return -(mean.exp() * mean).sum(-1)
