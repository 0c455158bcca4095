"""Validation of external input: arguments, studies, checkpoints, run.json, units and summaries.

Names become file names and are printed, numbers enter computations, tables are traversed: each value is validated once,
where it is read, before any of that.
"""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from testtime.storage import FileError, PathLike

LONGEST = 100
"""Maximum length of the name of a method or a network, in characters."""

_FILE_NAME = 255  # maximum length in bytes on common file systems
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxdict = 100, 100, 10

Kind = tuple[str, Callable[[Any], bool]]
"""A description of the accepted values, for messages, and a predicate that accepts them."""


def is_integer(value: Any, low: int = -(2**63), high: int = 2**63 - 1) -> bool:
    """Whether a value is an integer in a range; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_text(value: Any) -> bool:
    """Whether a value is a string."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Whether a value is a boolean."""
    return isinstance(value, bool)


def is_table(value: Any) -> bool:
    """Whether a value is a dictionary with string keys."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def is_table_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a predicate for tables whose values all pass `fits`."""
    return lambda value: is_table(value) and all(fits(one) for one in value.values())


def is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a predicate for lists whose items all pass `fits`."""
    return lambda value: isinstance(value, list) and all(fits(one) for one in value)


def is_shallow(value: Any, levels: int = 20) -> bool:
    """Whether tables and lists are nested at most `levels` deep."""
    layer = [value]
    for _ in range(levels):
        containers = [one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, dict | list)]
        layer = [inner for outer in containers for inner in outer]
        if not layer:
            return True
    return False


def check_table(value: Any) -> None:
    """Check that a value is a table that is not nested too deeply.

    Raises:
        ValueError: It is not.
    """
    if not is_table(value):
        raise ValueError(f"it must be a table, got {format_value(value)}.")
    if not is_shallow(value):
        raise ValueError("it is nested too deeply.")


def check_entries(table: Mapping[str, Any], kinds: Mapping[str, Kind], required: Sequence[str] = ()) -> None:
    """Check the known entries of a table; unknown ones are ignored.

    Args:
        table: The table.
        kinds: Entry → the values it accepts.
        required: Entries that must be present.

    Raises:
        ValueError: An entry is missing or not accepted.
    """
    for name in required:
        if name not in table:
            raise ValueError(f"`{name}` is missing.")
    for name, (what, fits) in kinds.items():
        if name in table and not fits(table[name]):
            raise ValueError(f"`{name}` must be {what}, got {format_value(table[name])}.")


def check_format(path: PathLike, found: Any, known: int) -> None:
    """Check the format version of a file; "1", 1.0 and True are not 1.

    Raises:
        FileError: It is missing or not `known`.
    """
    if not is_integer(found) or found != known:
        fault = "has no format" if found is None else f"has format {format_value(found)}"
        fault += f", this version of testtime reads format {known}"
        raise FileError(path, fault, "use the version that wrote it")


def check_name(what: str, name: Any, longest: int = LONGEST) -> None:
    """Check a name that becomes part of a path.

    Args:
        what: What the name denotes, for the message.
        name: The name.
        longest: Its maximum length in characters.

    Raises:
        ValueError: It is not a string, empty, too long, hidden, not printable, or has a slash.
    """
    if not is_file_name(name) or len(name) > longest or name[0] == "." or "\\" in name:
        raise ValueError(
            f"{what} must be usable as a file name: at most {longest} printable characters, no slashes, no leading "
            f"dot, got {format_value(name)}."
        )


def is_file_name(part: Any) -> bool:
    """Whether a part of a name is, once quoted, a valid file name."""
    return (
        isinstance(part, str)
        and part not in ("", ".", "..")
        and "/" not in part
        and all(unicodedata.category(char) not in _UNPRINTABLE for char in part)
        and len(quote_name(part)) <= _FILE_NAME
    )


def quote_name(part: str) -> str:
    """Quote a part of a name as a file name."""
    return quote(part, safe=" +=@,()")


def fold_name(name: str) -> str:
    """Fold case and Unicode normalisation, so that names equal on some file systems compare equal."""
    return unicodedata.normalize("NFC", name).casefold()


def format_value(value: Any) -> str:
    """Return the `repr` of a value, shortened for a message."""
    try:
        return _repr.repr(value)
    except ValueError:  # Python refuses to format integers of thousands of digits
        return f"an {type(value).__name__} of too many digits"
