"""The official files of CIFAR-10 and CIFAR-100, and the arrays of CIFAR-10-C and CIFAR-100-C.

Files are memory-mapped, and validated when a set is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

Split = Literal["train", "test"]
TEST_COUNT = 10_000
_PIXELS = 3 * 32 * 32
_MOST_FILES, _MOST_BYTES = 100, 12 * 10_000 * (1 + _PIXELS)  # limits of an archive; the official ones have 8, and half


@dataclass(frozen=True)
class CifarFiles:
    """The official files of CIFAR-10 or CIFAR-100, in the binary or the python version, extracted or in an archive.

    Attributes:
        name: Name of the set.
        title: Its official name.
        classes: Class names.
        binary: Folder of the binary version.
        python: Folder of the python version.
        archives: The archive of each folder.
        files: The files of each split, which for the binary version end in `.bin`.
        per_file: The number of records in each file of a split.
        label_bytes: Number of bytes before the pixels of a binary record; the last is the label.
        label_key: The key of the labels in the python version.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    binary: str
    python: str
    archives: Mapping[str, str]
    files: Mapping[Split, Sequence[str]]
    per_file: Mapping[Split, int]
    label_bytes: int
    label_key: bytes

    def find(self, root: Root = None) -> Path | None:
        """Return the folder or archive to read the set from, or None."""
        root, (test,) = data_root(root), self.files["test"]
        if (root / f"{test}.bin").is_file() or (root / test).is_file():
            return root
        for folder in (root / self.binary, root / self.python):
            if folder.is_dir():
                return folder
        return next((root / archive for archive in self.archives.values() if (root / archive).is_file()), None)

    def load(self, root: Root = None, split: Split = "test", partial: bool = False) -> ArraySet:
        """Open the set.

        Args:
            root: The data root, or the extracted folder; see `paths.data_root`.
            split: `train` (50,000) or `test` (10,000).
            partial: Accept files with fewer records than the official ones.

        Returns:
            A set of `(3, 32, 32)` images.

        Raises:
            DataError: It is missing, or a file is damaged.
        """
        if split not in ("train", "test"):
            raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
        found = self.find(root)
        if found is None:
            raise DataError(
                data_root(root),
                f"holds no {self.title} ({self.binary} or {self.python}, or their archives)",
                f"run `testtime data get {self.name}`, or pass the folder that holds it with --data-root",
            )
        names = self.files[split]
        if found.name in (self.python, self.archives[self.python]) or (found / self.files["test"][0]).is_file():
            buffers = _buffers(found, self.python, names)
            parts = [_read_python(buffer, path, self.label_key) for path, buffer in buffers]
        else:
            buffers = _buffers(found, self.binary, [f"{name}.bin" for name in names])
            parts = [_read_binary(buffer, path, self.label_bytes) for path, buffer in buffers]
        for (path, _), (images, labels) in zip(buffers, parts, strict=True):
            if len(images) != self.per_file[split] and not partial:
                raise DataError(path, f"holds {len(images):,} records, the official file {self.per_file[split]:,}")
            check_labels(path, labels, len(self.classes))
        labels = torch.cat([torch.from_numpy(labels.astype(np.int64)) for _, labels in parts])
        images = [images for images, _ in parts]
        return ArraySet(self.name, images, labels, self.classes, f"official files ({found.name})")

    def check(self, parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
        """Read both splits and count their labels."""

        def find_faults(split: Split) -> list[str]:
            labels = self.load(root, split).labels
            assert labels is not None
            count = len(self.files[split]) * self.per_file[split] // len(self.classes)
            found = zip(self.classes, labels.bincount(minlength=len(self.classes)).tolist(), strict=True)
            path = self.find(root)
            return [f"{path}: {split} has {n:,} of {name}, not {count:,}" for name, n in found if n != count]

        return collect_faults(self.files, find_faults, progress)

    def find_fault(self, root: Root, path: Path) -> None:
        """Raise a `DataError` for a fault in names, sizes or labels."""
        if path.is_dir():  # reading an archive takes too long here
            self.load(root, "train")
            self.load(root, "test")

    def make_family(self, remote: Remote) -> Family:
        """Make the family of the set; `remote` is the archive of the binary version."""
        return Family(
            self.name,
            f"{self.title}: 60,000 images, 32×32, {len(self.classes)} classes",
            lambda part, root, split, **options: self.load(root, split, **options),
            self.check,
            find=self.find,
            find_fault=self.find_fault,
            folder=self.binary,
            remotes=(remote,),
            has_train=True,
        )


@dataclass(frozen=True)
class CifarArrays:
    """The official arrays of CIFAR-10-C or CIFAR-100-C, or generated images if they are absent.

    Attributes:
        files: The set that is corrupted.
    """

    files: CifarFiles

    @property
    def name(self) -> str:
        """Name of the set."""
        return f"{self.files.name}-c"

    @property
    def folder(self) -> str:
        """Name of the folder of the arrays."""
        return f"{self.files.title}-C"

    def find(self, root: Root = None) -> Path | None:
        """Return the folder of the arrays, or None."""
        root = data_root(root)
        if (root / self.folder).is_dir():
            return root / self.folder
        return root if root.name == self.folder and root.is_dir() else None

    def load(
        self,
        corruption: str,
        level: int,
        root: Root = None,
        source: Origin = "auto",
        seed: int = 0,
        partial: bool = False,
        frost: PathLike | None = None,
    ) -> TestSet:
        """Open one corruption at one level.

        Args:
            corruption: Its name, for example `fog`.
            level: 1 to 5.
            root: The data root, or the extracted folder.
            source: `official` reads the published arrays, `generated` corrupts the test set with
                `testtime.corruptions` as it is read, `auto` uses the arrays if they exist.
            seed: Seed of the generated images.
            partial: Accept fewer images than the official 10,000 per level.
            frost: Folder of frost photographs for generated `frost`; None: procedural textures.

        Returns:
            A set of `(3, 32, 32)` images named like `cifar10-c/fog/5`; its `origin` records the source.

        Raises:
            DataError: Both the arrays and the uncorrupted set are missing, or a file is damaged.
        """
        check_choice(corruption, level, source)
        name = f"{self.name}/{corruption}/{level}"
        folder = self.find(root)
        if source != "generated" and folder is not None and (folder / f"{corruption}.npy").exists():
            return self._read(name, folder, corruption, level, partial)
        if source == "official":
            raise DataError((folder or data_root(root) / self.folder) / f"{corruption}.npy", "no such file")
        if folder is not None and source == "auto":
            log.warning("%s has no %s.npy; generating it from %s", folder, corruption, self.files.title)
        base = self.files.load(root, "test", partial)
        return Corrupted(base, corruption, level, name=name, seed=seed, scale="cifar", frost=frost)

    def _read(self, name: str, folder: Path, corruption: str, level: int, partial: bool) -> ArraySet:
        images = map_array(folder / f"{corruption}.npy", folder, (None, 32, 32, 3))
        labels = map_array(folder / "labels.npy", folder, (len(images),))
        if len(images) % 5 or not len(images) or (len(images) != 5 * TEST_COUNT and not partial):
            fault = f"holds {len(images):,} images; five levels of {TEST_COUNT:,} are {5 * TEST_COUNT:,}"
            raise DataError(folder / f"{corruption}.npy", fault)
        count = len(images) // 5
        rows = slice((level - 1) * count, level * count)
        check_labels(folder / "labels.npy", labels[rows], len(self.files.classes))
        return ArraySet(
            name,
            [images[rows].transpose(0, 3, 1, 2)],
            torch.from_numpy(labels[rows].astype(np.int64)),
            self.files.classes,
            f"official files ({folder.name})",
        )

    def check(self, parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
        """Check the arrays that contain the parts."""

        def find_faults(corruption: str) -> list[str]:
            levels = [self.load(corruption, level, root, source="official").labels for level in SEVERITIES]
            for level, labels in zip(SEVERITIES, levels, strict=True):
                if labels is None or levels[0] is None or not levels[0].equal(labels):
                    return [f"{self.find(root)}: labels.npy has other labels at level {level} than at level 1"]
            return []

        return collect_faults(dict.fromkeys(part.split("/")[0] for part in parts), find_faults, progress)

    def find_fault(self, root: Root, path: Path) -> None:
        """Raise a `DataError` for a fault in names, sizes or labels."""
        for corruption in CORRUPTIONS:
            self.load(corruption, 5, root, source="official")

    def make_family(self, base: Family, remote: Remote) -> Family:
        """Make the family of the set; `base` is that of the uncorrupted set."""
        return Family(
            self.name,
            f"{self.files.title}'s test set under the 15 corruptions, 5 levels",
            lambda part, root, split, **options: self.load(*split_part(self.name, part), root, **options),
            self.check,
            PARTS,
            self.find,
            self.find_fault,
            folder=self.folder,
            remotes=(remote,),
            base=base,
        )


def check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    """Raise a `DataError` for a label that is not in 0..classes-1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(path, f"record {wrong[0]:,} has label {labels[wrong[0]]}, not 0 to {classes - 1}")


def _read_binary(buffer: np.ndarray, path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images `(n, 3, 32, 32)` and labels `(n,)`, views of records of label bytes and 3,072 pixel bytes."""
    length = label_bytes + _PIXELS
    if len(buffer) == 0 or len(buffer) % length:
        raise DataError(path, f"{len(buffer):,} bytes are not a whole number of records of {length:,}")
    records = buffer.reshape(-1, length)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]


def _read_python(buffer: np.ndarray, path: Path, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return images `(n, 3, 32, 32)`, a view, and labels `(n,)` of a pickled batch."""
    batch = read_batch(buffer, path)
    images: Any = batch.get(b"data")
    labels: Any = batch.get(label_key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _PIXELS or not len(images):
        raise DataError(path, "its 'data' is not an array (N, 3072)")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(path, f"its '{label_key.decode()}' are not a list of integers")
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
