"""Rehearsal: the task on the current image, certain and diverse predictions on recent ones, and only where it is hard.

TTT (Sun et al. 2020) with the information maximisation of SHOT (Liang et al. 2020), whose batch is drawn from a memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.objectives.entropy import measure_entropy
from testtime.adaptation.objectives.hedged import Hedged
from testtime.adaptation.prediction import Observation
from testtime.adaptation.settings import Settings
from testtime.augment import as_floats
from testtime.kernels import possibly_any
from testtime.networks.replicas import Replicas, compute_both
from testtime.networks.task_loss import EASY, read_task_loss
from testtime.randomness import Draws

_EPSILON = 1e-5
_FEW, _MANY = 0.6, 0.9  # entropy of the classes of a stream, relative to the maximum


class Rehearsal(Hedged):
    """The hedged task on copies of the image, plus information maximisation on crops drawn from recent images.

    The memory holds the last `memory` images of a stream, in 8 bits; 0 does without. As many crops are drawn from it as
    there are copies. Their loss, see `measure_information`, has the weight `weight`, and proportionally less while the
    memory is being filled, and while recent answers are of few classes, see `measure_diversity`.

    A stream learns only while the task is harder than in training: while the moving average of its loss on the copies
    exceeds `drift` times the loss in training, see `read_task_loss`. The average starts at that limit. A `drift` of 0,
    or a network of which the loss is not known, always learns.
    """

    memory, weight, drift, momentum = 64, 2.0, EASY, 0.99
    compares = True
    """That it compares with the statistics of training images, if there are any."""

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        assert replicas.example is not None
        known, device = read_task_loss(replicas.net, "copies", seen=True), replicas.packed.numbers.device
        self._limit = 0.0 if known is None else self.drift * known.loss
        self._average = torch.full((replicas.count,), self._limit, dtype=torch.float32, device=device)
        self.state |= {"average": self._average.clone()} if self._limit else {}
        if self.memory:
            shape = replicas.count, int(self.memory), *replicas.example.shape[1:]
            self.state["images"] = torch.zeros(shape, dtype=torch.uint8, device=device)
            self.state["seen"] = torch.zeros(replicas.count, dtype=torch.int64, device=device)
        if self.original is not None:
            self.state["classes"] = self.make_average(self.count_classes())

    def begin(self, images: Tensor, wanted: Tensor) -> None:
        super().begin(images, wanted)
        if self.memory:
            held = self.state["images"], self.state["seen"]
            self._images, self._seen = add_images(*held, (as_floats(images) * 255).round().byte(), wanted)

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        views, targets = self.make_views(images, draws)
        logits: Tensor | None = None
        if not (self.memory and self.weight):
            outputs = self.replicas.self_supervise(views)
        elif self.replicas.batch_norms.move:
            outputs = self.replicas.self_supervise(views)
            # Classes are predicted with running statistics, which only views move.
            self.replicas.batch_norms.train(False)
            logits = self.replicas(self._draw(draws))
        else:
            outputs, logits = compute_both(self.replicas, views, self._draw(draws))
        losses = (self.compare(outputs, targets, images) * weights).sum(1)
        if self._limit:
            remaining = self.momentum ** (weights > 0).sum(1).float()
            self._average = torch.lerp(losses.detach(), self.state["average"], remaining)
            self.skipped = ~(self._average > self._limit)
            if not possibly_any(~self.skipped):
                return losses.sum() * 0
        if logits is None:
            return losses.sum()
        weight = self.weight * self._seen.clamp(max=int(self.memory)) / self.memory
        if self.original is not None:
            weight = weight * measure_diversity(self.state["classes"])
        return (losses + weight * measure_information(logits.float())).sum()

    def update(self, draws: Draws) -> None:
        new = {"average": self._average} | ({"images": self._images, "seen": self._seen} if self.memory else {})
        for name in new.keys() & self.state.keys():
            self.state[name].copy_(new[name])

    def compare_networks(self, original: Observation, adapted: Observation) -> None:
        super().compare_networks(original, adapted)
        self.follow("classes", adapted.logits.softmax(-1), 1 - 1 / max(self.memory, 1))

    def _draw(self, draws: Draws) -> Tensor:
        """Return crops drawn from the memory, `(S, copies, C, h, w)`."""
        keys = Draws(draws.keys[:, 0]).purpose("memory").copies(self.settings.copies)  # (S, n)
        slots = keys.purpose("slot").integers(self._seen.clamp(max=int(self.memory)).unsqueeze(1))
        drawn = self._images.gather(1, slots.view(*slots.shape, 1, 1, 1).expand(-1, -1, *self._images.shape[2:]))
        assert self.settings.augment is not None
        return self.settings.augment(drawn.flatten(0, 1), Draws(keys.keys.view(-1, 1)))[:, 0].unflatten(0, slots.shape)


def measure_information(logits: Tensor) -> Tensor:
    """Return the mean entropy of predictions `(S, n, K)` minus the entropy of their mean, `(S,)`."""
    mean = logits.softmax(-1).mean(1)
    return measure_entropy(logits).mean(1) + (mean * (mean + _EPSILON).log()).sum(1)


def measure_diversity(classes: Tensor) -> Tensor:
    """Return how diverse classes are by their frequencies `(S, K)`, up to a factor, in [0, 1], `(S,)`.

    It is linear in the entropy: 0 up to 0.6 and 1 from 0.9 of that of equal frequencies.
    """
    shares = classes / classes.sum(1, keepdim=True).clamp(min=torch.finfo(classes.dtype).tiny)
    entropy = torch.special.entr(shares).sum(1) / math.log(max(classes.shape[1], 2))
    return ((entropy - _FEW) / (_MANY - _FEW)).clamp(0, 1)


def add_images(held: Tensor, seen: Tensor, images: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Add images to a ring of the last M images of each of S streams.

    Args:
        held: The last images, `(S, M, C, H, W)`.
        seen: How many were added before, `(S,)`.
        images: `(S, B, C, H, W)`.
        wanted: Which of them to add, bool `(S, B)`.

    Returns:
        The new images and counts.
    """
    slots = torch.arange(held.shape[1], device=held.device)
    place = (seen.unsqueeze(1) + wanted.cumsum(1) - 1) % len(slots)  # (S, B)
    numbers = torch.arange(1, images.shape[1] + 1, device=held.device).view(1, -1, 1)
    lands = (place.unsqueeze(2) == slots) & wanted.unsqueeze(2)  # (S, B, M)
    newest = torch.where(lands, numbers, 0).amax(1)  # the last image in each slot, from 1; 0: none
    source = torch.where(newest > 0, len(slots) + newest - 1, slots)
    everything = torch.cat([held, images], 1)
    return everything.gather(1, source.view(*source.shape, 1, 1, 1).expand_as(held)), seen + wanted.sum(1)
