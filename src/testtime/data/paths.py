"""Paths of data sets, and safe reading of their small files.

The data root is the argument, else the environment variable `TESTTIME_DATA`, else `testtime` in the user's cache
folder. Links that lead out of a data set's folder are not followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testtime import storage
from testtime.data.sets import DataError, convert_file_errors
from testtime.storage import check_file, error_text


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data sets; it may not exist.

    Args:
        root: The folder; None: `$TESTTIME_DATA`, else `$XDG_CACHE_HOME/testtime`, else `~/.cache/testtime`.
    """
    if root is not None:
        return Path(os.path.expanduser(root))
    if os.environ.get("TESTTIME_DATA"):
        return Path(os.path.expanduser(os.environ["TESTTIME_DATA"]))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "testtime")


def first_existing(paths: Iterable[Path]) -> Path | None:
    """Return the first path that exists, or None."""
    return next((path for path in paths if path.exists()), None)


def within(path: Path, tree: Path) -> Path:
    """Return `path` after checking that no link in it leads out of `tree`, which may itself be a link.

    Raises:
        DataError: A link leads out, or is circular.
    """
    try:
        resolved = path.resolve()
        if resolved.is_symlink():  # circular; up to Python 3.12 `resolve` raises
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        inside = resolved.is_relative_to(tree.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circular link; ValueError: an invalid name
        raise DataError(path, f"cannot be followed ({error_text(error)})") from None
    if not inside:
        raise DataError(path, f"leads out of {tree}")
    return path


def regular(path: Path, tree: Path) -> Path:
    """Return `path` after checking that it is a non-empty regular file in the tree.

    Raises:
        DataError: It is missing, empty, outside the tree, or not a regular file.
    """
    with convert_file_errors():
        check_file(within(path, tree))
    return path


def read_json(path: Path, tree: Path) -> Any:
    """Read a JSON file of a data set.

    Raises:
        DataError: It is missing, outside the tree, or not valid JSON.
    """
    with convert_file_errors():
        return storage.read_json(within(path, tree))
