"""DUA: running statistics of Batch Normalization that follow the stream (Mirza et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws


class MovingStatistics(Entropy):
    """Running statistics of Batch Normalization that follow the stream, without a gradient (DUA, Mirza et al. 2022).

    Augmented copies of an image form the batch. In step t the statistics move towards those of the batch by
    `start` · `decay`ᵗ + `least`.
    """

    augments = True
    start, decay, least = 0.1, 0.94, 0.005

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        device = replicas.packed.numbers.device
        self.state = {"momentum": torch.full((replicas.count,), self.start, dtype=torch.float32, device=device)}
        self._moments: list[tuple[Tensor, float]] = []  # (S, C), and by how much the layer itself moves them
        for name, tensor in replicas.tensors.items():
            owner, _, kind = name.rpartition(".")
            if kind in ("running_mean", "running_var"):
                momentum: Any = replicas.net.get_submodule(owner).momentum
                if not momentum:
                    raise ValueError(f"The momentum of {owner} must be positive, got {momentum}.")
                self._moments.append((tensor, momentum))

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        logits = self.replicas(self.make_copies(images, draws)).float()  # (S, B·copies, K)
        return measure_entropy(logits).unflatten(1, (images.shape[1], -1)).mean(-1)

    def descend(self, descend: Callable[..., None], loss: Callable[[], Tensor]) -> None:
        before = [tensor.clone() for tensor, _ in self._moments]
        loss()  # a forward pass in training mode, which moves the statistics
        rate = self.state["momentum"].mul_(self.decay) + self.least
        for (tensor, momentum), old in zip(self._moments, before, strict=True):
            tensor.copy_(old + (tensor - old) * (rate / momentum)[:, None])
