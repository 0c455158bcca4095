"""Gradients of the two mean losses of a batch, their inner products, and the network's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.diagnosis.gradients import Products, differentiate, freeze, join_features, name_layers, split_views
from testtime.kernels.graphs import Captured, can_record, record
from testtime.networks.ynet import YNet
from testtime.tasks import Task

CONFIDENT = 0.9
STAND_IN, BALANCE = -2, -1  # indices of the two unsupervised losses of a batch


class Outputs(NamedTuple):
    """The outputs of a network for a batch of N images.

    Attributes:
        logits: Class logits, `(N, K)`.
        losses: The task's loss of each view, `(N, V)`.
        errors: The task's error of each view, `(N, V)`.
        offsets: The predicted minus the correct class of each view, modulo the number of classes, int `(N, V)`; 0 for
            tasks without classes.
    """

    logits: Tensor
    losses: Tensor
    errors: Tensor
    offsets: Tensor

    @staticmethod
    def join(parts: Sequence[Outputs]) -> Outputs:
        """Concatenate outputs, on the CPU."""
        return Outputs(*(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)))

    def pick(self, rows: Tensor) -> Outputs:
        """Select images by index, int `(n,)`."""
        return Outputs(*(tensor[rows] for tensor in self))


def observe(net: YNet, task: Task, images: Tensor) -> Outputs:
    """Return the outputs of a network in evaluation mode for images `(N, C, H, W)`."""
    views, targets = task.probe(images)
    outputs = net.self_supervise(views)
    losses = task.loss(outputs, targets).view(len(images), -1)
    return Outputs(net(images).float(), losses, *_compare(task, outputs, targets, losses))


def _compare(task: Task, outputs: Tensor, targets: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return `errors` and `offsets` of the task's outputs for views whose losses are `(N, V)`."""
    errors = task.error(outputs, targets).view_as(losses)
    if task.outputs is None:
        return errors, torch.zeros_like(losses, dtype=torch.int64)
    return errors, ((outputs.argmax(1) - targets) % task.outputs).view_as(losses)


class BatchGradients:
    """Inner products of the gradients of the two mean losses of a batch.

    Args:
        net: The network; it is copied.
        task: The self-supervised task.
        confident: Minimum probability for a prediction to be used as a label.
    """

    def __init__(self, net: YNet, task: Task, confident: float = CONFIDENT) -> None:
        self.net, self.task, self.confident = freeze(net), task, confident
        self.net.encoder.requires_grad_(True)
        self.layers = name_layers(self.net.encoder)
        self._parameters = dict(self.net.encoder.named_parameters())
        self._graphs: dict[tuple[Any, ...], Captured | None] = {}

    def measure(self, images: Tensor, labels: Tensor | None) -> tuple[Products, Outputs]:
        """Return the inner products of one batch, and the network's outputs for its images.

        Args:
            images: `(N, C, H, W)` on the network's device.
            labels: int `(N,)`, or None.

        Returns:
            Products with N = 1, for the labels (if given), the stand-ins and the balance; and the outputs.
        """
        inputs = (images,) if labels is None else (images, labels)
        key = (*images.shape, images.dtype, labels is None)
        with torch.inference_mode(False), torch.enable_grad():
            if can_record(images.device) and key not in self._graphs:
                self._graphs[key] = record(lambda: Captured(self._compute, *inputs))
            graph = self._graphs.get(key) or self._compute
            found = graph(*inputs)
        return Products(*found[:3]), Outputs(*found[3:])

    def _compute(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        others, targets, shared = split_views(self.task, images)
        plain = self.net.encoder(self.net.normalise(images))
        features = join_features(plain, self.net.encoder(self.net.normalise(others)), shared)
        answers = self.net.supervise(features)
        losses = self.task.loss(answers, targets).view(len(images), -1)
        logits = self.net.classifier(plain).float()
        probabilities = logits.detach().softmax(1)
        sure = (probabilities.amax(1) >= self.confident).float()
        stand_in = F.cross_entropy(logits, probabilities.argmax(1), reduction="none") * sure
        mains = [] if labels is None else [F.cross_entropy(logits, labels)]
        mains.append(stand_in.sum() / sure.sum().clamp(min=1))
        shares = logits.softmax(1).mean(0)
        mains.append((shares * shares.clamp(min=1e-12).log()).sum())  # KL divergence from uniform, minus log K
        task = differentiate(losses.mean(), self._parameters)
        gradients = [differentiate(loss, self._parameters) for loss in mains]
        return (
            torch.stack([self._sums(main, task) for main in gradients]).unsqueeze(2),
            torch.stack([self._sums(main, main) for main in gradients]).unsqueeze(2),
            self._sums(task, task).unsqueeze(1),
            logits.detach(),
            losses.detach(),
            *_compare(self.task, answers.detach(), targets, losses),
        )

    def _sums(self, one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> Tensor:
        """Return inner products per layer, `(L,)`."""
        sums = {name: (one[name] * two[name]).sum() for name in self._parameters}
        return torch.stack([torch.stack([sums[name] for name in names]).sum() for names in self.layers.values()])
