"""Any folder of pictures as a test set: one folder per class, or a flat folder without labels.

Pictures are decoded in chunks, in parallel; only their names are held in memory.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from testtime.data.family import Family, Root, collect_faults
from testtime.data.paths import within
from testtime.data.pictures import PIXEL_LIMIT, SUFFIXES, Resize, checked_resize, fit_pictures
from testtime.data.sets import DataError, OnBad, TensorSet, TestSet, check_on_bad, leave_out
from testtime.progress import Progress
from testtime.storage import error_text

if TYPE_CHECKING:
    from typing_extensions import Self

_SHOWN = 10
_KNOWN: dict[tuple[str, str], dict[int, DataError]] = {}  # (folder, fingerprint) → faults


class PictureSet(TestSet):
    """Picture files as a test set, each resized and cropped to a square.

    Args:
        name: Name of the set.
        folder: The folder of the files.
        files: Their paths relative to the folder, in the order of the samples.
        labels: Integers `(N,)`, or None.
        classes: Class names.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        threads: Number of decoding threads; None: one per core.
        limit: Maximum number of pixels of a picture.
        notes: One line per item already skipped.
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
        notes: Sequence[str] = (),
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
        self._skipped = tuple(notes)
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._skipped

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def _read(self, numbers: Tensor) -> Tensor:
        paths = [self.folder / self.files[number] for number in numbers.tolist()]
        return fit_pictures(paths, self.size, self.resize, self.limit, self.threads)

    def fingerprint(self) -> str:
        """Return a hash of the files' names and sizes, and of the image geometry."""
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256(f"{self.size} {self.resize}\n".encode())
        for name in self.files:
            try:
                length = (self.folder / name).stat().st_size
            except OSError as error:
                raise DataError(self.folder / name, f"cannot be read ({error_text(error)})") from None
            digest.update(f"{name}\0{length}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def try_images(self, numbers: Tensor) -> tuple[Tensor, dict[int, DataError]]:
        """Return the images of some samples, black if unreadable, and the faults by sample index."""
        paths, faults = [self.folder / self.files[number] for number in numbers.tolist()], {}
        images = fit_pictures(paths, self.size, self.resize, self.limit, self.threads, faults)
        return images, {int(numbers[row]): fault for row, fault in sorted(faults.items())}

    def format_fault(self, fault: DataError) -> str:
        """Format a fault in one line, with the file's path relative to the folder."""
        prefix = f"{self.folder}{os.sep}"
        return str(DataError(fault.path.removeprefix(prefix), fault.fault, fault.remedy))

    def faults(self, progress: Progress | None = None) -> list[DataError]:
        """Return the faults of unreadable pictures; `progress` as for `check`."""
        return list(self._find_faults(progress).values())

    def _find_faults(self, progress: Progress | None = None) -> dict[int, DataError]:
        found: dict[int, DataError] = {}
        for numbers in torch.arange(len(self), device="cpu").split(64):
            found |= self.try_images(numbers)[1]
            if progress is not None:
                progress(int(numbers[-1]) + 1, len(self), "")
        return found

    def check(self, on_bad: OnBad, progress: Progress | None = None) -> Self:
        """Decode every picture once, to find unreadable ones.

        The result is cached, so that a run that opens a set several times decodes it only once.

        Args:
            on_bad: "fail" raises the first fault; "skip" leaves unreadable pictures out.
            progress: Called with the number of pictures done and their total.

        Returns:
            This set, or a copy without the unreadable pictures, which are listed in `skipped`.

        Raises:
            DataError: A picture cannot be read, or none can.
        """
        check_on_bad(on_bad)
        key = str(self.folder), self.fingerprint()
        if key not in _KNOWN:
            _KNOWN[key] = self._find_faults(progress)
        return self.without(_KNOWN[key], on_bad)

    def without(self, faults: Mapping[int, DataError], on_bad: OnBad) -> Self:
        """Return this set without the samples that have faults; with "fail", raise the first fault."""
        if not faults:
            return self
        if on_bad == "fail":
            raise next(iter(faults.values()))
        if len(faults) == len(self):
            raise DataError(self.folder, f"holds no picture that can be read; the first: {next(iter(faults.values()))}")
        fingerprint = leave_out(self.fingerprint(), list(faults))
        good = [number for number in range(len(self)) if number not in faults]
        rest = self.pick(torch.tensor(good, dtype=torch.int64, device="cpu"))
        rest._fingerprint, rest.name = fingerprint, self.name
        rest._skipped = (*self._skipped, *map(self.format_fault, faults.values()))
        return rest

    def pick(self, numbers: Tensor, name: str | None = None) -> Self:
        """Return a subset with its own sample indices."""
        part = copy.copy(self)
        part.name = self.name if name is None else name
        part.files = [self.files[number] for number in numbers.tolist()]
        part.labels = None if self.labels is None else self.labels[numbers]
        part.right = None if self.right is None else self.right[numbers]
        part._fingerprint = None
        return part

    def load_into_memory(self, on_bad: OnBad = "fail", progress: Progress | None = None) -> TestSet:
        """Decode the whole set into memory.

        Args:
            on_bad: As for `check`.
            progress: Called with the number of pictures done and their total.

        Raises:
            DataError: As for `check`.
        """
        check_on_bad(on_bad)
        images = torch.empty((len(self), *self.shape), dtype=torch.uint8, device="cpu")
        faults: dict[int, DataError] = {}
        for numbers in torch.arange(len(self), device="cpu").split(256):
            images[numbers], found = self.try_images(numbers)
            if found and on_bad == "fail":
                raise next(iter(found.values()))
            faults |= found
            if progress is not None:
                progress(int(numbers[-1]) + 1, len(self), "")
        good = self.without(faults, on_bad)
        if faults:
            images = images[[number for number in range(len(self)) if number not in faults]]
        return _Held(good, images)


class _Held(TensorSet):
    """Decoded pictures in memory, with the fingerprint of their files."""

    def __init__(self, pictures: PictureSet, images: Tensor) -> None:
        super().__init__(pictures.name, images, pictures.labels, pictures.classes)
        self.right, self.origin = pictures.right, pictures.origin
        self._skipped, self._fingerprint, self._scores = pictures.skipped, pictures.fingerprint(), pictures.scores

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._skipped

    def scores(self, logits: Tensor) -> Tensor:
        return self._scores(logits)

    def fingerprint(self) -> str:
        return self._fingerprint


def load(
    folder: str | os.PathLike[str],
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    limit: int = PIXEL_LIMIT,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> PictureSet:
    """Open a folder of pictures as a test set.

    Its subfolders are the classes, sorted by name. Without subfolders, its pictures are an unlabelled set.

    Args:
        folder: The folder.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        classes: The class folders in the order of the network's outputs; None: all subfolders.
        threads: Number of decoding threads; None: one per core.
        limit: Maximum number of pixels of a picture.
        on_bad: "fail" decodes every picture and raises an error for the first that is unreadable; "skip" leaves
            unreadable pictures and empty classes out. None: errors are raised when a picture is read.
        progress: Called with the number of pictures checked and their total.

    Raises:
        DataError: The folder does not exist or holds no pictures, or a picture cannot be read.
    """
    pictures = list_pictures(folder, size, resize, classes, threads, limit, on_bad)
    return pictures if on_bad is None else pictures.check(on_bad, progress)


def list_pictures(
    folder: str | os.PathLike[str],
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    limit: int = PIXEL_LIMIT,
    on_bad: OnBad | None = None,
) -> PictureSet:
    """List the picture files of a folder without opening them; arguments as for `load`."""
    folder = Path(os.path.expanduser(folder))
    found = _folders(folder)
    name = f"folder/{os.path.basename(os.path.realpath(folder))}"
    if classes is None and not found:
        files = _pictures(folder, folder)
        if not files:
            raise DataError(folder, "holds neither pictures nor folders of pictures")
        return PictureSet(name, folder, files, None, (), size, resize, threads, limit)
    files, labels, found, notes = list_classes(folder, classes, on_bad)
    return PictureSet(name, folder, files, labels, found, size, resize, threads, limit, notes)


def check_pictures(openers: Collection[Callable[[], TestSet]], progress: Progress | None = None) -> list[str]:
    """Decode every picture of some sets.

    Args:
        openers: Functions that open the sets, each a `PictureSet`.
        progress: Called with the number of pictures done and their total, over all sets.

    Returns:
        One line per fault, those of sets that cannot be opened first.
    """
    found: list[PictureSet] = []

    def add(opener: Callable[[], TestSet]) -> list[str]:
        pictures = opener()
        assert isinstance(pictures, PictureSet)
        found.append(pictures)
        return []

    faults = collect_faults(openers, add)
    total, before = sum(map(len, found)), 0
    for pictures in found:

        def advance(done: int, _: int, word: str, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total, word)

        faults.extend(map(str, pictures.faults(advance)))
        before += len(pictures)
    return faults


def list_classes(
    folder: Path, classes: Sequence[str] | None = None, on_bad: OnBad | None = None
) -> tuple[list[str], Tensor, tuple[str, ...], list[str]]:
    """List the pictures of a folder with one subfolder per class.

    Args:
        folder: The folder.
        classes: The class folders in the order of the labels; a class without a folder has no samples. None: all
            subfolders, sorted by name.
        on_bad: With "skip", a class without pictures is allowed and noted.

    Returns:
        Paths relative to the folder, by class and then by name; labels, int64 `(N,)`; the classes; the notes.

    Raises:
        DataError: The folder does not exist, a subfolder is not among `classes` or has no pictures, or a link leads
            out of the folder.
    """
    found = _folders(folder)
    if not found:
        raise DataError(folder, "holds no folders of pictures")
    if classes is None:
        classes = found
    unknown = sorted(set(found) - set(classes))
    if unknown:
        known = ", ".join(classes[:_SHOWN]) + ("…" if len(classes) > _SHOWN else "")
        raise DataError(folder / unknown[0], f"not one of the classes requested ({known})")
    files: list[str] = []
    counts: list[int] = []
    notes: list[str] = []
    for name in classes:
        members = _pictures(folder / name, folder) if name in found else []
        if name in found and not members:
            if on_bad != "skip":
                raise DataError(folder / name, "holds no pictures")
            notes.append(f"{name}: holds no pictures")
        files.extend(f"{name}/{member}" for member in members)
        counts.append(len(members))
    labels = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int64), counts))
    if not files:
        raise DataError(folder, "holds no pictures")
    return files, labels, tuple(classes), notes


def _folders(folder: Path) -> list[str]:
    """Return the names of the subfolders, sorted."""
    return sorted(
        entry.name for entry in _entries(folder, folder) if os.path.isdir(entry.path) and not entry.name.startswith(".")
    )


def _pictures(folder: Path, tree: Path) -> list[str]:
    """Return the names of the picture files in a folder, sorted."""
    return sorted(
        entry.name
        for entry in _entries(folder, tree)
        if os.path.splitext(entry.name)[1].lower() in SUFFIXES
        and not entry.name.startswith(".")
        and os.path.isfile(entry.path)
    )


def _entries(folder: Path, tree: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; links must not lead out of the tree."""
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except FileNotFoundError:
        raise DataError(folder, "no such folder") from None
    except NotADirectoryError:
        raise DataError(folder, "not a folder") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(folder, f"cannot be read ({error_text(error)})") from None
    for entry in entries:
        if entry.is_symlink():
            within(Path(entry.path), tree)
    return entries


def _open(part: str, root: Root, split: str = "test", **options: Any) -> PictureSet:
    if root is None:
        raise ValueError("`root` must name the folder of pictures.")
    return load(root, **options)


FOLDER = Family(
    "folder",
    "any folder of pictures, with one folder per class or without labels",
    _open,
    lambda parts, root, progress: check_pictures([lambda: _open("", root)], progress),
    parts=(),
    sized=True,
    pictures=True,
)
