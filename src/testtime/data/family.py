"""`Family`, the definition of a data set; `families.FAMILIES` lists them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from testtime.data.sets import DataError, TestSet
from testtime.progress import Progress

Root = str | os.PathLike[str] | None
"""The data root, or the folder of a set; None: the default data root, see `paths.data_root`."""

T = TypeVar("T")


@dataclass(frozen=True)
class Remote:
    """A file to download.

    Attributes:
        url: Its URL.
        size: Its size in bytes.
        checksum: `md5:` or `sha256:` and the hexadecimal digest.
        folder: The folder that an archive extracts to, or that a plain file is stored in.
        archive: Whether it is an archive.
    """

    url: str
    size: int
    checksum: str
    folder: str
    archive: bool = True


@dataclass(frozen=True)
class Family:
    """A data set, or several that share a name up to the first slash.

    Attributes:
        name: The name up to the first slash.
        what: One-line description.
        open: Opens one of its sets. Called with its part (`fog/5`, or `""`), the root, the split, and the options of
            the set as keyword arguments.
        check: Reads whole parts and returns one line per fault.
        parts: The parts of its sets, in order; `""` for a set without one. Empty if the sets have no fixed names
            (`folder`).
        find: Finds the folder or archive to read from; None for a set without files.
        find_fault: Returns a fault visible from names, sizes and headers of what `find` returned, or None.
        folder: Its default folder under the data root.
        remotes: The files to download.
        elsewhere: How to get it if it cannot be downloaded; `{root}` is the data root.
        base: The family that it is generated from if it has no files.
        sized: Whether the size of its images can be chosen: `open` takes `size`.
        pictures: Whether it is read from picture files: `open` takes `on_bad` and `progress`.
        has_train: Whether it has a training split.
        packs: Whether it can be packed: `open` takes `packed`.
        is_subset: Whether it has a subset of a network's classes: `open` takes `classes`, the names of the network's
            classes in the order of its outputs.
    """

    name: str
    what: str
    open: Callable[..., TestSet]
    check: Callable[[Sequence[str], Root, Progress | None], list[str]] = lambda parts, root, progress: []
    parts: tuple[str, ...] = ("",)
    find: Callable[[Root], Path | None] | None = None
    find_fault: Callable[[Root, Path], str | None] = lambda root, path: None
    folder: str = ""
    remotes: tuple[Remote, ...] = ()
    elsewhere: str = ""
    base: Family | None = None
    sized: bool = False
    pictures: bool = False
    has_train: bool = False
    packs: bool = False
    is_subset: bool = False

    @property
    def is_bundled(self) -> bool:
        """Whether it is bundled with the package, or generated from a set that is."""
        return self.find is None and bool(self.parts) and (self.base is None or self.base.is_bundled)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its sets."""
        return tuple(f"{self.name}/{part}" if part else self.name for part in self.parts)


def collect_faults(items: Collection[T], find: Callable[[T], list[str]], progress: Progress | None = None) -> list[str]:
    """Collect the faults of items, one line each; a `DataError` counts as a fault.

    Args:
        items: The items to check.
        find: Returns the faults of one item.
        progress: Called with the number of items done and their total.
    """
    faults: list[str] = []
    for done, item in enumerate(items, start=1):
        try:
            faults.extend(find(item))
        except DataError as error:
            faults.append(str(error))
        if progress is not None:
            progress(done, len(items), "")
    return faults
