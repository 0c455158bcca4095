"""Tables of how methods were chosen, and of branches that were trained for networks without one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from testtime.report.results import MEAN, ORIGINAL, Results, Table, column_title

from .documents import ends, points, table
from .result_files import CONTROL, by_level, compare

TUNED = {
    ("fixed", "fixed"): "the network as it is",
    ("ttt", "lr=0.001"): "TTT-Online",
    ("mirrored", "lr=0.001"): "and the mirror image",
    ("mirrored", "lr=0.002"): "with twice the learning rate",
    ("memory", "lr=0.0005 weight=2 drift=0 memory=0"): "`rehearsal` without a memory",
    ("memory", "lr=0.0005 weight=2 drift=0 memory=16"): "`rehearsal`, 16 images",
    ("memory", "lr=0.0005 weight=2 drift=0 memory=64"): "`rehearsal`, 64 images",
    ("memory", "lr=0.0005 weight=2 drift=0 memory=256"): "`rehearsal`, 256 images",
}
"""Which choice and settings, and titles."""
BEST = "best"
ABLATED = ("fixed", "online", "mirrored", "without-both", "without-original", BEST, CONTROL)
"""What `best` is made of, and its control."""


def format_tuned(choices: Mapping[str, Mapping[str, Any]]) -> str:
    """The errors of `rehearsal` and what it is made of on held-out images; `choices` as `testtime tune` writes them."""
    found = {(name, row["name"]): row for name, held in choices.items() for row in held["table"]}
    found |= {("fixed", "fixed"): found["ttt", "fixed"]}
    rows = [[title, *(f"{100 * found[key][cell]:.2f}" for cell in _CELLS)] for key, title in TUNED.items()]
    return table(["error in %", "level 5, four sets", "original"], rows)


def format_grid(choice: Mapping[str, Any]) -> str:
    """The errors of all settings of a choice."""
    rows = [[f"`{row['name']}`", *(f"{100 * row[cell]:.2f}" for cell in _CELLS)] for row in choice["table"]]
    return table(["error in %", "corrupted", "original"], rows)


def format_low_rank(held: Mapping[str, Any]) -> str:
    """The errors of updates of a network at several learning rates, and the memory of a stream."""
    rows = []
    for row in held["rows"]:
        rate = "" if row["lr"] is None else f"{row['lr']:g}"
        errors = [f"{row[cell]:.2f}" for cell in _CELLS]
        rows.append([f"`{row['update']}`", rate, *errors, f"{row['bytes'] / 1024:,.0f}"])
    return table(["update", "learning rate", "corrupted", "original", "KiB a stream"], rows)


def format_ablation(networks: Mapping[str, tuple[Results, Results]]) -> str:
    """The errors of `best` and its parts on the test sets, and the paired differences from the control.

    Args:
        networks: The results of the study `best` and those of `fixed` and `online`, by the name of the network.
    """
    heads, rows = [], {method: [f"`{method}`"] for method in ABLATED}
    gaps, intervals = [f"`{BEST}` minus `{CONTROL}`"], ["95%, paired"]
    for name, (results, main) in networks.items():
        for level, column in ((5, MEAN), *([(1, MEAN)] if 1 in by_level(results) else []), (5, ORIGINAL)):
            heads.append(f"{name}, {f'level {level}' if column == MEAN else 'original'}")
            own, more = by_level(results)[level], by_level(main).get(level)
            found = {**({} if more is None else more.rows), **own.rows}
            for method, cells in rows.items():
                cell = found.get(method, {}).get(column)
                cells.append("" if cell is None else f"{cell.error:.2f}")
            sets = [own.set_name(each) for each in (own.shifted if column == MEAN else (ORIGINAL,))]
            gap, interval = compare(results, BEST, CONTROL, sets)
            gaps.append(points(gap))
            intervals.append(ends(interval))
    return table(["error in %", *heads], [*rows.values(), gaps, intervals])


def format_branches(ways: Mapping[tuple[str, str], Sequence[Table]]) -> str:
    """The errors of networks made adaptable, means over several fits.

    Args:
        ways: The tables of level 5, one a fit, by network and way.
    """
    rows = []
    for (network, way), tables in ways.items():
        cells = [
            _describe(one.rows[method][column].error for one in tables if method in one.rows)
            for column in (ORIGINAL, MEAN)
            for method in _COMPARED
        ]
        rows.append([network, way, str(len(tables)), *cells])
    heads = [f"{title}{method}" for title in ("original, ", "level 5, ") for method in _COMPARED]
    return table(["network", "how it got its branch", "fits", *heads], rows, words=(0, 1))


def format_held_out(ways: Mapping[str, Table]) -> str:
    """The errors on held-out training images under the extra corruptions, by how the network was trained."""
    columns = next(iter(ways.values())).columns
    rows = [
        [way, f"`{method}`", *(f"{one.rows[method][column].error:.1f}" for column in columns)]
        for way, one in ways.items()
        for method in ("fixed", "online")
    ]
    return table(
        ["error in %", "", *(column_title(column).replace("_", " ") for column in columns)], rows, words=(0, 1)
    )


_CELLS = ("corrupted", "original")
_COMPARED = ("fixed", "online", BEST)


def _describe(errors: Iterable[float]) -> str:
    held = list(errors)
    if not held:
        return ""
    low, high = f"{min(held):.1f}", f"{max(held):.1f}"
    return f"{statistics.fmean(held):.1f}" + ("" if low == high else f" ({low}–{high})")
