"""Tables of photographs: why learning harms under motion blur."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .documents import points, table

CLASSES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
TITLES = {
    "right": "level 5, all along the rows",
    "down": "level 5, all along the columns",
    "any direction": "level 5, in any direction",
}
"""What variants of `benchmarks/motion_blur.py` are."""

Document = Mapping[str, Any]


def format_directions(documents: Mapping[str, Document]) -> str:
    """Accuracy before and after learning, and the task's loss, for every variant and network."""
    heads = [f"{title}, {name}" for name in documents for title in ("`fixed`", "`online`", "difference", "task's loss")]
    variants = [row["set"] for row in next(iter(documents.values()))["rows"]]
    lines = []
    for variant in variants:
        cells = [_name_variant(variant)]
        for held in documents.values():
            (row,) = (row for row in held["rows"] if row["set"] == variant)
            fixed, online = 100 * row["fixed"], 100 * row["online"]
            cells += [f"{fixed:.1f}", f"{online:.1f}", points(online - fixed), f"{row['loss']:.2f}"]
        lines.append(cells)
    return table(["accuracy in %", *heads], lines)


def format_classes(held: Document) -> str:
    """What learning changes in the accuracy of each class, at level 5 and in the directions."""
    rows = [row for row in held["rows"] if row["set"] == "level 5" or row["set"] in TITLES]
    lines = []
    for place, name in enumerate(held["classes"]):
        gaps = [100 * (row["online_by_class"][place] - row["fixed_by_class"][place]) for row in rows]
        lines.append([CLASSES.get(name, name), *map(points, gaps)])
    return table(["`online` minus `fixed`, points", *(_name_variant(row["set"]) for row in rows)], lines)


def _name_variant(name: str) -> str:
    return TITLES.get(name, name)
