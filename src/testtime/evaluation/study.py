"""Studies: the plan of a run as a TOML file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testtime.checks import (
    Kind,
    check_entries,
    fold_name,
    format_value,
    is_flag,
    is_integer,
    is_list_of,
    is_table,
    is_text,
)
from testtime.corruptions import CORRUPTIONS, EXTRA
from testtime.evaluation.method_specs import read_method
from testtime.evaluation.protocols import read_protocol
from testtime.storage import FileError, check_file, error_text

STUDIES = Path(__file__).with_name("studies")
_LARGEST = 1 << 15  # bytes of a study; parsing TOML can take quadratic time
FLAG: Kind = ("true or false", is_flag)
LIMIT: Kind = ("an integer from 1 to 2**63 - 1", lambda value: value is None or is_integer(value, 1))
_WORDS: Kind = ("names", lambda value: is_list_of(_is_word)([value] if is_text(value) else value))
_STUDY: dict[str, Kind] = {
    "title": ("a string", is_text),
    "data": _WORDS,
    "levels": ("a range like 1-5 or a list of integers", lambda value: is_text(value) or is_list_of(is_integer)(value)),
    "corruptions": _WORDS,
    "original": FLAG,
    "seeds": ("integers from 0 to 2**63 - 1", is_list_of(lambda seed: is_integer(seed, 0))),
    "shuffle": FLAG,
    "limit": LIMIT,
    "selection": FLAG,
    "protocol": ("a name or a table", lambda value: is_text(value) or is_table(value)),
    "methods": ("tables", is_table),
}


def studies() -> tuple[str, ...]:
    """Return the names of the bundled studies."""
    return tuple(sorted(path.stem for path in STUDIES.glob("*.toml")))


def read_study(study: str | Path) -> dict[str, Any]:
    """Read a study and check the names and types of its entries.

    All entries but a method's mode are optional; command-line arguments override them:

        title = "Fog, two ways"
        data = ["cifar10-c"]               # names, patterns, folders
        levels = "1-5"
        corruptions = ["fog", "frost"]
        original = true                    # include the uncorrupted set
        seeds = [0, 1]
        shuffle = true
        limit = 1000
        selection = true                   # choose settings: only held-out sets are accepted
        protocol = {name = "continual", order = 3, batch = 64}    # see `Protocol`

        [methods.fast]                     # any name
        mode = "episodic"                  # or "fixed", "online"; by default that of the `method`
        network = "joint"                  # or "baseline", or NAME of --network NAME=FILE
        steps = 1                          # any setting, see `MethodSpec`
        lr = 0.01

        [methods.wide]
        mode = "online"
        method = "best"                    # a name from METHODS; "ttt" by default
        copies = 64

    Args:
        study: A TOML file, or the name of a bundled study.

    Raises:
        FileError: The study does not exist or is invalid.
    """
    path = Path(study)
    if str(study) in studies() and not path.is_file():
        path = STUDIES / f"{study}.toml"
    found = _load(path)
    try:
        _check_study(found)
    except ValueError as error:
        raise FileError(path, str(error).removesuffix(".")) from None
    return found | ({"data": [found["data"]]} if isinstance(found.get("data"), str) else {})


def _load(path: Path) -> dict[str, Any]:
    """Parse a TOML file."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Studies need tomli: pip install 'testtime[cli]'", name="tomli") from None
    try:
        check_file(path)
    except FileError as error:
        raise FileError(path, error.fault, f"the bundled studies are {', '.join(studies())}") from None
    if path.stat().st_size > _LARGEST:
        raise FileError(path, f"larger than {_LARGEST:,} bytes, the limit for a study")
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(path, f"not a TOML file ({error_text(error)})") from None


def _check_study(found: Mapping[str, Any]) -> None:
    """Check the entries of a study, except its sets, which need not exist on this machine."""
    for name in found:
        if name not in _STUDY:
            raise ValueError(f"a study has no entry {format_value(name)}; available: {', '.join(_STUDY)}.")
    check_entries(found, _STUDY)
    for name in ("data", "levels", "corruptions", "seeds", "methods"):
        if name in found and not found[name]:
            raise ValueError(f"`{name}` must not be empty.")
    if "levels" in found:
        parse_levels(found["levels"])
    if "corruptions" in found:
        parse_corruptions(found["corruptions"])
    read_protocol(found.get("protocol"))
    check_unique("seeds", found.get("seeds", [0]))
    check_unique("methods", list(found.get("methods", ["fixed"])))
    for name, about in found.get("methods", {}).items():
        read_method(name, about)


def check_unique(what: str, values: Sequence[Any]) -> None:
    """Check that there is at least one value and no duplicates; names are compared case-insensitively."""
    if not values:
        raise ValueError(f"`{what}` must not be empty.")
    seen: dict[Any, int] = {}
    for index, value in enumerate(values):
        first = seen.setdefault(fold_name(value) if isinstance(value, str) else value, index)
        if first != index:
            both = f"{value} twice" if values[first] == value else f"{values[first]} and {value}"
            raise ValueError(f"`{what}` must be unique, got {both}.")


def parse_levels(levels: str | Sequence[int]) -> tuple[int, ...]:
    """Parse levels, e.g. "1-5" or "1,3,5"."""
    numbers: list[int] = []
    for word in split_words(levels) if isinstance(levels, str) else map(str, levels):
        first, dash, last = word.partition("-")
        ends = [first, last] if dash else [first]
        if not all(end.isdecimal() and len(end) < 10 for end in ends):
            raise ValueError(f"`levels` must be a range like 1-5 or a list like 1,3,5, got {format_value(levels)}.")
        if not 1 <= int(ends[0]) <= int(ends[-1]) <= 5:
            raise ValueError(f"`levels` must be 1 to 5, got {format_value(levels)}.")
        numbers.extend(range(int(ends[0]), int(ends[-1]) + 1))
    if not numbers:
        raise ValueError(f"`levels` must be 1 to 5, got {format_value(levels)}.")
    return tuple(dict.fromkeys(numbers))


def parse_corruptions(corruptions: str | Sequence[str]) -> list[str] | None:
    """Parse the names of corruptions; None for all that a set lists."""
    if corruptions == "all":
        return None
    names, known = split_words(corruptions), (*CORRUPTIONS, *EXTRA)
    for name in names:
        if name not in (*known, "original"):
            raise ValueError(f"No corruption is called {format_value(name)}; available: {', '.join(known)}.")
    return names


def _is_word(value: Any) -> bool:
    return is_text(value) and 0 < len(value) < 1000


def split_words(text: str | Sequence[str]) -> list[str]:
    """Split a comma-separated string into words."""
    return [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else list(text)
