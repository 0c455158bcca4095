"""The table of what hostile images in a stream cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .documents import table

TITLES = {"rehearsal": "best"}
"""Methods under another name."""


def format_hostile(rows: Sequence[Mapping[str, Any]]) -> str:
    """The error on the other images of a stream, and in its last third, by kind and share of hostile images.

    Args:
        rows: What the benchmark has found on one set.
    """
    found = {(row["method"], row["guard"], row["kind"], row["fraction"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for kind, fraction in dict.fromkeys((row["kind"], row["fraction"]) for row in rows):
        cells = []
        for method in methods:
            pair = [found[method, guard, kind, fraction] for guard in ("rise", "guard")]
            cells.append(" → ".join(f"{100 * row['error']:.1f} ({100 * row['thirds'][2]:.1f})" for row in pair))
        lines.append([kind, f"{fraction:.0%}" if fraction else "", *cells])
    return table(["hostile images", "share", *(f"`{TITLES.get(name, name)}`" for name in methods)], lines)
