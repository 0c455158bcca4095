"""`Family`: the one record that says all there is to know about a data set; `families.FAMILIES` lists them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from testtime.data.sets import DataError, TestSet
from testtime.progress import Progress

Root = str | os.PathLike[str] | None
"""The data root, or a set's own folder; None takes the usual data root, see `paths.data_root`."""

T = TypeVar("T")


@dataclass(frozen=True)
class Remote:
    """A file to fetch.

    Attributes:
        url: Where it is.
        size: Its length in bytes.
        checksum: `md5:` or `sha256:` and the digits.
        folder: What an archive extracts to, or the folder that a plain file belongs in.
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
        what: One line on what it is.
        open: Opens one of its sets. Called with its part (`fog/5`, or `""`), the root, the split, and what options
            the set has by name.
        check: Reads some of its parts through and returns one line for each fault.
        parts: What follows the slash in the names of its sets, in order; `""` is the name alone. Without any, the sets
            have no names of their own (`folder`).
        find: Finds the folder or archive from which it is read; None for a set that needs no files of its own.
        find_fault: What names, lengths and headers show to be wrong with what `find` has found, or None.
        folder: Its usual folder under the data root.
        remotes: The files to download.
        elsewhere: Without a download, how to get it; `{root}` is the data root.
        base: The family from which it is generated where it has no files.
        sized: Whether its images have the size one asks for: `open` takes `size`.
        pictures: Whether it is read from picture files: `open` takes `on_bad` and `progress`.
        has_train: Whether it has a training split.
        packs: Whether `pack_all` takes it: `open` takes `packed`.
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

    @property
    def is_bundled(self) -> bool:
        """Whether it comes with the package, or is generated from a set that does."""
        return self.find is None and bool(self.parts) and (self.base is None or self.base.is_bundled)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its sets."""
        return tuple(f"{self.name}/{part}" if part else self.name for part in self.parts)


def collect_faults(items: Collection[T], find: Callable[[T], list[str]], progress: Progress | None = None) -> list[str]:
    """What is wrong with some things, a line for each fault; a `DataError` is one.

    Args:
        items: What to check.
        find: Returns the faults of one of them.
        progress: Called with how many of how many are done.
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
