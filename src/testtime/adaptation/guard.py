"""Which images to learn from, and whose learning must be undone."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime import kernels
from testtime.adaptation.objectives import Observation
from testtime.adaptation.prediction import Prediction


def gate(confidence: Tensor, threshold: float) -> Tensor:
    """Which images to learn from: those that the network is not already sure of, bool; at 1 all of them."""
    return ~(confidence >= threshold) if threshold < 1 else torch.ones_like(confidence, dtype=torch.bool)


def settle(
    wanted: Tensor, before: Observation, after: Observation, finite: Tensor, guard: float
) -> tuple[Prediction, Tensor]:
    """What S replicas answer for B images each after learning, and whose learning must be undone.

    Args:
        wanted: From which images they learned, bool `(S, B)`.
        before: What they said before learning.
        after: What they say now.
        finite: Whether a replica has only finite numbers, bool `(S,)`.
        guard: By how much the mean loss of a replica's images may rise.

    Returns:
        The answers, every tensor `(S, B, ...)`, and which replicas are to be put back, bool `(S,)`.
    """
    given = wanted, before.logits, before.loss, after.logits, after.loss, finite, guard
    settled = kernels.take_over("settle", *given)
    if settled is None:
        settled = _settle(*given)
    logits, loss, adapted, rolled_back, undone = settled
    answers = Prediction(logits, before.logits, before.loss, loss, before.confidence, adapted, rolled_back)
    return answers, undone


def _settle(
    wanted: Tensor,
    logits_before: Tensor,
    loss_before: Tensor,
    logits_after: Tensor,
    loss_after: Tensor,
    finite: Tensor,
    guard: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits and losses of the answers, which images are adapted, which rolled back, which replicas undone."""
    risen = torch.where(wanted, loss_after - loss_before, 0).sum(1) / wanted.sum(1).clamp(min=1)
    sound = (risen <= guard) & finite  # a loss that is not a number compares false
    adapted = wanted & sound[:, None]
    logits = torch.where(adapted[..., None], logits_after, logits_before)
    loss = torch.where(adapted, loss_after, loss_before)
    return logits, loss, adapted, wanted & ~sound[:, None], ~(wanted.any(1) & sound)
