"""CIFAR-10, CIFAR-10-C and CIFAR-10.1: the paper's sections on corrupted images and on unknown shifts.

CIFAR-10 is read from the official binary or python version, extracted or still in its archive; CIFAR-10-C from the
official arrays, or made from CIFAR-10 by `testtime.corruptions` where they are absent. Files are memory-mapped, and
checked when a set is opened: a damaged one gives an error that names it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from testtime.data.archives import read_archive
from testtime.data.arrays import map_array
from testtime.data.corrupted import Corrupted
from testtime.data.pickles import read_batch
from testtime.data.places import data_root, regular
from testtime.data.sets import ArraySet, DataError, TestSet
from testtime.storage import error_text

log = logging.getLogger(__name__)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
ARCHIVES = {BINARY: "cifar-10-binary.tar.gz", PYTHON: "cifar-10-python.tar.gz"}
CORRUPTED = "CIFAR-10-C"
SIZES_10_1: dict[Literal["v4", "v6"], int] = {"v4": 2021, "v6": 2000}
PER_FILE = 10_000
_RECORD = 1 + 3 * 32 * 32
_MOST_FILES, _MOST_BYTES = 100, 12 * PER_FILE * _RECORD  # of an archive; the official ones have 8 and half as many

Source = Literal["auto", "official", "generated"]


def load(
    root: str | os.PathLike[str] | None = None, split: Literal["train", "test"] = "test", partial: bool = False
) -> ArraySet:
    """CIFAR-10.

    Args:
        root: The data root, or the extracted folder itself; see `places.data_root`.
        split: `train` (50,000) or `test` (10,000).
        partial: Accept files with fewer records than the official 10,000.

    Returns:
        A set of `(3, 32, 32)` images.

    Raises:
        DataError: It is not there, or a file is damaged.
    """
    if split not in ("train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
    place = find(root)
    if place is None:
        raise DataError(
            data_root(root),
            f"holds no CIFAR-10 ({BINARY} or {PYTHON}, or their archives)",
            "run `testtime data get cifar10`",
        )
    numbers = range(1, 6)
    if place.name.endswith("-py") or place.name == ARCHIVES[PYTHON] or (place / "test_batch").is_file():
        names = [f"data_batch_{number}" for number in numbers] if split == "train" else ["test_batch"]
        parts = [_read_python(buffer, path) for path, buffer in _buffers(place, PYTHON, names)]
    else:
        names = [f"data_batch_{number}.bin" for number in numbers] if split == "train" else ["test_batch.bin"]
        parts = [_read_binary(buffer, path) for path, buffer in _buffers(place, BINARY, names)]
    for name, (images, labels) in zip(names, parts, strict=True):
        if len(images) != PER_FILE and not partial:
            raise DataError(place / name, f"holds {len(images):,} records, the official file {PER_FILE:,}")
        _check_labels(place / name, labels)
    labels = torch.cat([torch.from_numpy(labels.astype(np.int64)) for _, labels in parts])
    return ArraySet("cifar10", [images for images, _ in parts], labels, CLASSES, f"official files ({place.name})")


def find(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder or archive from which CIFAR-10 would be read, or None."""
    root = data_root(root)
    if (root / "test_batch.bin").is_file() or (root / "test_batch").is_file():
        return root
    for place in (root / BINARY, root / PYTHON):
        if place.is_dir():
            return place
    return next((root / archive for archive in ARCHIVES.values() if (root / archive).is_file()), None)


def load_c(
    corruption: str,
    level: int,
    root: str | os.PathLike[str] | None = None,
    source: Source = "auto",
    seed: int = 0,
    partial: bool = False,
    frost: str | os.PathLike[str] | None = None,
) -> TestSet:
    """One corruption of CIFAR-10-C at one level.

    Args:
        corruption: Its name, such as `fog`.
        level: 1 to 5.
        root: The data root, or the extracted folder itself.
        source: `official` reads the published arrays, `generated` corrupts CIFAR-10's test set with
            `testtime.corruptions` as it is read, `auto` takes the arrays where they are.
        seed: Seed of the generated images.
        partial: Accept fewer images than the official 10,000 a level.
        frost: Folder of frost photographs for generated `frost`; None makes textures by code.

    Returns:
        A set of `(3, 32, 32)` images named `cifar10-c/CORRUPTION/LEVEL`; its `origin` says which of the two it is.

    Raises:
        DataError: Neither the arrays nor CIFAR-10 are there, or a file is damaged.
    """
    if level not in range(1, 6):
        raise ValueError(f"`level` must be 1 to 5, got {level!r}.")
    if source not in ("auto", "official", "generated"):
        raise ValueError(f"`source` must be 'auto', 'official' or 'generated', got {source!r}.")
    if not corruption.isidentifier():
        raise ValueError(f"`corruption` must be a name such as 'fog', got {corruption!r}.")
    name = f"cifar10-c/{corruption}/{level}"
    folder = find_c(root)
    if source != "generated" and folder is not None and (folder / f"{corruption}.npy").exists():
        images = map_array(folder / f"{corruption}.npy", folder, (None, 32, 32, 3))
        labels = map_array(folder / "labels.npy", folder, (len(images),))
        if len(images) % 5 or not len(images) or (len(images) != 5 * PER_FILE and not partial):
            fault = f"holds {len(images):,} images; five levels of {PER_FILE:,} are {5 * PER_FILE:,}"
            raise DataError(folder / f"{corruption}.npy", fault)
        count = len(images) // 5
        rows = slice((level - 1) * count, level * count)
        _check_labels(folder / "labels.npy", labels[rows])
        return ArraySet(
            name,
            [images[rows].transpose(0, 3, 1, 2)],
            torch.from_numpy(labels[rows].astype(np.int64)),
            CLASSES,
            f"official files ({folder.name})",
        )
    if source == "official":
        raise DataError((folder or data_root(root) / CORRUPTED) / f"{corruption}.npy", "no such file")
    if folder is not None and source == "auto":
        log.warning("%s has no %s.npy; generating it from CIFAR-10", folder, corruption)
    return Corrupted(load(root, "test", partial), corruption, level, name=name, seed=seed, scale="cifar", frost=frost)


def find_c(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder from which CIFAR-10-C would be read, or None."""
    root = data_root(root)
    if (root / CORRUPTED).is_dir():
        return root / CORRUPTED
    return root if root.name == CORRUPTED and root.is_dir() else None


def load_10_1(
    root: str | os.PathLike[str] | None = None, version: Literal["v4", "v6"] = "v6", partial: bool = False
) -> ArraySet:
    """CIFAR-10.1, new test images for CIFAR-10 (Recht et al. 2018).

    Args:
        root: The data root, or the folder of the arrays.
        version: `v6` (2,000 images, balanced; the paper's) or `v4` (2,021).
        partial: Accept another number of images.

    Raises:
        DataError: It is not there, or a file is damaged.
    """
    if version not in SIZES_10_1:
        raise ValueError(f"`version` must be 'v4' or 'v6', got {version!r}.")
    folder = find_10_1(root, version)
    if folder is None:
        raise DataError(data_root(root), f"holds no cifar10.1_{version}_data.npy", "run `testtime data get cifar10.1`")
    path, labels_path = folder / f"cifar10.1_{version}_data.npy", folder / f"cifar10.1_{version}_labels.npy"
    images = map_array(path, folder, (None, 32, 32, 3))
    if len(images) != SIZES_10_1[version] and not partial:
        raise DataError(path, f"holds {len(images):,} images, the official file {SIZES_10_1[version]:,}")
    labels = map_array(labels_path, folder, (len(images),), integers=True)
    _check_labels(labels_path, labels)
    return ArraySet(
        "cifar10.1" if version == "v6" else f"cifar10.1/{version}",
        [images.transpose(0, 3, 1, 2)],
        torch.from_numpy(labels.astype(np.int64)),
        CLASSES,
        f"official files ({version})",
    )


def find_10_1(root: str | os.PathLike[str] | None = None, version: str = "v6") -> Path | None:
    """The folder from which CIFAR-10.1 would be read, or None."""
    root = data_root(root)
    places = (root / "CIFAR-10.1", root / "CIFAR-10.1" / "datasets", root)
    return next((place for place in places if (place / f"cifar10.1_{version}_data.npy").is_file()), None)


def _check_labels(path: Path, labels: np.ndarray) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels > 9))
    if len(wrong):
        raise DataError(path, f"record {wrong[0]:,} has label {labels[wrong[0]]}, not 0 to 9")


def _read_binary(buffer: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label byte and 3,072 pixel bytes: images `(n, 3, 32, 32)` and labels `(n,)`, both views."""
    if len(buffer) == 0 or len(buffer) % _RECORD:
        raise DataError(path, f"{len(buffer):,} bytes are not a whole number of records of {_RECORD:,}")
    records = buffer.reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _read_python(buffer: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A pickled batch: images `(n, 3, 32, 32)`, a view, and labels `(n,)`."""
    batch = read_batch(buffer, path)
    images: Any = batch.get(b"data")
    labels: Any = batch.get(b"labels")
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _RECORD - 1 or not len(images):
        raise DataError(path, "its 'data' is not an array (N, 3072)")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(path, "its 'labels' are not a list of integers")
    if len(labels) != len(images):
        raise DataError(path, f"has {len(images):,} images but {len(labels):,} labels")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _buffers(place: Path, folder: str, names: Sequence[str]) -> list[tuple[Path, np.ndarray]]:
    """The bytes of some files of the folder, or of the archive that holds it, with a path for errors."""
    if place.is_file():
        return [(place / name, buffer) for name, buffer in zip(names, _unpack(place, folder, names), strict=True)]
    found = []
    for name in names:
        path = regular(place / name, place)
        try:
            found.append((path, np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))))
        except (OSError, ValueError) as error:
            raise DataError(path, f"cannot be read ({error_text(error)})") from None
    return found


def _unpack(archive: Path, folder: str, names: Sequence[str]) -> list[np.ndarray]:
    """Some files of an archive, in memory; nothing is written to disk."""
    found: dict[str, bytearray] = {}
    for name, start, content in read_archive(archive, _MOST_FILES, _MOST_BYTES):
        short = name.removeprefix(f"{folder}/")
        if short in names:
            if not start and short in found:
                raise DataError(archive, f"holds {short} twice")
            found.setdefault(short, bytearray()).extend(content)
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(archive, f"does not hold {folder}/{missing[0]}")
    return [np.frombuffer(found[name], dtype=np.uint8) for name in names]
