"""Tables of methods under protocols, and of branches that were trained for networks without one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from testtime.evaluation import Run
from testtime.report.results import MEAN, ORIGINAL, Table, column_title

from .documents import table
from .result_files import CIFAR, read_runs

SANITY = {"batch-200": "reset", "continual": "continual", "correlated": "correlated"}
"""Names of result files, and titles."""


def format_sanity() -> str:
    """The mean error at level 5 by method, network and protocol; on the original images, if they are there."""
    columns: dict[str, Mapping[str, str]] = {}
    for norm in ("bn", "gn"):
        for name, title in SANITY.items():
            (run,) = read_runs(CIFAR / f"methods-{norm}-{name}.json")
            columns[f"{norm.upper()}, {title}"] = find_errors(run)
    names = list(next(iter(columns.values())))
    rows = [[f"`{name}`", *(column.get(name, "") for column in columns.values())] for name in names]
    return table(["error in %, level 5 / original", *columns], rows)


def find_errors(run: Run) -> dict[str, str]:
    """The mean error over the sets by method and, if it was measured, the error on the original images."""
    found: dict[str, dict[str, float]] = {}
    for unit in run.units:
        found.setdefault(unit.method, {})[unit.set_name] = 100 - 100 * float(unit.verdicts().right.mean())
    texts = {}
    for name, errors in found.items():
        shifted = [error for one, error in errors.items() if one != "cifar10"]
        whole = f" / {errors['cifar10']:.1f}" if "cifar10" in errors else ""
        texts[name] = f"{statistics.fmean(shifted):.1f}{whole}"
    return texts


def format_branches(ways: Mapping[tuple[str, str], Sequence[Table]]) -> str:
    """The errors of networks made adaptable, means over several fits.

    Args:
        ways: The tables of level 5, one a fit, by network and way.
    """
    rows = []
    for (network, way), tables in ways.items():
        cells = [_describe(one.rows[method][column].error for one in tables) for method, column in _PLACES]
        rows.append([network, way, str(len(tables)), *cells])
    heads = ["network", "how it got its branch", "fits", "original, fixed", "online", "level 5, fixed", "online"]
    return table(heads, rows, words=(0, 1))


def format_held_out(ways: Mapping[str, Table]) -> str:
    """The errors on held-out training images under the extra corruptions, by how long the branch was trained."""
    columns = next(iter(ways.values())).columns
    rows = [
        [way, f"`{method}`", *(f"{one.rows[method][column].error:.1f}" for column in columns)]
        for way, one in ways.items()
        for method in ("fixed", "online")
    ]
    return table(
        ["error in %", "", *(column_title(column).replace("_", " ") for column in columns)], rows, words=(0, 1)
    )


_PLACES = [(method, column) for column in (ORIGINAL, MEAN) for method in ("fixed", "online")]


def _describe(errors: Iterable[float]) -> str:
    held = list(errors)
    low, high = f"{min(held):.1f}", f"{max(held):.1f}"
    return f"{statistics.fmean(held):.1f}" + ("" if low == high else f" ({low}–{high})")
