"""CIFAR-10, CIFAR-10-C and CIFAR-10.1 (paper, the sections on corrupted images and on unknown shifts).

CIFAR-10 is read from the official binary or python version, extracted or in its archive; CIFAR-10-C from the official
arrays, or generated from CIFAR-10 by `testtime.corruptions` if they are absent. Files are memory-mapped, and validated
when a set is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from testtime.corruptions import CORRUPTIONS, SEVERITIES
from testtime.data.archives import read_archive
from testtime.data.arrays import map_array
from testtime.data.corrupted import PARTS, Corrupted, Origin, check_choice, split_part
from testtime.data.family import Family, Remote, Root, collect_faults
from testtime.data.paths import data_root, regular
from testtime.data.pickles import read_batch
from testtime.data.sets import ArraySet, DataError, TestSet
from testtime.progress import Progress
from testtime.storage import PathLike, error_text

log = logging.getLogger(__name__)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
ARCHIVES = {BINARY: "cifar-10-binary.tar.gz", PYTHON: "cifar-10-python.tar.gz"}
CORRUPTED = "CIFAR-10-C"
SIZES_10_1: dict[Literal["v4", "v6"], int] = {"v4": 2021, "v6": 2000}
PER_FILE = 10_000
_RECORD = 1 + 3 * 32 * 32
_MOST_FILES, _MOST_BYTES = 100, 12 * PER_FILE * _RECORD  # limits of an archive; the official ones have 8, and half


def load(root: Root = None, split: Literal["train", "test"] = "test", partial: bool = False) -> ArraySet:
    """Open CIFAR-10.

    Args:
        root: The data root, or the extracted folder; see `paths.data_root`.
        split: `train` (50,000) or `test` (10,000).
        partial: Accept files with fewer records than the official 10,000.

    Returns:
        A set of `(3, 32, 32)` images.

    Raises:
        DataError: It is missing, or a file is damaged.
    """
    if split not in ("train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
    found = find(root)
    if found is None:
        raise DataError(
            data_root(root),
            f"holds no CIFAR-10 ({BINARY} or {PYTHON}, or their archives)",
            "run `testtime data get cifar10`",
        )
    numbers = range(1, 6)
    if found.name.endswith("-py") or found.name == ARCHIVES[PYTHON] or (found / "test_batch").is_file():
        names = [f"data_batch_{number}" for number in numbers] if split == "train" else ["test_batch"]
        parts = [_read_python(buffer, path) for path, buffer in _buffers(found, PYTHON, names)]
    else:
        names = [f"data_batch_{number}.bin" for number in numbers] if split == "train" else ["test_batch.bin"]
        parts = [_read_binary(buffer, path) for path, buffer in _buffers(found, BINARY, names)]
    for name, (images, labels) in zip(names, parts, strict=True):
        if len(images) != PER_FILE and not partial:
            raise DataError(found / name, f"holds {len(images):,} records, the official file {PER_FILE:,}")
        _check_labels(found / name, labels)
    labels = torch.cat([torch.from_numpy(labels.astype(np.int64)) for _, labels in parts])
    return ArraySet("cifar10", [images for images, _ in parts], labels, CLASSES, f"official files ({found.name})")


def find(root: Root = None) -> Path | None:
    """Return the folder or archive to read CIFAR-10 from, or None."""
    root = data_root(root)
    if (root / "test_batch.bin").is_file() or (root / "test_batch").is_file():
        return root
    for folder in (root / BINARY, root / PYTHON):
        if folder.is_dir():
            return folder
    return next((root / archive for archive in ARCHIVES.values() if (root / archive).is_file()), None)


def load_c(
    corruption: str,
    level: int,
    root: Root = None,
    source: Origin = "auto",
    seed: int = 0,
    partial: bool = False,
    frost: PathLike | None = None,
) -> TestSet:
    """Open one corruption of CIFAR-10-C at one level.

    Args:
        corruption: Its name, for example `fog`.
        level: 1 to 5.
        root: The data root, or the extracted folder.
        source: `official` reads the published arrays, `generated` corrupts CIFAR-10's test set with
            `testtime.corruptions` as it is read, `auto` uses the arrays if they exist.
        seed: Seed of the generated images.
        partial: Accept fewer images than the official 10,000 per level.
        frost: Folder of frost photographs for generated `frost`; None: procedural textures.

    Returns:
        A set of `(3, 32, 32)` images named `cifar10-c/CORRUPTION/LEVEL`; its `origin` records the source.

    Raises:
        DataError: Both the arrays and CIFAR-10 are missing, or a file is damaged.
    """
    check_choice(corruption, level, source)
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


def find_c(root: Root = None) -> Path | None:
    """Return the folder to read CIFAR-10-C from, or None."""
    root = data_root(root)
    if (root / CORRUPTED).is_dir():
        return root / CORRUPTED
    return root if root.name == CORRUPTED and root.is_dir() else None


def load_10_1(root: Root = None, version: Literal["v4", "v6"] = "v6", partial: bool = False) -> ArraySet:
    """Open CIFAR-10.1, new test images for CIFAR-10 (Recht et al. 2018).

    Args:
        root: The data root, or the folder of the arrays.
        version: `v6` (2,000 images, balanced; used in the paper) or `v4` (2,021).
        partial: Accept another number of images.

    Raises:
        DataError: It is missing, or a file is damaged.
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


def find_10_1(root: Root = None, version: str = "v6") -> Path | None:
    """Return the folder to read CIFAR-10.1 from, or None."""
    root = data_root(root)
    paths = (root / "CIFAR-10.1", root / "CIFAR-10.1" / "datasets", root)
    return next((path for path in paths if (path / f"cifar10.1_{version}_data.npy").is_file()), None)


def _check_labels(path: Path, labels: np.ndarray) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels > 9))
    if len(wrong):
        raise DataError(path, f"record {wrong[0]:,} has label {labels[wrong[0]]}, not 0 to 9")


def _read_binary(buffer: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images `(n, 3, 32, 32)` and labels `(n,)`, views of records of one label byte and 3,072 pixel bytes."""
    if len(buffer) == 0 or len(buffer) % _RECORD:
        raise DataError(path, f"{len(buffer):,} bytes are not a whole number of records of {_RECORD:,}")
    records = buffer.reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _read_python(buffer: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images `(n, 3, 32, 32)`, a view, and labels `(n,)` of a pickled batch."""
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


def _buffers(source: Path, folder: str, names: Sequence[str]) -> list[tuple[Path, np.ndarray]]:
    """Return the bytes of some files of the folder or its archive, each with a path for errors."""
    if source.is_file():
        return [(source / name, buffer) for name, buffer in zip(names, _unpack(source, folder, names), strict=True)]
    found = []
    for name in names:
        path = regular(source / name, source)
        try:
            found.append((path, np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))))
        except (OSError, ValueError) as error:
            raise DataError(path, f"cannot be read ({error_text(error)})") from None
    return found


def _unpack(archive: Path, folder: str, names: Sequence[str]) -> list[np.ndarray]:
    """Extract some files of an archive to memory."""
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


def check(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check CIFAR-10: read both splits and count their labels."""
    counts: dict[Literal["train", "test"], int] = {"train": 5_000, "test": 1_000}

    def find_faults(split: Literal["train", "test"]) -> list[str]:
        labels = load(root, split).labels
        assert labels is not None
        found, count = labels.bincount(minlength=10).tolist(), counts[split]
        wrong = [k for k in range(10) if found[k] != count]
        return [f"{find(root)}: {split} has {found[k]:,} of {CLASSES[k]}, not {count:,}" for k in wrong]

    return collect_faults(counts, find_faults, progress)


def check_c(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check the arrays of CIFAR-10-C that contain the parts."""

    def find_faults(corruption: str) -> list[str]:
        levels = [load_c(corruption, level, root, source="official").labels for level in SEVERITIES]
        for level, labels in zip(SEVERITIES, levels, strict=True):
            if labels is None or levels[0] is None or not levels[0].equal(labels):
                return [f"{find_c(root)}: labels.npy has other labels at level {level} than at level 1"]
        return []

    return collect_faults(dict.fromkeys(part.split("/")[0] for part in parts), find_faults, progress)


def check_10_1(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check CIFAR-10.1."""

    def find_faults(part: str) -> list[str]:
        _open_10_1(part, root)
        return []

    return collect_faults(parts, find_faults, progress)


def _open_c(part: str, root: Root, split: str, **options: Any) -> TestSet:
    return load_c(*split_part("cifar10-c", part), root, **options)


def _open_10_1(part: str, root: Root, split: str = "test", **options: Any) -> TestSet:
    if "/" in part:
        raise ValueError(f"`name` must be cifar10.1, cifar10.1/v4 or cifar10.1/v6; got 'cifar10.1/{part}'.")
    version: Any = part or "v6"
    return load_10_1(root, version, **options)


def _find_fault(root: Root, path: Path) -> None:
    if path.is_dir():  # reading an archive takes too long here
        load(root, "train")
        load(root, "test")


def _find_fault_c(root: Root, path: Path) -> None:
    for corruption in CORRUPTIONS:
        load_c(corruption, 5, root, source="official")


def _find_fault_10_1(root: Root, path: Path) -> None:
    load_10_1(root)


def _remote_10_1(file: str, size: int, sha256: str) -> Remote:
    # The publisher provides no checksums; these are those of TensorFlow Datasets.
    root = "https://raw.githubusercontent.com/modestyachts/CIFAR-10.1/master/datasets"
    return Remote(f"{root}/cifar10.1_{file}.npy", size, f"sha256:{sha256}", "CIFAR-10.1", archive=False)


CIFAR10 = Family(
    "cifar10",
    "CIFAR-10: 60,000 images, 32×32, 10 classes",
    lambda part, root, split, **options: load(root, split, **options),
    check,
    find=find,
    find_fault=_find_fault,
    folder=BINARY,
    remotes=(
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            170_052_171,
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            BINARY,
        ),
    ),
    has_train=True,
)

CIFAR10_C = Family(
    "cifar10-c",
    "CIFAR-10's test set under the 15 corruptions, 5 levels",
    _open_c,
    check_c,
    PARTS,
    find_c,
    _find_fault_c,
    folder=CORRUPTED,
    remotes=(
        Remote(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
            2_918_471_680,
            "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
            CORRUPTED,
        ),
    ),
    base=CIFAR10,
)

CIFAR10_1 = Family(
    "cifar10.1",
    "CIFAR-10.1: 2,000 new test images for CIFAR-10 (v6; v4 has 2,021)",
    _open_10_1,
    check_10_1,
    ("", "v4"),
    find_10_1,
    _find_fault_10_1,
    folder="CIFAR-10.1",
    remotes=(
        _remote_10_1("v4_data", 6_208_640, "5aaedc268df8f4cffca2ac0cf9e608ae1897a8cddb630c7a850a2ea8f6558e75"),
        _remote_10_1("v4_labels", 8_212, "1f9544300ded199539b6662364ce7fe6c2e1ea9f87408f06db4b1a6184cffb18"),
        _remote_10_1("v6_data", 6_144_128, "2997188e5816f5bd545dc77771b6227828c28146049fcecf3fa10775474cacc6"),
        _remote_10_1("v6_labels", 8_128, "ae40beda001693674edc94d925ee8268cfe68905f8f9aff800c8dcdfcd6c9448"),
    ),
)
