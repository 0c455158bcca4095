"""The next images of a stream, observed together with the current ones.

An episode observes its images after learning, and the next episode its own before learning, both with the same
replicas: on a CPU, one forward pass of all is faster than two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.adaptation.objectives.base import Objective
from testtime.adaptation.prediction import Observation, Unclassified


class Lookahead:
    """Observes images for the episodes of a stream.

    Args:
        objective: The objective of the replicas.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._next: Tensor | None = None
        self._seen: Observation | Unclassified | None = None

    def expect(self, images: Tensor | None) -> None:
        """Set the images `(S, B, C, H, W)` that follow those of the next episode; None: none, or not known."""
        self._next = images if self._objective.joins else None

    def forget(self) -> None:
        """Discard what was observed of the next images, after a change of the replicas."""
        self._seen = None

    def measure_before(self, images: Tensor) -> Observation | Unclassified:
        """Observe images before learning."""
        seen, self._seen = self._seen, None
        return self._objective.measure(images) if seen is None else seen

    def measure_after(self, images: Tensor) -> Observation | Unclassified:
        """Observe images after learning, and the next ones."""
        if self._next is None:
            return self._objective.measure(images)
        both = self._objective.measure(torch.cat([images, self._next], dim=1))
        pairs = [tensor.split([images.shape[1], self._next.shape[1]], dim=1) for tensor in both]
        here, self._seen = (type(both)(*tensors) for tensors in zip(*pairs, strict=True))
        return here
