"""Validation of the metadata in run.json, unit files and summaries."""

from __future__ import annotations

from typing import Any

from testtime.checks import (
    Kind,
    check_entries,
    check_table,
    format_value,
    is_flag,
    is_integer,
    is_list_of,
    is_number,
    is_table,
    is_table_of,
    is_text,
)

COUNTED = ("images", "labelled", "is_right", "was_right", "adapted", "rolled_back")
"""The counts stored for each unit."""

_TABLE: Kind = ("a table", is_table)
_TABLES: Kind = ("tables", is_table_of(is_table))
_TEXT: Kind = ("a string", is_text)
_INTEGERS: Kind = ("integers", is_list_of(is_integer))
_CONFIGURATION: dict[str, Kind] = {
    "networks": _TABLES,
    "methods": _TABLES,
    "sets": _TABLE,
    "seeds": _INTEGERS,
    "shuffle": ("true or false", is_flag),
    "limit": ("a positive integer or null", lambda value: value is None or is_integer(value, 1)),
}
_ABOUT: dict[str, Kind] = {
    "title": _TEXT,
    "command": _TEXT,
    "seeds": _INTEGERS,
    **dict.fromkeys(("files", "versions", "hardware", "skipped", "remarks", "demo"), _TABLE),
}
_UNIT: dict[str, Kind] = {
    "method": _TEXT,
    "set": _TEXT,
    "corruption": ("a string or null", lambda value: value is None or is_text(value)),
    "level": ("an integer or null", lambda value: value is None or is_integer(value)),
    "seed": ("an integer", is_integer),
    "seconds": ("a non-negative number", lambda value: is_number(value) and 0 <= value < 1e12),
    "counts": ("non-negative integers", is_table_of(lambda value: is_integer(value, 0))),
    "threshold": ("a number", is_number),
}


def check_run(configuration: Any, about: Any) -> None:
    """Check the metadata of a run.

    Args:
        configuration: Everything that determines its results.
        about: All other metadata.

    Raises:
        ValueError: An entry has the wrong type.
    """
    for table, kinds in ((configuration, _CONFIGURATION), (about, _ABOUT)):
        check_table(table)
        check_entries(table, kinds)


def check_unit(about: Any) -> None:
    """Check the metadata of a unit.

    Raises:
        ValueError: An entry is missing or has the wrong type.
    """
    check_table(about)
    check_entries(about, _UNIT, [name for name in _UNIT if name != "threshold"])
    check_entries(about["counts"], {}, COUNTED)
    if (about["corruption"], about["level"]) != read_shift(about["set"]):
        raise ValueError(f"{format_value(about['set'])} does not match its corruption and level.")


def read_shift(set_name: str) -> tuple[str | None, int | None]:
    """Return the corruption and level in the name of a set; None where it has none."""
    family, *parts = set_name.split("/")
    if family.endswith("-c") and len(parts) == 2 and parts[1].isdecimal() and len(parts[1]) < 10:
        return parts[0], int(parts[1])
    if family.endswith("-gradual") and len(parts) == 1:
        return parts[0], None
    return None, None
