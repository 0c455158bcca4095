"""Which images to learn from, which updates to undo, and what to fall back to.

`gate` and `settle` judge an image and its update; watch.py follows a stream for what a single update does not show.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from testtime import kernels
from testtime.adaptation.prediction import Observation, Prediction

Fallback = Literal["undo", "shadow", "source", "freeze"]


@dataclass(frozen=True)
class Guard:
    """When to undo an update, and when to give up what a stream has learned; 0 turns a check off.

    An update is undone if it makes a value non-finite, raises the loss by more than `rise`, or is as long as `burst`
    says. A stream whose answers collapse, or whose weights go too far, does what `fallback` says; the image that shows
    it is answered by the network before the update. In streams, all this holds for each of them separately.

    Attributes:
        rise: Maximum increase of the mean loss on the images of an update.
        collapse: The answers have collapsed if their effective number of classes, exp(entropy) of the moving average of
            the predicted probabilities, is below this fraction of that of the original network on the same images. The
            comparison holds for streams of few classes too. It takes a forward pass of the original network.
        burst: Maximum length of an update, in standard deviations of the logarithm above its moving average. Longer
            ones count as if of that length, so that a lasting change is followed. The first 32 updates are not judged.
        distance: Maximum distance of the parameters from those of the original network, relative to their length.
        fallback: "undo": undo the update; "source": return to the original network; "freeze": the same, and learn
            nothing more until `reset()`; "shadow": return to a moving average of the weights, which takes the memory of
            a further replica. All but "undo" also reset what optimizer and objective remember.
        momentum: Of the moving averages of probabilities and lengths, per image and per update.
        shadow: Momentum of the moving average of the weights, per update.
    """

    rise: float = 3.0
    collapse: float = 0.5
    burst: float = 3.0
    distance: float = 0.5
    fallback: Fallback = "source"
    momentum: float = 0.99
    shadow: float = 0.999

    def __post_init__(self) -> None:
        if not self.rise > 0:
            raise ValueError(f"`rise` must be positive (infinity allows any finite rise), got {self.rise}.")
        for name in ("burst", "distance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` must be at least 0 (0: off), got {value}.")
        for name in ("collapse", "momentum", "shadow"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {value}.")
        if self.fallback not in get_args(Fallback):
            raise ValueError(f"`fallback` must be one of {', '.join(get_args(Fallback))}, got {self.fallback!r}.")

    @staticmethod
    def of(guard: float | Guard) -> Guard:
        """Return the guard that a number stands for, which limits only the rise of the loss; a `Guard` unchanged."""
        return guard if isinstance(guard, Guard) else Guard(guard, collapse=0, burst=0, distance=0, fallback="undo")

    def describe(self) -> dict[str, Any]:
        """Return the fields, JSON-serializable."""
        return asdict(self)


def gate(confidence: Tensor, threshold: float) -> Tensor:
    """Return a mask of the images to learn from: those with a confidence below the threshold; all for threshold 1."""
    return ~(confidence >= threshold) if threshold < 1 else torch.ones_like(confidence, dtype=torch.bool)


def settle(
    wanted: Tensor, before: Observation, after: Observation, sound: Tensor, alarmed: Tensor, rise: float | None
) -> tuple[Prediction, Tensor]:
    """Decide for S replicas with B images each whether to accept or undo their updates.

    Args:
        wanted: Which images the replicas learned from, bool `(S, B)`.
        before: Observation before learning.
        after: Observation after learning.
        sound: Whether a replica's values are finite and its stream is as it should be, bool `(S,)`.
        alarmed: Whether a replica's stream has collapsed or gone too far, bool `(S,)`.
        rise: Maximum increase of the mean loss of a replica's images; None: the loss was not measured.

    Returns:
        The predictions, `(S, B, ...)`, and which replicas to restore, bool `(S,)`.
    """
    if rise is None:  # in place of the loss: 0, or NaN where an answer is not finite
        none, checked = torch.zeros_like(before.loss), after.logits.sum(-1) * 0
        given = wanted, before.logits, none, after.logits, checked, sound, 0.0
    else:
        given = wanted, before.logits, before.loss, after.logits, after.loss, sound, rise
    settled = kernels.take_over("settle", *given)
    if settled is None:
        settled = _settle(*given)
    logits, loss, adapted, rolled_back, undone = settled
    loss = after.loss if rise is None else loss
    failed = wanted & alarmed[:, None]
    prediction = Prediction(logits, before.logits, before.loss, loss, before.confidence, adapted, rolled_back, failed)
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
