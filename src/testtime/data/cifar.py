"""CIFAR-10, CIFAR-10-C and CIFAR-10.1 (paper, the sections on corrupted images and on unknown shifts).

CIFAR-10 is read from the official binary or python version, extracted or in its archive; CIFAR-10-C from the official
arrays, or generated from CIFAR-10 by `testtime.corruptions` if they are absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from testtime.data.arrays import map_array
from testtime.data.cifar_files import CifarArrays, CifarFiles, check_labels
from testtime.data.family import Family, Remote, Root, collect_faults
from testtime.data.paths import data_root
from testtime.data.sets import ArraySet, DataError, TestSet
from testtime.progress import Progress

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
ARCHIVES = {BINARY: "cifar-10-binary.tar.gz", PYTHON: "cifar-10-python.tar.gz"}
SIZES_10_1: dict[Literal["v4", "v6"], int] = {"v4": 2021, "v6": 2000}

FILES = CifarFiles(
    "cifar10",
    "CIFAR-10",
    CLASSES,
    BINARY,
    PYTHON,
    ARCHIVES,
    files={"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]},
    per_file={"train": 10_000, "test": 10_000},
    label_bytes=1,
    label_key=b"labels",
)
ARRAYS = CifarArrays(FILES)

load, find = FILES.load, FILES.find
load_c, find_c = ARRAYS.load, ARRAYS.find


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
    check_labels(labels_path, labels, len(CLASSES))
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


def check_10_1(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check CIFAR-10.1."""

    def find_faults(part: str) -> list[str]:
        _open_10_1(part, root)
        return []

    return collect_faults(parts, find_faults, progress)


def _open_10_1(part: str, root: Root, split: str = "test", **options: Any) -> TestSet:
    if "/" in part:
        raise ValueError(f"`name` must be cifar10.1, cifar10.1/v4 or cifar10.1/v6; got 'cifar10.1/{part}'.")
    version: Any = part or "v6"
    return load_10_1(root, version, **options)


def _find_fault_10_1(root: Root, path: Path) -> None:
    load_10_1(root)


def _remote_10_1(file: str, size: int, sha256: str) -> Remote:
    # The publisher provides no checksums; these are those of TensorFlow Datasets.
    root = "https://raw.githubusercontent.com/modestyachts/CIFAR-10.1/master/datasets"
    return Remote(f"{root}/cifar10.1_{file}.npy", size, f"sha256:{sha256}", "CIFAR-10.1", archive=False)


CIFAR10 = FILES.make_family(
    Remote(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        170_052_171,
        "md5:c32a1d4ab5d03f1284b67883e8d87530",
        BINARY,
    )
)

CIFAR10_C = ARRAYS.make_family(
    CIFAR10,
    Remote(
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
        2_918_471_680,
        "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
        ARRAYS.folder,
    ),
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
