"""A balanced memory of recent images (RoTTA, Yuan et al. 2023)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """Images of S replicas, M each, about as many of each class; preferably new and certain ones.

    Attributes:
        images: Float in [0, 1], `(S, M, C, H, W)`.
        labels: Predicted classes `(S, M)`; -1 for an empty slot.
        entropy: Entropy of these predictions `(S, M)`.
        age: Number of images offered since an image came, itself included, `(S, M)`.
    """

    images: Tensor
    labels: Tensor
    entropy: Tensor
    age: Tensor

    @staticmethod
    def make_empty(count: int, capacity: int, example: Tensor) -> Memory:
        """Return an empty memory for `count` replicas and images like those of an example `(N, C, H, W)`."""
        device, shape = example.device, (count, capacity)
        return Memory(
            torch.zeros(*shape, *example.shape[1:], dtype=torch.float32, device=device),
            torch.full(shape, -1, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
        )

    def add(self, images: Tensor, labels: Tensor, entropy: Tensor, wanted: Tensor, classes: int) -> Memory:
        """Return a memory to which images were offered one by one.

        Args:
            images: Float in [0, 1], `(S, B, C, H, W)`.
            labels: Predicted classes `(S, B)`.
            entropy: Entropy of these predictions `(S, B)`.
            wanted: Which images to offer, bool `(S, B)`.
            classes: Number of classes, K.
        """
        slots = torch.arange(self.labels.shape[1], device=images.device)
        source, made = slots.expand_as(self.labels), self  # index into old and new images
        for place in range(images.shape[1]):
            label, value, offered = (tensor[:, place : place + 1] for tensor in (labels, entropy, wanted))
            slot, accepted = made._find_slot(label, value, classes)
            chosen = (slots == slot) & accepted & offered  # (S, M)
            source = torch.where(chosen, len(slots) + place, source)
            held, found = torch.where(chosen, label, made.labels), torch.where(chosen, value, made.entropy)
            age = torch.where(chosen, 0, made.age) + ((held >= 0) & offered)
            made = made._replace(labels=held, entropy=found, age=age)
        everything = torch.cat([self.images, images], 1)
        return made._replace(images=everything.gather(1, source.view(*source.shape, 1, 1, 1).expand_as(self.images)))

    def _find_slot(self, label: Tensor, entropy: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return a slot for an image and whether it gets it, `(S, 1)` each.

        An image of a class that has its share replaces one of that class; otherwise it gets an empty slot or, if there
        is none, replaces one of the largest classes. It replaces the oldest and least certain, unless it is worse.
        """
        capacity, scale = self.labels.shape[1], math.log(max(classes, 2))
        filled = self.labels >= 0
        sizes = (self.labels.unsqueeze(2) == self.labels.unsqueeze(1)).sum(2) * filled  # of the class of each slot
        own = self.labels == label
        is_full = own.sum(1, keepdim=True) >= capacity / classes
        candidates = torch.where(is_full, own, filled & (sizes == sizes.amax(1, keepdim=True)))
        scores = torch.sigmoid(self.age.float() / capacity) + self.entropy / scale
        worst, slot = scores.masked_fill(~candidates, -torch.inf).max(1, keepdim=True)
        has_room = ~is_full & ~filled.all(1, keepdim=True)
        slot = torch.where(has_room, filled.byte().argmin(1, keepdim=True), slot)
        return slot, has_room | (worst > 0.5 + entropy / scale)  # sigmoid(0) = 0.5: its age is 0
