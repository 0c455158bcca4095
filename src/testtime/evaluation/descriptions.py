"""What run.json, the files of units and summaries say of themselves, checked where it is read."""

from __future__ import annotations

from typing import Any

from testtime.checks import (
    Kind,
    check_entries,
    check_table,
    is_flag,
    is_integer,
    is_list_of,
    is_number,
    is_table,
    is_table_of,
    is_text,
    show,
)

COUNTED = ("images", "labelled", "is_right", "was_right", "adapted", "rolled_back")
"""What is counted of the images of a unit."""

_TABLE: Kind = ("a table", is_table)
_TABLES: Kind = ("tables", is_table_of(is_table))
_TEXT: Kind = ("a text", is_text)
_INTEGERS: Kind = ("integers", is_list_of(is_integer))
_CONFIGURATION: dict[str, Kind] = {
    "networks": _TABLES,
    "methods": _TABLES,
    "sets": _TABLE,
    "seeds": _INTEGERS,
    "shuffle": ("true or false", is_flag),
    "limit": ("an integer from 1 on", lambda value: value is None or is_integer(value, 1)),
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
    "corruption": ("a text or nothing", lambda value: value is None or is_text(value)),
    "level": ("an integer or nothing", lambda value: value is None or is_integer(value)),
    "seed": ("an integer", is_integer),
    "seconds": ("a number from 0 on", lambda value: is_number(value) and 0 <= value < 1e12),
    "counts": ("integers from 0 on", is_table_of(lambda value: is_integer(value, 0))),
    "threshold": ("a number", is_number),
}


def check_run(configuration: Any, about: Any) -> None:
    """Check what a run says of itself.

    Args:
        configuration: What decides its results.
        about: Everything else.

    Raises:
        ValueError: It is not what a run says.
    """
    for table, kinds in ((configuration, _CONFIGURATION), (about, _ABOUT)):
        check_table(table)
        check_entries(table, kinds)


def check_unit(about: Any) -> None:
    """Check what a unit says of itself.

    Raises:
        ValueError: It is not what a unit says.
    """
    check_table(about)
    check_entries(about, _UNIT, [name for name in _UNIT if name != "threshold"])
    check_entries(about["counts"], {}, COUNTED)
    if (about["corruption"], about["level"]) != read_shift(about["set"]):
        raise ValueError(f"{show(about['set'])} has another corruption or level.")


def read_shift(set_name: str) -> tuple[str | None, int | None]:
    """Corruption and level in the name of a set, None for what it does not have."""
    family, *parts = set_name.split("/")
    if family.endswith("-c") and len(parts) == 2 and parts[1].isdecimal() and len(parts[1]) < 10:
        return parts[0], int(parts[1])
    if family.endswith("-gradual") and len(parts) == 1:
        return parts[0], None
    return None, None
