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

BINS = 15
"""Bins of equal width in which probabilities are counted, for the expected calibration error."""

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
    "protocol": _TABLE,
    "streams": _TABLES,
}
_ABOUT: dict[str, Kind] = {
    "title": _TEXT,
    "command": _TEXT,
    "seeds": _INTEGERS,
    "choices": _TABLES,
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
    **dict.fromkeys(("together", "every"), ("a positive integer", lambda value: is_integer(value, 1))),
    **dict.fromkeys(("peak_bytes", "state_bytes"), ("a non-negative integer", lambda value: is_integer(value, 0))),
}
_REQUIRED = ("method", "set", "corruption", "level", "seed", "seconds", "counts")
_COUNTS: Kind = ("non-negative integers", is_list_of(lambda value: is_integer(value, 0)))
_BIN_COUNTS: Kind = (f"{BINS} non-negative integers", lambda value: _COUNTS[1](value) and len(value) == BINS)
_BINS: dict[str, Kind] = {
    "images": _BIN_COUNTS,
    "right": _BIN_COUNTS,
    "probability": (f"{BINS} numbers", lambda value: is_list_of(_is_weight)(value) and len(value) == BINS),
}
_DETAILS: dict[str, Kind] = {
    "calibration": _TABLES,
    "collapses": ("pairs of integers", is_list_of(lambda value: _COUNTS[1](value) and len(value) == 2)),
    "segments": _COUNTS,
    "blocks": _TABLE,
}
_BLOCKS: dict[str, Kind] = {"size": ("a positive integer", lambda value: is_integer(value, 1)), "right": _COUNTS}


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
    check_entries(about, _UNIT, _REQUIRED)
    check_entries(about["counts"], {}, COUNTED)
    if (about["corruption"], about["level"]) != read_shift(about["set"]):
        raise ValueError(f"{format_value(about['set'])} does not match its corruption and level.")


def check_details(details: Any, images: int) -> None:
    """Check the counts along the stream of a unit, see `read_details` in summary.py.

    Args:
        details: The counts.
        images: Number of images of the unit.

    Raises:
        ValueError: An entry has the wrong type, or counts more images than there are.
    """
    check_table(details)
    check_entries(details, _DETAILS)
    if "calibration" in details:
        check_entries(details["calibration"], {}, ("before", "after"))
        for when in ("before", "after"):
            bins = details["calibration"][when]
            check_entries(bins, _BINS, list(_BINS))
            if sum(bins["images"]) > images or any(map(int.__gt__, bins["right"], bins["images"])):
                raise ValueError("its probabilities are those of more images.")
    if "blocks" in details:
        check_entries(details["blocks"], _BLOCKS, list(_BLOCKS))
        size, right = details["blocks"]["size"], details["blocks"]["right"]
        if len(right) != -(-images // size) or any(one > size for one in right):
            raise ValueError("its blocks do not match its images.")
    if sum(details.get("segments", ())) > images:
        raise ValueError("its segments have more images.")


def _is_weight(value: Any) -> bool:
    return is_number(value) and value >= 0


def read_shift(set_name: str) -> tuple[str | None, int | None]:
    """Return the corruption and level in the name of a set; None where it has none."""
    family, *parts = set_name.split("/")
    if family.endswith("-c") and len(parts) == 2 and parts[1].isdecimal() and len(parts[1]) < 10:
        return parts[0], int(parts[1])
    if family.endswith("-gradual") and len(parts) == 1:
        return parts[0], None
    return None, None
