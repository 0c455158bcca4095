"""Training images, and the order of an epoch."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from testtime import kernels
from testtime.augment import narrow
from testtime.data.sets import TestSet
from testtime.randomness import Draws

RESIDENT_BYTES = 4 << 30
"""Sets up to this size (on CUDA also up to a quarter of the free memory) are loaded onto the device once; larger ones
are read batch by batch."""


def shuffle(count: int, seed: int, epoch: int, device: torch.device, purpose: str = "shuffle") -> Tensor:
    """Return a permutation of 0..count-1 determined by seed, epoch and purpose, int64 `(count,)`."""
    keys = Draws.of(seed, torch.arange(count, device=device)).purpose(purpose).fold(epoch).keys
    return keys.argsort()  # the hash is injective, so there are no ties


class Pool:
    """Images to train or test on, stored on the device if they fit.

    Args:
        name: Their name in error messages.
        images: `(N, C, H, W)`, uint8 or float in [0, 1]; or a set.
        labels: Integers `(N,)`; None for a set, which has its own.
        device: Where they are used.
        resident: Maximum size in bytes of a set stored on the device; None for the default, see `RESIDENT_BYTES`.
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
                raise ValueError(f"`{name}` is a set with its own labels; do not pass labels.")
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
            self.tensor = _usable(narrow(images.detach()).to(device))
        if self.count == 0:
            raise ValueError(f"`{name}` must not be empty.")
        if labels is not None and (labels.shape != (self.count,) or labels.is_floating_point()):
            raise ValueError(f"`{name}` needs {self.count} integer labels, got {labels.dtype} {tuple(labels.shape)}.")
        self.labels = None if labels is None else _usable(labels.to(device, torch.int64))

    def take(self, indices: Tensor) -> Tensor:
        """Return the images `(n, C, H, W)` with sample indices `(n,)`, on the device."""
        if self.tensor is not None:
            return self.tensor[indices]
        assert isinstance(self.source, TestSet)
        return self.source.images(indices.cpu()).to(self.device)

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Metadata and a hash of the images."""
        plain: dict[str, Any] = {"count": self.count, "shape": list(self.shape)}
        if isinstance(self.source, TestSet):
            held_out = self.source.held_out
            optional = {"held_out": 0 if held_out is None else len(held_out), "skipped": list(self.source.skipped)}
            given = {name: value for name, value in optional.items() if value}
            return {"name": self.source.name, **plain, "hash": self.source.fingerprint()[:16], **given}
        assert self.tensor is not None
        return {**plain, "hash": hash_tensors([self.tensor] if self.labels is None else [self.tensor, self.labels])}


def _usable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was created in inference mode, which autograd does not accept."""
    return tensor.clone() if tensor.is_inference() else tensor


def _resident_bytes(device: torch.device) -> int:
    return max(RESIDENT_BYTES, kernels.free_memory(device) // 4)


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Return a short hash of the tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
