"""Tables of hostile images in a stream, from `benchmarks/poison.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .documents import points, table

NAMES = {"rehearsal": "best"}
"""Methods that are called otherwise in the documents."""
GUARDS = {"rise": "", "guard": ", guarded"}

Document = Mapping[str, Any]


def format_kinds(held: Document, fraction: float) -> str:
    """The error of every method without hostile images, and what each kind of them adds, in points."""
    found, methods, kinds, _ = _read(held)
    lines = []
    for method in methods:
        for guard, title in GUARDS.items():
            usual = found[method, guard, "none", 0.0]["error"]
            gaps = [100 * (found[method, guard, kind, fraction]["error"] - usual) for kind in kinds]
            lines.append([f"`{NAMES.get(method, method)}`{title}", f"{100 * usual:.1f}", *map(points, gaps)])
    return table([f"error in %, {fraction:.0%} hostile", "none", *kinds], lines)


def format_shares(held: Document) -> str:
    """What hostile images add, mean over their kinds, by their share; and how long the slowest recovery takes."""
    found, methods, kinds, fractions = _read(held)
    lines = []
    for method in methods:
        for guard, title in GUARDS.items():
            cells = [f"`{NAMES.get(method, method)}`{title}"]
            usual = found[method, guard, "none", 0.0]["error"]
            for fraction in fractions:
                errors = [found[method, guard, kind, fraction]["error"] for kind in kinds]
                cells.append(points(100 * (sum(errors) / len(errors) - usual)))
            after = [found[method, guard, kind, fractions[-1]]["recovered_after"] for kind in kinds]
            lines.append([*cells, "never" if None in after else str(max(after))])
    shares = [f"{fraction:.0%}" for fraction in fractions]
    return table(["points, mean of the kinds", *shares, f"images until recovery, {shares[-1]}"], lines)


def _read(held: Document) -> tuple[dict[tuple[str, str, str, float], Any], list[str], list[str], list[float]]:
    """The rows by method, guard, kind and share; and the methods, kinds and shares."""
    (rows,) = held["results"].values()
    found = {(row["method"], row["guard"], row["kind"], row["fraction"]): row for row in rows}
    methods, kinds, fractions = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 2, 3))
    return found, methods, [kind for kind in kinds if kind != "none"], [one for one in fractions if one]
