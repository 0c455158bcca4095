"""The predictions of an adapter, and what they are made from: observations before and after learning."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Observation(NamedTuple):
    """Outputs of S replicas on B plain images each.

    Attributes:
        logits: Class logits `(S, B, K)`.
        loss: The objective's loss `(S, B)`.
        confidence: Confidence in [0, 1], `(S, B)`.
    """

    logits: Tensor
    loss: Tensor
    confidence: Tensor


class Unclassified(NamedTuple):
    """An observation whose logits are still to be computed, from features.

    Attributes:
        features: Features of the images, `(S, B, ...)`.
        loss: As of an `Observation`.
        confidence: As of an `Observation`.
    """

    features: Tensor
    loss: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Prediction:
    """Predictions of an adapter for N images, detached from the graph.

    Attributes:
        logits: Class logits after adaptation, `(N, K)`.
        logits_before: Class logits of the same network before this adaptation, `(N, K)`.
        loss_before: The objective's loss on the image before adaptation, `(N,)`; NaN if it was not measured.
        loss_after: The objective's loss on the image after adaptation, `(N,)`, or NaN.
        confidence: The objective's confidence on the plain image before adaptation, in [0, 1], `(N,)`, or NaN.
        adapted: Whether the logits come from a network adapted to the image, bool `(N,)`.
        rolled_back: Whether the guard undid the update, bool `(N,)`.
        alarmed: Whether it did so since the stream has collapsed or gone too far, see `Guard`, bool `(N,)`.
    """

    logits: Tensor
    logits_before: Tensor
    loss_before: Tensor
    loss_after: Tensor
    confidence: Tensor
    adapted: Tensor
    rolled_back: Tensor
    alarmed: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def classes(self) -> Tensor:
        """The predicted classes, `(N,)`."""
        return self.logits.argmax(-1)

    @staticmethod
    def unadapted(logits: Tensor, loss: Tensor, confidence: Tensor) -> Prediction:
        """Make the predictions of a network that did not adapt to the images."""
        no = torch.zeros_like(loss, dtype=torch.bool)
        return Prediction(logits, logits.clone(), loss, loss.clone(), confidence, no, no.clone(), no.clone())

    @staticmethod
    def join(parts: list[Prediction]) -> Prediction:
        """Concatenate predictions."""
        return Prediction(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Prediction)))

    def __getitem__(self, index: Any) -> Prediction:
        return Prediction(*(getattr(self, f.name)[index] for f in fields(Prediction)))
