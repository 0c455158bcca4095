"""Any folder of pictures as a test set: a folder for each class, or a flat folder without labels.

Pictures are decoded by the chunk, in parallel; nothing else is held in memory but their names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from testtime.data.pictures import PIXEL_LIMIT, SUFFIXES, Resize, checked_resize, fit_pictures
from testtime.data.places import within
from testtime.data.sets import DataError, TestSet


class PictureSet(TestSet):
    """Picture files as a test set, each resized and cropped to a square.

    Args:
        name: What it is called.
        folder: Where the files are.
        files: Their paths relative to the folder; the order is the numbering.
        labels: Integers `(N,)`, or None.
        classes: The names of the classes.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        threads: Pictures decoded at once; None takes one for each core.
        limit: The most pixels a picture may have.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        files: Sequence[str],
        labels: Tensor | None,
        classes: Sequence[str],
        size: int = 224,
        resize: Resize | None = None,
        threads: int | None = None,
        limit: int = PIXEL_LIMIT,
    ) -> None:
        if labels is not None and len(labels) != len(files):
            raise ValueError(f"`labels` must have {len(files)} entries, got {len(labels)}.")
        self.name = name
        self.folder = folder
        self.files = list(files)
        self.labels = None if labels is None else labels.to(torch.int64)
        self.classes = tuple(classes)
        self.size = size
        self.resize: Resize = checked_resize(size, resize)
        self.threads = threads
        self.limit = limit

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def _read(self, numbers: Tensor) -> Tensor:
        paths = [self.folder / self.files[number] for number in numbers.tolist()]
        return fit_pictures(paths, self.size, self.resize, self.limit, self.threads)

    def fingerprint(self) -> str:
        """A hash of the files' names and lengths and of the geometry."""
        digest = hashlib.sha256(f"{self.size} {self.resize}\n".encode())
        for name in self.files:
            try:
                length = (self.folder / name).stat().st_size
            except OSError as error:
                raise DataError(self.folder / name, error.strerror or "cannot be read") from None
            digest.update(f"{name}\0{length}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def faults(self, progress: Callable[[int, int], None] | None = None) -> list[DataError]:
        """Decode every picture and say which cannot be; `progress` is told how many of how many are done."""
        found: list[DataError] = []
        for start in range(0, len(self), 64):
            numbers = range(start, min(start + 64, len(self)))
            try:
                self.images(numbers)
            except DataError:
                found.extend(fault for fault in map(self._fault, numbers) if fault is not None)
            if progress is not None:
                progress(numbers.stop, len(self))
        return found

    def _fault(self, number: int) -> DataError | None:
        try:
            self.images([number])
        except DataError as error:
            return error
        return None


def load(
    folder: str | os.PathLike[str],
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    limit: int = PIXEL_LIMIT,
) -> PictureSet:
    """A folder of pictures as a test set.

    Folders in it are the classes, sorted by name. Without any, the pictures directly in it are an unlabelled set.

    Args:
        folder: The folder.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        classes: The class folders in the order of the network's outputs; None takes those there are.
        threads: Pictures decoded at once; None takes one for each core.
        limit: The most pixels a picture may have.

    Raises:
        DataError: There is no such folder, or it holds no pictures.
    """
    folder = Path(folder).expanduser()
    name = f"folder/{folder.resolve().name}"
    if classes is None and not _folders(folder):
        files = _pictures(folder, folder)
        if not files:
            raise DataError(folder, "holds neither pictures nor folders of pictures")
        return PictureSet(name, folder, files, None, (), size, resize, threads, limit)
    files, labels, found = list_classes(folder, classes)
    return PictureSet(name, folder, files, labels, found, size, resize, threads, limit)


def list_classes(folder: Path, classes: Sequence[str] | None = None) -> tuple[list[str], Tensor, tuple[str, ...]]:
    """The pictures of a folder that has a folder for each class.

    Args:
        folder: The folder.
        classes: Its class folders in the order of the labels; one without a folder has no samples. None takes all
            folders, sorted by name.

    Returns:
        Paths relative to the folder, by class and then by name; labels, int64 `(N,)`; the classes.

    Raises:
        DataError: No such folder, a class that is not among `classes`, a class without pictures, or a link that leads
            out.
    """
    found = _folders(folder)
    if not found:
        raise DataError(folder, "holds no folders of pictures")
    if classes is None:
        classes = found
    strangers = sorted(set(found) - set(classes))
    if strangers:
        raise DataError(folder / strangers[0], "not one of the classes asked for")
    files: list[str] = []
    counts: list[int] = []
    for name in classes:
        members = _pictures(folder / name, folder) if name in found else []
        if name in found and not members:
            raise DataError(folder / name, "holds no pictures")
        files.extend(f"{name}/{member}" for member in members)
        counts.append(len(members))
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return files, labels, tuple(classes)


def _folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted."""
    return sorted(entry.name for entry in _entries(folder, folder) if entry.is_dir() and not entry.name.startswith("."))


def _pictures(folder: Path, tree: Path) -> list[str]:
    """The names of the picture files in a folder, sorted."""
    return sorted(
        entry.name
        for entry in _entries(folder, tree)
        if os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.name.startswith(".") and entry.is_file()
    )


def _entries(folder: Path, tree: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; links are followed only inside the tree."""
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except FileNotFoundError:
        raise DataError(folder, "no such folder") from None
    except NotADirectoryError:
        raise DataError(folder, "not a folder") from None
    except OSError as error:
        raise DataError(folder, error.strerror or "cannot be read") from None
    for entry in entries:
        if entry.is_symlink():
            within(Path(entry.path), tree)
    return entries
