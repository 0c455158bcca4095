"""Unlabelled training images, from a tensor, a set, a folder or a loader."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime.augment import narrow
from testtime.data.held_out import hold_out_images
from testtime.data.sets import TestSet
from testtime.kernels.graphs import on_side_stream
from testtime.networks.ynet import YNet
from testtime.progress import Progress, read_ahead
from testtime.randomness import Draws
from testtime.training import pool as pools
from testtime.training.pool import Pool, shuffle
from testtime.training.setup import open_images

Images = Tensor | np.ndarray | TestSet | str | os.PathLike[str] | Iterable[Any]
Readable = Tensor | TestSet
"""Images that can be read in any order."""


class Shuffled:
    """Images in a random order that is another in each epoch.

    Args:
        images: `(N, C, H, W)`, or a set.
        batch: Images per batch; the last, incomplete batch of an epoch is dropped.
        seed: Seed of the order.
        device: Where they are used.
    """

    def __init__(self, images: Readable, batch: int, seed: int, device: torch.device) -> None:
        self.pool = Pool("images", images, None, device)
        self.seed, self.batch = seed, min(batch, self.pool.count)
        self.steps = self.pool.count // self.batch
        self.shape, self.description = self.pool.shape, self.pool.description

    @property
    def example(self) -> Tensor:
        """One image, `(1, C, H, W)`."""
        return self.pool.take(torch.zeros(1, dtype=torch.int64, device=self.pool.device))

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sample numbers `(B,)` and images `(B, C, H, W)` of an epoch."""
        order = shuffle(self.pool.count, self.seed, epoch, self.pool.device)
        parts = order[: self.steps * self.batch].split(self.batch)
        if self.pool.tensor is not None:
            yield from ((numbers, self.pool.take(numbers)) for numbers in parts)
            return
        read = on_side_stream(lambda numbers: [self.pool.take(numbers)], self.pool.device)
        for numbers, (images,) in zip(parts, read_ahead(map(read, parts)), strict=True):
            yield numbers, images


class Repeated:
    """Batches of a loader that is read again in each epoch, in its own order.

    Args:
        loader: An iterable that can be repeated, of batches of images, or tuples with the images first.
        device: Where they are used.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.pool: Pool | None = None
        self.steps = len(loader) if isinstance(loader, Sized) else 0
        self.example = next(_read(loader))[:1].to(device)
        self.shape = tuple(self.example.shape[1:])
        self.description: dict[str, Any] = {"loader": type(loader).__name__, "shape": list(self.shape)}

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sample numbers `(B,)` and images `(B, C, H, W)` of an epoch."""
        start = 0
        for images in read_ahead(_read(self.loader)):
            yield torch.arange(start, start + len(images), device=self.device), images.to(self.device)
            start += len(images)


Source = Shuffled | Repeated


def read_images(images: Images, net: YNet, progress: Progress | None) -> Readable | Iterable[Any]:
    """Return images as a tensor or a set; a loader is returned as it is if its images do not fit in memory.

    Args:
        images: See `fit_branch`.
        net: The network that they are for.
        progress: Called while files are decoded or a loader is read.

    Raises:
        TypeError: The images are of an unknown kind.
        ValueError: They do not have the same shape, or have values that are not finite.
        DataError: A folder or set is missing or damaged.
    """
    if isinstance(images, (str, os.PathLike)):
        return open_images(os.fspath(images), net, progress=progress)
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images)
    if isinstance(images, TestSet):
        return images
    if isinstance(images, Tensor):
        _check_finite(images)
        return images
    if not isinstance(images, Iterable) and not hasattr(images, "__getitem__"):
        kind = type(images).__name__
        raise TypeError(f"`images` must be a tensor, a set, a folder or an iterable of images, got {kind}.")
    return _gather(images, progress)


def make_source(images: Readable | Iterable[Any], batch: int, seed: int, device: torch.device) -> Source:
    """Return images as batches of epochs."""
    if isinstance(images, (Tensor, TestSet)):
        return Shuffled(images, batch, seed, device)
    return Repeated(images, device)


def hold_out_some(images: Readable, count: int) -> tuple[Readable, Readable]:
    """Split images into those to train on and those that are held out, by the order of `hold_out_images`."""
    if isinstance(images, TestSet):
        return hold_out_images(images, count)
    if not 1 <= count < len(images):
        raise ValueError(f"`hold_out` must be 1 to {len(images) - 1:,} for {len(images):,} images, got {count:,}.")
    keys = Draws.of(0, torch.arange(len(images), device="cpu")).purpose("hold-out").keys
    order = keys.argsort(stable=True).to(images.device)
    return images[order[:-count].sort().values], images[order[-count:].sort().values]


def _gather(loader: Iterable[Any], progress: Progress | None) -> Tensor | Iterable[Any]:
    """Read a loader into memory; returns the loader itself if that is too small."""
    parts: list[Tensor] = []
    total, used, total_steps = 0, 0, len(loader) if isinstance(loader, Sized) else 0
    for step, images in enumerate(_read(loader), start=1):
        if parts and (images.shape[1:] != parts[0].shape[1:] or images.dtype != parts[0].dtype):
            here, first = (f"{one.dtype} {tuple(one.shape[1:])}" for one in (images, parts[0]))
            raise ValueError(f"`images` must have one shape and dtype: image {total} has {here}, the first {first}.")
        used += images.numel() * images.element_size()
        if used > pools.RESIDENT_BYTES:
            if iter(loader) is loader:
                raise ValueError(
                    f"`images` is an iterator of more than {pools.RESIDENT_BYTES >> 20:,} MiB and can be read only "
                    "once: pass a loader that can be repeated, or a folder."
                )
            return loader
        parts.append(images.detach().cpu().clone())
        total += len(images)
        if progress is not None:
            progress(step, max(step, total_steps), "reading the images")
    if not parts:
        raise ValueError("`images` must not be empty.")
    gathered = torch.cat(parts)
    _check_finite(gathered)
    return gathered


def _read(loader: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the batches `(B, C, H, W)` of a loader of images or batches, or of tuples with these first."""
    for item in loader:
        images = item[0] if isinstance(item, (tuple, list)) and len(item) else item
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(images)
        if not isinstance(images, Tensor) or images.dim() not in (3, 4):
            found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"`images` must yield tensors (B, C, H, W) or (C, H, W), or tuples of them, got {found}.")
        yield narrow(images if images.dim() == 4 else images.unsqueeze(0))


def _check_finite(images: Tensor) -> None:
    if images.is_floating_point() and not all(part.isfinite().all() for part in images.split(1024)):
        raise ValueError("`images` must be finite, got NaN or infinite values.")
