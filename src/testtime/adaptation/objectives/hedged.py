"""The task, hedged: the original network answers where it is better at the task than the one that learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.objectives.self_supervision import SelfSupervision
from testtime.adaptation.prediction import Observation, Unclassified
from testtime.adaptation.settings import Settings
from testtime.kernels.graphs import Concurrent, Later
from testtime.networks.replicas import Replicas

_LEAST = 0.05  # added to the losses, so that the chance of small ones does not count


class Hedged(SelfSupervision):
    """The task, with answers that are a mixture of those of the adapted and of the original network.

    What counts is whose loss in the task, on plain images before learning from them, was lower: with the ratio r of the
    moving averages, of the original network's to the adapted one's, the adapted network has the weight
    sigmoid(sharpness · (log r + margin)). If log r stays below -margin, the stream starts again from the original
    network. Images that are not learned from are answered by the adapted network. A `sharpness` of 0 does without the
    original one; otherwise the loss is measured in any case.

    Attributes:
        original: Observes with the original network; None: does without it.
    """

    sharpness, margin, recent, lasting = 40.0, 0.2, 0.9, 0.98

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        self.original: SelfSupervision | None = None
        if self.sharpness:
            assert replicas.example is not None
            self.settings = dataclasses.replace(settings, measure_loss=True)
            same = Replicas(replicas.net, replicas.count, (), replicas.example, replicas.dtype)
            same.batch_norms.use("source")
            self._apart = Concurrent(replicas.packed.numbers.device)  # nothing that learns has to wait for it
            self.original = SelfSupervision(same, self.settings, lambda function, *given: Later(function(*given)))
            self.state |= {name: self.make_average(2) for name in ("recent", "lasting")}

    def begin(self, images: Tensor, wanted: Tensor) -> None:
        if self.original is not None:
            self._wanted, self._seen_by_original = wanted.float(), self._apart.later(self.original.observe, images)

    def complete(self, *measured: Observation | Unclassified) -> list[Observation]:
        observed = super().complete(*measured)
        if self.original is None or len(observed) == 1:  # nothing was learned
            return observed
        original = self._seen_by_original.result()
        self.compare_networks(original, observed[0])
        trust = (self.sharpness * (self._measure_ratio("recent") + self.margin)).sigmoid().view(-1, 1, 1)
        trust = torch.where(self._wanted.unsqueeze(-1) > 0, trust, 1.0)
        return [one._replace(logits=torch.lerp(original.logits, one.logits, trust)) for one in observed]

    def compare_networks(self, original: Observation, adapted: Observation) -> None:
        """Follow the observations of both networks before learning."""
        losses = torch.stack([original.loss, adapted.loss], -1)  # (S, B, 2)
        for name in ("recent", "lasting"):
            self.follow(name, losses, getattr(self, name))

    def expired(self) -> Tensor | None:
        return None if self.original is None else self._measure_ratio("lasting") < -self.margin

    def make_average(self, size: int) -> Tensor:
        """Return a moving average of vectors at 0, `(S, size)`."""
        device = self.replicas.packed.numbers.device
        return torch.zeros(self.replicas.count, size, dtype=torch.float32, device=device)

    def follow(self, name: str, values: Tensor, momentum: float) -> None:
        """Move an average `(S, n)` of the state to the mean of values `(S, B, n)` of images that are learned from."""
        counts = self._wanted.sum(1, keepdim=True)
        mean = (values * self._wanted.unsqueeze(-1)).sum(1) / counts.clamp(min=1)
        self.state[name].lerp_(mean, 1 - momentum**counts)

    def _measure_ratio(self, name: str) -> Tensor:
        """Return the logarithm of the ratio of the losses of the original network and of the adapted one, `(S,)`."""
        theirs, ours = (self.state[name] + _LEAST).log().unbind(1)
        return theirs - ours
