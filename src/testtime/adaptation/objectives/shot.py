"""SHOT-IM: information maximisation (Liang et al. 2020)."""

from __future__ import annotations

from torch import Tensor

from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.randomness import Draws


class InformationMaximization(Entropy):
    """The mean entropy of the predictions of a batch minus the entropy of its mean prediction (Liang et al. 2020).

    The second term prevents collapse to one class. Pseudo-labels, the other half of SHOT, need the whole test set.
    """

    epsilon = 1e-5

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        logits = self.replicas(images).float()
        mean = (logits.softmax(-1) * weights[..., None]).sum(1)  # (S, K)
        diversity = -(mean * (mean + self.epsilon).log()).sum()
        return (measure_entropy(logits) * weights).sum() - diversity
