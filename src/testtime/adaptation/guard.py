"""Which images to learn from, and which updates to undo."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime import kernels
from testtime.adaptation.objectives import Observation
from testtime.adaptation.prediction import Prediction


def gate(confidence: Tensor, threshold: float) -> Tensor:
    """Return a mask of the images to learn from: those with a confidence below the threshold; all for threshold 1."""
    return ~(confidence >= threshold) if threshold < 1 else torch.ones_like(confidence, dtype=torch.bool)


def settle(
    wanted: Tensor, before: Observation, after: Observation, finite: Tensor, guard: float
) -> tuple[Prediction, Tensor]:
    """Decide for S replicas with B images each whether to accept or undo their updates.

    Args:
        wanted: Which images the replicas learned from, bool `(S, B)`.
        before: Observation before learning.
        after: Observation after learning.
        finite: Whether all values of a replica are finite, bool `(S,)`.
        guard: Maximum increase of the mean loss of a replica's images.

    Returns:
        The predictions, `(S, B, ...)`, and which replicas to restore, bool `(S,)`.
    """
    given = wanted, before.logits, before.loss, after.logits, after.loss, finite, guard
    settled = kernels.take_over("settle", *given)
    if settled is None:
        settled = _settle(*given)
    logits, loss, adapted, rolled_back, undone = settled
    prediction = Prediction(logits, before.logits, before.loss, loss, before.confidence, adapted, rolled_back)
    return prediction, undone


def _settle(
    wanted: Tensor,
    logits_before: Tensor,
    loss_before: Tensor,
    logits_after: Tensor,
    loss_after: Tensor,
    finite: Tensor,
    guard: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logits and losses of the predictions, which images are adapted or rolled back, which replicas undone."""
    risen = torch.where(wanted, loss_after - loss_before, 0).sum(1) / wanted.sum(1).clamp(min=1)
    sound = (risen <= guard) & finite  # false for a NaN loss
    adapted = wanted & sound[:, None]
    logits = torch.where(adapted[..., None], logits_after, logits_before)
    loss = torch.where(adapted, loss_after, loss_before)
    return logits, loss, adapted, wanted & ~sound[:, None], ~(wanted.any(1) & sound)
