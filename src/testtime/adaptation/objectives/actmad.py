"""ActMAD: moments of activations that match those of training (Mirza et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from testtime.adaptation.objectives.activations import compute_norm, find_channels, list_layers, watch
from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.networks.stacked_norms import NORMS
from testtime.networks.statistics import find_statistics
from testtime.randomness import Draws


class ActivationMatching(Objective):
    """The distance of the moments of activations to those of training (ActMAD, Mirza et al. 2023).

    Half the mean absolute differences of means and variances, summed over the outputs of the normalisation layers. The
    moments are those of the whole batch per channel; the paper has them per channel and position. Those of training
    are what `testtime.collect` adds to the network.
    """

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        statistics, device = find_statistics(replicas.net), replicas.packed.numbers.device
        known = list_layers(replicas, NORMS)
        self._layers = {name: layer for name, layer in known.items() if name in statistics.means}
        if not self._layers:
            raise ValueError("The network has no normalisation layers, whose activations the method compares.")
        self._moments = {
            name: (statistics.variances[name].to(device), statistics.means[name].to(device)) for name in self._layers
        }

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        return self._run(images)[1]

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        return (self._run(images, weights)[1] * weights).sum()

    def observe(self, images: Tensor) -> Observation:
        logits, loss = self._run(images)
        if self.settings.mirrored:
            logits = (logits + self.replicas(images.flip(-1)).float()) / 2
        return Observation(logits, loss, logits.softmax(-1).amax(-1))

    def _run(self, images: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits `(S, B, K)` and the distance of each batch, repeated for its images, `(S, B)`.

        Args:
            images: `(S, B, C, H, W)`.
            weights: Weight of each image in the moments of its batch, `(S, B)`; None: all the same.
        """
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}

        def see(name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
            values = compute_norm(layer, x, output).float().movedim(find_channels(layer), -1)
            # (replicas that share a call, B, n, C)
            values = values.unflatten(0, (-1, images.shape[1])).unsqueeze(2).flatten(2, -2)
            found.setdefault(name, []).append(torch.var_mean(values, 2, correction=0))

        with watch(self._layers, see):
            logits = self.replicas(images).float()
        distance = torch.zeros(len(images), dtype=torch.float32, device=logits.device)
        shares = torch.full_like(logits[..., 0], 1 / images.shape[1]) if weights is None else weights
        for name, calls in found.items():
            variances, means = (torch.cat(moments) for moments in zip(*calls, strict=True))  # of each image, (S, B, C)
            mean = (means * shares.unsqueeze(2)).sum(1)
            variance = ((variances + (means - mean.unsqueeze(1)).square()) * shares.unsqueeze(2)).sum(1)
            for moment, known in zip((variance, mean), self._moments[name], strict=True):
                distance = distance + (moment - known).abs().mean(1) / 2
        return logits, distance.unsqueeze(1).expand(images.shape[:2])
