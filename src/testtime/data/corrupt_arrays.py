"""Corrupt a test set into arrays, in the layout of CIFAR-10-C."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from testtime.corruptions.registry import CORRUPTIONS, SEVERITIES, corrupt_chunks, severity_level
from testtime.data.corrupt_files import frost_setting, hold_target
from testtime.data.frost import read_frost
from testtime.progress import Progress
from testtime.storage import PathLike, atomic_file


def corrupt_cifar(
    images: Tensor,
    labels: Tensor,
    target: PathLike,
    *,
    names: Sequence[str] = CORRUPTIONS,
    seed: int = 0,
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write CIFAR-10-C for a test set: one NAME.npy with the five levels concatenated per corruption, and labels.npy.

    Args:
        images: uint8 `(N, 3, H, W)`; CIFAR's parameters are used whatever their size.
        labels: Integers `(N,)`.
        target: Output folder.
        names: A subset of `CORRUPTIONS`.
        seed: Seed of the draws.
        frost: Folder of frost photographs; None: procedural textures.
        device: Device to compute on.
        chunk: Images processed at once; None: chosen by their size.
        progress: Called with the number of images done, first with those of an earlier run, and their total.

    Returns:
        The target; its NAME.npy are `(5·N, H, W, 3)` uint8, labels.npy `(5·N,)`.

    Raises:
        FileError: An output cannot be written, or the target was made with other settings or images.
        ValueError: An argument is invalid.
    """
    for name in names:
        severity_level(name, 1, "cifar")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"`images` must be uint8 (N, 3, H, W), got {images.dtype} {tuple(images.shape)}.")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"`labels` must have one entry for each of {len(images)} images, got {tuple(labels.shape)}.")
    target = Path(target)
    count, _, height, width = images.shape
    settings = {"layout": "cifar-10-c", "seed": seed, "frost": frost_setting(frost)}
    settings |= {"shape": list(images.shape), "checksum": _checksum(images)}
    textures = read_frost(frost)
    make = functools.partial(corrupt_chunks, seed=seed, scale="cifar", frost=textures, chunk=chunk, device=device)
    head = {"descr": "|u1", "fortran_order": False, "shape": (len(SEVERITIES) * count, height, width, 3)}
    with hold_target(target, settings):
        if not (target / "labels.npy").is_file():
            _write_labels(labels, target / "labels.npy")
        missing = [name for name in names if not (target / f"{name}.npy").is_file()]
        total = len(names) * len(SEVERITIES) * count
        done = total - len(missing) * len(SEVERITIES) * count
        if progress is not None:
            progress(done, total, "")
        for name in missing:
            with atomic_file(target / f"{name}.npy") as temporary, open(temporary, "wb") as file:
                # Not memory-mapped: there, a full disk would kill the process.
                np.lib.format.write_array_header_1_0(file, head)
                for severity in SEVERITIES:
                    for _, block in make(images, name, severity):
                        file.write(block.permute(0, 2, 3, 1).contiguous().cpu().numpy().data)
                        done += len(block)
                        if progress is not None:
                            progress(done, total, f"{name} {severity}")
    return target


def _checksum(images: Tensor) -> int:
    checksum = 0
    for block in images.split(1024):
        checksum = zlib.crc32(block.cpu().numpy().tobytes(), checksum)
    return checksum


def _write_labels(labels: Tensor, path: Path) -> None:
    """Write the labels, repeated for each severity."""
    kind = np.uint8 if not len(labels) or int(labels.max()) < 256 else np.int64
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, np.tile(labels.cpu().numpy().astype(kind), len(SEVERITIES)), allow_pickle=False)
