"""Objectives: losses on unlabelled images.

An `Objective` belongs to S replicas. It defines the loss to minimise (`loss`) and the outputs on plain images before
and after learning (`observe`). It may have state, e.g. a teacher or moving averages: tensors with a row per replica,
which are saved, reset and restored together with the replicas.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.prediction import Observation, Unclassified
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws


class Objective(abc.ABC):
    """Base class of the objectives of S replicas.

    Its constants are class attributes, which `Settings.constants` overrides.

    Attributes:
        joins: Whether `measure` observes several images of a replica as if each were alone.
        augments: Whether a step takes augmented copies of an image, rather than the image itself.
        measures: Whether the observations have a loss, rather than NaN.

    Args:
        replicas: The replicas.
        settings: The settings; task and augmentation must be set.
        later: Starts a function concurrently and returns a future with `result()`.
    """

    joins = False
    augments = False
    measures = True

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        self.replicas, self.settings, self.later = replicas, settings, later
        self.state: dict[str, Tensor] = {}
        """State of the objective by name, `(S, ...)` each."""
        self.skipped: Tensor | None = None
        """Which replicas take no step, bool `(S,)`, decided by `total`; None: all take it."""
        for name, value in settings.constants.items():
            setattr(self, name, value)

    @abc.abstractmethod
    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the loss `(S, B)` of images `(S, B, C, H, W)`; `draws` has keys `(S, B)`."""

    @abc.abstractmethod
    def observe(self, images: Tensor) -> Observation:
        """Return the outputs of the replicas on plain images `(S, B, C, H, W)`."""

    def measure(self, images: Tensor) -> Observation | Unclassified:
        """Observe images, but leave their classification to `complete`, if that can as well be done later."""
        return self.observe(images)

    def complete(self, *measured: Observation | Unclassified) -> list[Observation]:
        """Return the observations of what `measure` returned, before or after a step, by classifying all at once."""
        features = [one.features for one in measured if isinstance(one, Unclassified)]
        if not features:
            return [one for one in measured if isinstance(one, Observation)]
        classified = self.replicas.classify(torch.cat(features, dim=1)).float()
        logits = iter(classified.split([one.shape[1] for one in features], dim=1))
        return [one if isinstance(one, Observation) else Observation(next(logits), *one[1:]) for one in measured]

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        """Return the sum over replicas of what a step minimises, `()`: by default, of the weighted mean loss.

        Args:
            images: `(S, B, C, H, W)`.
            draws: Random keys `(S, B)` of this step.
            weights: Weight of each image within its replica, `(S, B)`; 0 for an image that is not learned from.
        """
        return (self.loss(images, draws) * weights).sum()

    def begin(self, images: Tensor, wanted: Tensor) -> None:  # noqa: B027 (optional)
        """See the images `(S, B, C, H, W)` of an episode, and which are learned from, bool `(S, B)`, before any step.

        The state must not change here, since it may still be being copied; `update` follows.
        """

    def descend(self, descend: Callable[..., None], loss: Callable[[], Tensor]) -> None:
        """Minimise the total that a function computes; by default with one optimizer step.

        Args:
            descend: Takes an optimizer step on the loss that its first argument computes; the second, if given, is
                called between gradient and update.
            loss: Computes `total`.
        """
        descend(loss)

    def update(self, draws: Draws) -> None:  # noqa: B027 (optional)
        """Update the state of the objective after a step."""

    def expired(self) -> Tensor | None:
        """Return which replicas to reset to the source after an episode, bool `(S,)`; None: none."""
        return None

    def make_copies(self, images: Tensor, draws: Draws) -> Tensor:
        """Return augmented copies `(S, B·copies, C, h, w)` of images `(S, B, C, H, W)`."""
        assert self.settings.augment is not None
        copies = self.settings.augment(images.flatten(0, 1), draws.flatten().copies(self.settings.copies))
        return copies.flatten(0, 1).unflatten(0, (len(images), -1))

    def list_moving(self) -> dict[str, Tensor]:
        """Return the parameters that learn, by name, `(S, ...)` each."""
        return {name: tensor for name, tensor in self.replicas.packed.parameters.items() if tensor.requires_grad}

    @torch.no_grad()
    def count_classes(self) -> int:
        """Return the number of classes, K."""
        example = self.replicas.example
        assert example is not None
        return self.replicas(example.expand(self.replicas.count, *example.shape)).shape[-1]

    def classify(self, images: Tensor, features: Tensor | None = None, mirrored: Tensor | None = None) -> Tensor:
        """Return class logits `(S, B, K)` of images; reuses features of them and of their mirror images, if given."""
        logits = self.replicas.classify(self.replicas.encode(images) if features is None else features).float()
        if self.settings.mirrored:
            other = self.replicas(images.flip(-1)) if mirrored is None else self.replicas.classify(mirrored)
            logits = (logits + other.float()) / 2
        return logits
