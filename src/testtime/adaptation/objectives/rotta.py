"""RoTTA: a mean teacher, a balanced memory, and robust statistics (Yuan et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.adaptation.objectives.activations import list_layers, watch
from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.objectives.entropy import measure_entropy
from testtime.adaptation.objectives.memory import Memory
from testtime.adaptation.settings import Settings
from testtime.augment import as_floats
from testtime.kernels import possibly_any
from testtime.networks.replicas import Replicas
from testtime.networks.stacked_norms import BatchNorm
from testtime.randomness import Draws


class RobustTeacher(Objective):
    """Cross entropy to a mean teacher on a balanced memory of recent images (RoTTA, Yuan et al. 2023).

    A call adds its images to a memory of `capacity` images. A step follows once as many were added since the last one:
    with batches of 64 after every call, with single images after every 64th; with larger batches once per call. In a
    step the statistics of Batch Normalization move towards those of the memory by `rate`, in student and teacher, and
    the teacher moves towards the student by 1 - `momentum`.
    """

    capacity, momentum, rate = 64, 0.999, 0.05

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        assert replicas.example is not None
        self.teacher, self._classes = replicas.twin(), self.count_classes()
        kinds = (BatchNorm, nn.modules.batchnorm._BatchNorm) if settings.statistics == "running" else ()
        self._norms = [list_layers(both, kinds) for both in (replicas, self.teacher)]
        self._memory = self._added = Memory.make_empty(replicas.count, self.capacity, replicas.example)
        self._waiting = torch.zeros(replicas.count, dtype=torch.int64, device=replicas.packed.numbers.device)
        self.state = {
            **{f"memory/{name}": tensor for name, tensor in self._memory._asdict().items()},
            "waiting": self._waiting.clone(),  # images since the last step
            "teacher": self.teacher.packed.numbers,
            **{f"teacher/{name}": t for name, t in self.teacher.tensors.items() if not isinstance(t, nn.Parameter)},
        }

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        return _cross_entropy(self.replicas(images), self.teacher(images))

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        wanted = weights > 0
        with torch.no_grad():
            logits = self.teacher(images).float()
            offered = as_floats(images), logits.argmax(-1), measure_entropy(logits), wanted
            self._added = self._memory.add(*offered, self._classes)
        self._waiting = self.state["waiting"] + wanted.sum(1)
        self.skipped = self._waiting < self.capacity
        if not possibly_any(~self.skipped):
            return torch.stack([tensor.sum() for tensor in self.list_moving().values()]).sum() * 0
        return self._compare(draws).sum()

    def observe(self, images: Tensor) -> Observation:
        logits = self.teacher(images).float()
        return Observation(logits, _cross_entropy(self.replicas(images), logits), logits.softmax(-1).amax(-1))

    def update(self, draws: Draws) -> None:
        assert self.skipped is not None
        for tensor, new in zip(self._memory, self._added, strict=True):
            tensor.copy_(new)
        self.state["waiting"].copy_(torch.where(self.skipped, self._waiting, 0))
        teacher, steps = self.teacher.packed.numbers, (~self.skipped).float().unsqueeze(1)
        teacher.lerp_(self.replicas.packed.numbers, (1 - self.momentum) * steps)

    def _compare(self, draws: Draws) -> Tensor:
        """Return the loss of each replica on its memory, `(S,)`, younger images weighted more; moves the statistics."""
        memory, filled = self._added, self._added.labels >= 0
        shares = filled.float() / filled.sum(1, keepdim=True).clamp(min=1)
        keys = Draws(draws.keys[:, 0]).purpose("memory").copies(self.capacity).keys
        assert self.settings.augment is not None
        views = self.settings.augment(memory.images.flatten(0, 1), Draws(keys.view(-1, 1)))[:, 0]
        self.replicas.batch_norms.train(False)
        see = _make_robust(shares, self.rate * (self._waiting >= self.capacity).float())
        with torch.no_grad(), watch(self._norms[1], see):
            targets = self.teacher(memory.images)
        with watch(self._norms[0], see):
            outputs = self.replicas(views.unflatten(0, filled.shape))
        weights = shares * torch.sigmoid(-memory.age.float() / self.capacity)
        return (_cross_entropy(outputs, targets) * weights).sum(1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of softmax(logits) to softmax(targets), `(...)`."""
    return -(targets.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


def _make_robust(shares: Tensor, rate: Tensor) -> Callable[..., Tensor]:
    """Return a function that normalises as Batch Normalization does, with running statistics that it moves first.

    Args:
        shares: Weight of each image in the statistics of its replica, `(S, M)`.
        rate: How far the statistics of each replica move, `(S,)`.
    """

    def normalise(name: str, layer: Any, x: Tensor, output: Tensor) -> Tensor:
        values = x.float().reshape(*shares.shape, x.shape[1], -1)  # (S, M, C, n)
        mean = (values.mean(-1) * shares.unsqueeze(2)).sum(1)  # (S, C)
        variance = ((values - mean[:, None, :, None]).square().mean(-1) * shares.unsqueeze(2)).sum(1)
        moved = []
        for running, found in ((layer.running_mean, mean), (layer.running_var, variance)):
            moved.append(torch.lerp(running.view_as(found), found, rate.unsqueeze(1).expand_as(found)))
            running.copy_(moved[-1].detach().view_as(running))
        mean, variance = (tensor[:, None, :, None] for tensor in moved)
        values = (values - mean) * (variance + layer.eps).rsqrt()
        if layer.weight is not None:
            weight, bias = (tensor.reshape(-1, 1, x.shape[1], 1).float() for tensor in (layer.weight, layer.bias))
            values = values * weight + bias
        values = values.reshape(x.shape).to(x.dtype)
        return F.relu(values) if getattr(layer, "relu", False) else values

    return normalise
