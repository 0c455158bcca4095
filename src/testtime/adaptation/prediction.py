"""What an adapter answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from testtime.randomness import has_triton


@dataclass(frozen=True)
class Prediction:
    """What an adapter answers for N images. No tensor holds a graph.

    Attributes:
        logits: Class logits after adaptation, `(N, K)`.
        logits_before: Class logits of the same network before this adaptation, `(N, K)`.
        loss_before: The task's loss on the image before adaptation, `(N,)`.
        loss_after: The task's loss on the image after adaptation, `(N,)`.
        confidence: The task's confidence in the plain image before adaptation, in [0, 1], `(N,)`.
        adapted: Whether the answer comes from a network that learned from the image, bool `(N,)`.
        rolled_back: Whether the guard undid what was learned, bool `(N,)`.
    """

    logits: Tensor
    logits_before: Tensor
    loss_before: Tensor
    loss_after: Tensor
    confidence: Tensor
    adapted: Tensor
    rolled_back: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def classes(self) -> Tensor:
        """The predicted classes, `(N,)`."""
        return self.logits.argmax(-1)

    @staticmethod
    def join(parts: list[Prediction]) -> Prediction:
        """One prediction for the images of several, in their order."""
        return Prediction(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Prediction)))

    def __getitem__(self, index: Any) -> Prediction:
        return Prediction(*(getattr(self, f.name)[index] for f in fields(Prediction)))


def settle(
    wanted: Tensor,
    logits_before: Tensor,
    loss_before: Tensor,
    confidence: Tensor,
    logits: Tensor,
    loss_after: Tensor,
    finite: Tensor,
    guard: float,
) -> tuple[Prediction, Tensor]:
    """What S replicas answer for B images each after learning, and whose learning must be undone.

    Args:
        wanted: From which images they learned, bool `(S, B)`.
        logits_before: `(S, B, K)`.
        loss_before: The task's loss, `(S, B)`.
        confidence: `(S, B)`.
        logits: After learning.
        loss_after: After learning.
        finite: Whether a replica has only finite numbers, bool `(S,)`.
        guard: By how much the mean loss of a replica's images may rise.

    Returns:
        The answers, every tensor `(S, B, ...)`, and which replicas are to be put back, bool `(S,)`.
    """
    if wanted.is_cuda and has_triton():
        from testtime import kernels  # the same in one launch

        given = wanted, logits_before, loss_before, logits, loss_after, finite, guard
        logits, loss_after, adapted, rolled_back, undone = kernels.settle(*given)
        answers = Prediction(logits, logits_before, loss_before, loss_after, confidence, adapted, rolled_back)
        return answers, undone
    risen = torch.where(wanted, loss_after - loss_before, 0).sum(1) / wanted.sum(1).clamp(min=1)
    sound = (risen <= guard) & finite  # a loss that is not a number compares false
    adapted = wanted & sound[:, None]
    answers = Prediction(
        logits=torch.where(adapted[..., None], logits, logits_before),
        logits_before=logits_before,
        loss_before=loss_before,
        loss_after=torch.where(adapted, loss_after, loss_before),
        confidence=confidence,
        adapted=adapted,
        rolled_back=wanted & ~sound[:, None],
    )
    return answers, ~(wanted.any(1) & sound)
