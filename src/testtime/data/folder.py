"""Any folder of pictures as a test set: a folder for each class, or a flat folder without labels.

Pictures are decoded by the chunk, in parallel; nothing else is held in memory but their names.
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
_KNOWN: dict[tuple[str, str], dict[int, DataError]] = {}  # what `PictureSet.faults` found, by folder and fingerprint


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
        notes: Lines on what has been left out already.
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
        self._mark: str | None = None

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
        """A hash of the files' names and lengths and of the geometry."""
        if self._mark is not None:
            return self._mark
        digest = hashlib.sha256(f"{self.size} {self.resize}\n".encode())
        for name in self.files:
            try:
                length = (self.folder / name).stat().st_size
            except OSError as error:
                raise DataError(self.folder / name, f"cannot be read ({error_text(error)})") from None
            digest.update(f"{name}\0{length}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def try_images(self, numbers: Tensor) -> tuple[Tensor, dict[int, DataError]]:
        """The images of some samples as far as they can be read, black where not; and the faults by sample number."""
        paths, faults = [self.folder / self.files[number] for number in numbers.tolist()], {}
        images = fit_pictures(paths, self.size, self.resize, self.limit, self.threads, faults)
        return images, {int(numbers[row]): fault for row, fault in sorted(faults.items())}

    def format_fault(self, fault: DataError) -> str:
        """A fault in one line that names the file by its path in the folder: the same wherever the folder is."""
        prefix = f"{self.folder}{os.sep}"
        return str(DataError(fault.path.removeprefix(prefix), fault.fault, fault.remedy))

    def faults(self, progress: Progress | None = None) -> list[DataError]:
        """What is wrong with the pictures that cannot be decoded; `progress` as for `check`."""
        return list(self._find_faults(progress).values())

    def _find_faults(self, progress: Progress | None = None) -> dict[int, DataError]:
        found: dict[int, DataError] = {}
        for numbers in torch.arange(len(self), device="cpu").split(64):
            found |= self.try_images(numbers)[1]
            if progress is not None:
                progress(int(numbers[-1]) + 1, len(self), "")
        return found

    def check(self, on_bad: OnBad, progress: Progress | None = None) -> Self:
        """Decode every picture once, before the set is used.

        The outcome is cached, so that a run that opens a set several times decodes it only once.

        Args:
            on_bad: "fail" raises the first fault; "skip" leaves out what cannot be read.
            progress: Called with how many of how many pictures are done.

        Returns:
            This set, or the same without the pictures that cannot be read; `skipped` names them.

        Raises:
            DataError: A picture cannot be read, or none can.
        """
        check_on_bad(on_bad)
        key = str(self.folder), self.fingerprint()
        if key not in _KNOWN:
            _KNOWN[key] = self._find_faults(progress)
        return self.without(_KNOWN[key], on_bad)

    def without(self, faults: Mapping[int, DataError], on_bad: OnBad) -> Self:
        """This set less some samples, or for "fail" the first of their faults raised."""
        if not faults:
            return self
        if on_bad == "fail":
            raise next(iter(faults.values()))
        if len(faults) == len(self):
            raise DataError(self.folder, f"holds no picture that can be read; the first: {next(iter(faults.values()))}")
        mark = leave_out(self.fingerprint(), list(faults))
        good = [number for number in range(len(self)) if number not in faults]
        rest = self.pick(torch.tensor(good, dtype=torch.int64, device="cpu"))
        rest._mark, rest.name = mark, self.name
        rest._skipped = (*self._skipped, *map(self.format_fault, faults.values()))
        return rest

    def pick(self, numbers: Tensor, name: str | None = None) -> Self:
        """Some samples as a set of their own, numbered anew."""
        part = copy.copy(self)
        part.name = self.name if name is None else name
        part.files = [self.files[number] for number in numbers.tolist()]
        part.labels = None if self.labels is None else self.labels[numbers]
        part.right = None if self.right is None else self.right[numbers]
        part._mark = None
        return part

    def hold(self, on_bad: OnBad = "fail", progress: Progress | None = None) -> TestSet:
        """The same set in memory, every picture decoded once.

        Args:
            on_bad: As for `check`.
            progress: Called with how many of how many pictures are done.

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
    """Picture files that have been decoded; known by the files' fingerprint."""

    def __init__(self, pictures: PictureSet, images: Tensor) -> None:
        super().__init__(pictures.name, images, pictures.labels, pictures.classes)
        self.right, self.origin = pictures.right, pictures.origin
        self._skipped, self._mark, self._scores = pictures.skipped, pictures.fingerprint(), pictures.scores

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._skipped

    def scores(self, logits: Tensor) -> Tensor:
        return self._scores(logits)

    def fingerprint(self) -> str:
        return self._mark


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
    """A folder of pictures as a test set.

    Folders in it are the classes, sorted by name. Without any, the pictures directly in it are an unlabelled set.

    Args:
        folder: The folder.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        classes: The class folders in the order of the network's outputs; None takes those there are.
        threads: Pictures decoded at once; None takes one for each core.
        limit: The most pixels a picture may have.
        on_bad: "fail" decodes every picture once and names the first that cannot be; "skip" leaves those out that
            cannot be, as well as folders without pictures. None finds out when a picture is read.
        progress: Called with how many of how many pictures are checked.

    Raises:
        DataError: There is no such folder, or it holds no pictures; or one of them cannot be read.
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
    """A folder's picture files, none of them opened yet; arguments as for `load`."""
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
        openers: Open the sets, each a `PictureSet`.
        progress: Called with how many of how many pictures of all sets are done.

    Returns:
        One line for each fault: of sets that cannot be opened first.
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
    """The pictures of a folder that has a folder for each class.

    Args:
        folder: The folder.
        classes: Its class folders in the order of the labels; one without a folder has no samples. None takes all
            folders, sorted by name.
        on_bad: For "skip" a class without pictures is noted; it stays a class, without samples.

    Returns:
        Paths relative to the folder, by class and then by name; labels, int64 `(N,)`; the classes; the notes.

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
        known = ", ".join(classes[:_SHOWN]) + ("…" if len(classes) > _SHOWN else "")
        raise DataError(folder / strangers[0], f"not one of the classes asked for ({known})")
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
    """The names of the folders in a folder, sorted."""
    return sorted(
        entry.name for entry in _entries(folder, folder) if os.path.isdir(entry.path) and not entry.name.startswith(".")
    )


def _pictures(folder: Path, tree: Path) -> list[str]:
    """The names of the picture files in a folder, sorted."""
    return sorted(
        entry.name
        for entry in _entries(folder, tree)
        if os.path.splitext(entry.name)[1].lower() in SUFFIXES
        and not entry.name.startswith(".")
        and os.path.isfile(entry.path)
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
    "any folder of pictures, with a folder for each class or without labels",
    _open,
    lambda parts, root, progress: check_pictures([lambda: _open("", root)], progress),
    parts=(),
    sized=True,
    pictures=True,
)
