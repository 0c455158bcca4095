"""Objectives: losses on unlabelled images.

An `Objective` belongs to S replicas. It defines the loss to minimise (`loss`) and the outputs on plain images before
and after learning (`observe`). It may have state, e.g. a teacher or moving averages: tensors with a row per replica,
which are saved, reset and restored together with the replicas.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws


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


class Objective(abc.ABC):
    """Base class of the objectives of S replicas.

    Args:
        replicas: The replicas.
        settings: The settings; task and augmentation must be set.
        later: Starts a function concurrently and returns a future with `result()`.
    """

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        self.replicas, self.settings, self.later = replicas, settings, later
        self.state: dict[str, Tensor] = {}
        """State of the objective by name, `(S, ...)` each."""

    @abc.abstractmethod
    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the loss `(S, B)` of images `(S, B, C, H, W)`; `draws` has keys `(S, B)`."""

    @abc.abstractmethod
    def observe(self, images: Tensor) -> Observation:
        """Return the outputs of the replicas on plain images `(S, B, C, H, W)`."""

    def descend(self, descend: Callable[[Callable[[], Tensor]], None], loss: Callable[[], Tensor]) -> None:
        """Minimise the loss that a function computes; by default with one optimizer step."""
        descend(loss)

    def update(self, draws: Draws) -> None:  # noqa: B027 (optional)
        """Update the state of the objective after a step."""

    def classify(self, images: Tensor, features: Tensor | None = None) -> Tensor:
        """Return class logits `(S, B, K)` of images, reusing their features if given."""
        logits = self.replicas.classify(self.replicas.encode(images) if features is None else features).float()
        if self.settings.mirrored:
            logits = (logits + self.replicas(images.flip(-1)).float()) / 2
        return logits
