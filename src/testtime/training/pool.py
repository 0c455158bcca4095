"""Images to train on, and the order they are taken in."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from testtime import kernels
from testtime.data.sets import TestSet
from testtime.randomness import Draws

RESIDENT_BYTES = 4 << 30
"""A set up to this size is read once and kept on the device, on CUDA up to a quarter of the memory that is free; a
larger one is read by the batch."""


def shuffle(count: int, seed: int, epoch: int, device: torch.device, purpose: str = "shuffle") -> Tensor:
    """The numbers 0..count-1 in an order that seed, epoch and purpose decide, int64 `(count,)`."""
    keys = Draws.of(seed, torch.arange(count, device=device)).purpose(purpose).fold(epoch).keys
    return keys.argsort()  # the hash is one to one: no two keys are equal


class Pool:
    """Images to train or test on: a tensor on the device, or a set that is too large for that.

    Args:
        name: What error messages call them.
        images: `(N, C, H, W)`, uint8 or floats in [0, 1]; or a set.
        labels: Integers `(N,)`, or None: a set has its own.
        device: Where they are used.
        resident: Up to how many bytes a set is kept on the device; None decides by `RESIDENT_BYTES`.
    """

    def __init__(
        self,
        name: str,
        images: Tensor | TestSet,
        labels: Tensor | None,
        device: torch.device,
        resident: int | None = None,
    ) -> None:
        self.name, self.device = name, device
        self.classes: tuple[str, ...] = ()
        self.tensor: Tensor | None = None
        self.source = images
        if isinstance(images, TestSet):
            if labels is not None:
                raise ValueError(f"`{name}` is a set and has labels of its own; give it without labels.")
            labels, self.classes = images.labels, images.classes
            self.count, self.shape = len(images), images.shape
            if self.count * math.prod(self.shape) <= (_resident_bytes(device) if resident is None else resident):
                self.tensor = torch.empty((self.count, *self.shape), dtype=torch.uint8, device=device)
                for numbers, pixels, _ in images.chunks(1024):
                    self.tensor[numbers[0] : numbers[-1] + 1] = pixels.to(device)
        else:
            if not isinstance(images, Tensor):
                raise TypeError(f"`{name}` must be a tensor or a set of testtime.data, got {type(images).__name__}.")
            if labels is not None and not isinstance(labels, Tensor):
                raise TypeError(f"The labels of `{name}` must be a tensor, got {type(labels).__name__}.")
            if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
                raise ValueError(
                    f"`{name}` must be (N, C, H, W), uint8 or floats in [0, 1], got {images.dtype} "
                    f"{tuple(images.shape)}."
                )
            self.count, self.shape = len(images), tuple(images.shape[1:])
            self.tensor = _usable(images.detach().to(device))
        if self.count == 0:
            raise ValueError(f"`{name}` must not be empty.")
        if labels is not None and (labels.shape != (self.count,) or labels.is_floating_point()):
            raise ValueError(f"`{name}` needs {self.count} integer labels, got {labels.dtype} {tuple(labels.shape)}.")
        self.labels = None if labels is None else _usable(labels.to(device, torch.int64))

    def take(self, indices: Tensor) -> Tensor:
        """Images `(n, C, H, W)` of sample numbers `(n,)`, on the device."""
        if self.tensor is not None:
            return self.tensor[indices]
        assert isinstance(self.source, TestSet)
        return self.source.images(indices.cpu()).to(self.device)

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """What tells these images from others."""
        plain: dict[str, Any] = {"count": self.count, "shape": list(self.shape)}
        if isinstance(self.source, TestSet):
            skipped = {"skipped": list(self.source.skipped)} if self.source.skipped else {}
            return {"name": self.source.name, **plain, "hash": self.source.fingerprint()[:16], **skipped}
        assert self.tensor is not None
        return {**plain, "hash": hash_tensors([self.tensor] if self.labels is None else [self.tensor, self.labels])}


def _usable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in inference mode, which autograd does not take."""
    return tensor.clone() if tensor.is_inference() else tensor


def _resident_bytes(device: torch.device) -> int:
    return max(RESIDENT_BYTES, kernels.free_memory(device) // 4)


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A short text that tells these numbers from others."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
