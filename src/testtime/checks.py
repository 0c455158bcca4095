"""Checks of what comes from outside: arguments, studies, the descriptions in run.json, units and summaries.

Names become file names and are printed, numbers are computed with, tables are walked through: a value is checked before
any of that, once, where it comes in.
"""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from testtime.storage import FileError, PathLike

LONGEST = 100
"""Characters that the name of a method or a network may have."""

_FILE_NAME = 255  # bytes that file systems allow
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")

Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""


def is_integer(value: Any, low: int = -(2**63), high: int = 2**63 - 1) -> bool:
    """Whether a value is an integer in a range; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def is_table(value: Any) -> bool:
    """Whether a value is a table, of texts to anything."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def is_table_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A test for tables whose values pass another test."""
    return lambda value: is_table(value) and all(fits(one) for one in value.values())


def is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A test for lists whose entries pass another test."""
    return lambda value: isinstance(value, list) and all(fits(one) for one in value)


def is_shallow(value: Any, levels: int = 20) -> bool:
    """Whether tables and lists are nested no deeper than so many levels, as all of ours are."""
    layer = [value]
    for _ in range(levels):
        held = [one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, dict | list)]
        layer = [inner for outer in held for inner in outer]
        if not layer:
            return True
    return False


def check_table(value: Any) -> None:
    """Check that a value is a table, and that what it holds can be walked through.

    Raises:
        ValueError: It is none, or nested too deeply.
    """
    if not is_table(value):
        raise ValueError(f"it must be a table, got {show(value)}.")
    if not is_shallow(value):
        raise ValueError("it is nested too deeply.")


def check_entries(table: Mapping[str, Any], kinds: Mapping[str, Kind], required: Sequence[str] = ()) -> None:
    """Check the entries of a table that are known; others may be there.

    Args:
        table: The table.
        kinds: What each entry must be.
        required: The entries that must not be missing.

    Raises:
        ValueError: One is of another kind, or missing.
    """
    for name in required:
        if name not in table:
            raise ValueError(f"`{name}` is missing.")
    for name, (what, fits) in kinds.items():
        if name in table and not fits(table[name]):
            raise ValueError(f"`{name}` must be {what}, got {show(table[name])}.")


def check_format(path: PathLike, found: Any, known: int) -> None:
    """Check the format that a file says it has.

    Raises:
        FileError: It is another one.
    """
    if not is_integer(found) or found != known:
        fault = "has no format" if found is None else f"has format {show(found)}"
        raise FileError(path, fault, f"this version of testtime reads format {known}")


def check_name(what: str, name: Any, longest: int = LONGEST) -> None:
    """Check a name that becomes a part of a file's path.

    Args:
        what: What it is, for the message.
        name: The name.
        longest: How many characters it may have.

    Raises:
        ValueError: It is no text, empty, too long, hidden, leads elsewhere or cannot be printed.
    """
    if not is_file_name(name) or len(name) > longest or name[0] == "." or "\\" in name:
        raise ValueError(
            f"{what} must be fit for a file's name: at most {longest} printable characters, no slashes, no dot in "
            f"front, got {show(name)}."
        )


def is_file_name(part: Any) -> bool:
    """Whether a part of a name can be a file's, once it is quoted."""
    return (
        isinstance(part, str)
        and part not in ("", ".", "..")
        and "/" not in part
        and all(unicodedata.category(char) not in _UNPRINTABLE for char in part)
        and len(quote_name(part)) <= _FILE_NAME
    )


def quote_name(part: str) -> str:
    """A part of a name as a file's name."""
    return quote(part, safe=" +=@,()")


def fold_name(name: str) -> str:
    """A name as file systems compare them that know neither case nor how an accent is written."""
    return unicodedata.normalize("NFC", name).casefold()


def show(value: Any) -> str:
    """A value in a message, shortened, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return f"an {type(value).__name__} of too many digits"
