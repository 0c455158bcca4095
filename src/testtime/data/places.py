"""Where data sets lie on disk, and reading their small files with care.

The data root is the argument, else the environment variable `TESTTIME_DATA`, else `testtime` in the user's cache
folder. Nothing is ever read through a link that leads out of the data set's own folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testtime.data.sets import DataError


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder in which data sets are looked for; it need not exist.

    Args:
        root: The folder itself; None takes `TESTTIME_DATA`, else `$XDG_CACHE_HOME/testtime`, else `~/.cache/testtime`.
    """
    if root is not None:
        return Path(root).expanduser()
    if os.environ.get("TESTTIME_DATA"):
        return Path(os.environ["TESTTIME_DATA"]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "testtime"


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
    except (OSError, RuntimeError) as error:  # Python before 3.13 reports a circle as RuntimeError
        raise DataError(path, f"a link that cannot be followed ({error})") from None
    if not inside:
        raise DataError(path, f"leads out of {tree}")
    return path


def read_json(path: Path, tree: Path) -> Any:
    """The content of a JSON file of a data set.

    Raises:
        DataError: It is missing, outside the tree, or not JSON.
    """
    try:
        with open(within(path, tree), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise DataError(path, "no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(path, f"not readable as JSON ({error})") from None
