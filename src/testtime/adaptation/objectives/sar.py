"""SAR: sharpness-aware and reliable entropy (Niu et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.objectives.eata import share
from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws


class SharpnessAwareEntropy(Entropy):
    """The entropy of reliable images, at the worst parameters nearby (SAR, Niu et al. 2023).

    An image is reliable if its entropy is below `margin` · ln K. The gradient is taken where a step of length `radius`
    along the gradient leads, over images that are reliable at both points. A replica is reset, with its moving average,
    when the moving average of this loss falls below `least`: its predictions have collapsed. A replica without reliable
    images takes no step.
    """

    margin, radius, momentum, least = 0.4, 0.05, 0.9, 0.2

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        numbers = replicas.packed.numbers
        self.state = {"average": torch.full((replicas.count,), -1.0, dtype=torch.float32, device=numbers.device)}
        self._reliable: Tensor | None = None  # (S, B), at the first of the two points
        self._loss: Tensor | None = None  # (S,), at the second

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        logits = self.replicas(images).float()
        entropy = measure_entropy(logits)
        reliable = (entropy < self.margin * math.log(logits.shape[-1])) & (weights > 0)
        self._reliable = reliable if self._reliable is None else reliable & self._reliable
        losses = torch.where(self._reliable, entropy * share(self._reliable.float()), 0).sum(1)
        self._loss, self.skipped = losses.detach(), ~self._reliable.any(1)
        return losses.sum()

    def descend(self, descend: Callable[..., None], loss: Callable[[], Tensor]) -> None:
        moving = list(self.list_moving().values())
        before, self._reliable = [tensor.detach().clone() for tensor in moving], None
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(), moving, materialize_grads=True)
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)  # (S,)
        scale = self.radius / (squares.sqrt() + 1e-12)
        self.later(tuple).result()  # what reads the parameters concurrently has finished
        for tensor, gradient in zip(moving, gradients, strict=True):
            tensor.add_(gradient * scale.view(-1, *[1] * (gradient.dim() - 1)))

        def go_back() -> None:
            for tensor, old in zip(moving, before, strict=True):
                tensor.copy_(old)

        descend(loss, go_back)

    def update(self, draws: Draws) -> None:
        assert self._loss is not None
        assert self.skipped is not None
        average = self.state["average"]
        moved = torch.where(average < 0, self._loss, average.lerp(self._loss, 1 - self.momentum))
        average.copy_(torch.where(self.skipped, average, moved))

    def expired(self) -> Tensor:
        average = self.state["average"]
        return (average >= 0) & (average < self.least)
