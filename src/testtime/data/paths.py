"""Where data sets lie on disk, and reading their small files with care.

The data root is the argument, else the environment variable `TESTTIME_DATA`, else `testtime` in the user's cache
folder. Nothing is ever read through a link that leads out of the data set's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testtime import storage
from testtime.data.sets import DataError, as_data_errors
from testtime.storage import check_file, error_text


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder in which data sets are searched for; it need not exist.

    Args:
        root: The folder itself; None takes `TESTTIME_DATA`, else `$XDG_CACHE_HOME/testtime`, else `~/.cache/testtime`.
    """
    if root is not None:
        return Path(os.path.expanduser(root))
    if os.environ.get("TESTTIME_DATA"):
        return Path(os.path.expanduser(os.environ["TESTTIME_DATA"]))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "testtime")


def first_existing(paths: Iterable[Path]) -> Path | None:
    """The first of some paths that exists, or None."""
    return next((path for path in paths if path.exists()), None)


def within(path: Path, tree: Path) -> Path:
    """`path` itself, once it is sure that no link on the way leads out of `tree`.

    The tree may be a link; only what is inside it counts.

    Raises:
        DataError: It leads out, or goes round in circles.
    """
    try:
        inside = path.resolve().is_relative_to(tree.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circle; ValueError: no name for a file
        raise DataError(path, f"cannot be followed ({error_text(error)})") from None
    if not inside:
        raise DataError(path, f"leads out of {tree}")
    return path


def regular(path: Path, tree: Path) -> Path:
    """`path` itself, once it is sure that it is a file of the tree and not empty.

    Raises:
        DataError: It is missing, empty, outside the tree, or something else than a file.
    """
    with as_data_errors():
        check_file(within(path, tree))
    return path


def read_json(path: Path, tree: Path) -> Any:
    """The content of a JSON file of a data set.

    Raises:
        DataError: It is missing, outside the tree, or not JSON.
    """
    with as_data_errors():
        return storage.read_json(within(path, tree))
