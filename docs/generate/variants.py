"""Tables of other settings: what they cost, fewer steps, more copies, the method `mirrored` and its candidates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from testtime.evaluation import Run
from testtime.report.results import BASELINE, MEAN, ORIGINAL, Results, method_title

from .documents import ends, points, table
from .result_files import CONTROL, by_level, compare, count_images, find_methods, is_same_method, time_methods

MIRRORED = "mirrored"


def format_costs(runs: Sequence[Run]) -> str:
    """The time that an image takes each method, the shortest first."""
    seconds, images, known = time_methods(runs), count_images(runs), find_methods(runs)
    rows = [
        [
            _name(method, known[method]),
            f"{images[method]:,}",
            f"{100 * _share_adapted(runs, method):.0f}",
            _milliseconds(cost),
            f"{cost / seconds[BASELINE]:,.1f}",
        ]
        for method, cost in sorted(seconds.items(), key=lambda item: item[1])
    ]
    return table(["", "images", "% learned from", "ms an image", f"× {BASELINE}"], rows)


def _name(method: str, about: Mapping[str, Any]) -> str:
    """The name of a method; version 0.1 called `mirrored` `best`, and its runs do not record it."""
    return "`best` of 0.1" if method == "best" and "method" not in about["settings"] else f"`{method}`"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _share_adapted(runs: Sequence[Run], method: str) -> float:
    counts = [unit.about["counts"] for run in runs for unit in run.units if unit.method == method]
    return sum(count["adapted"] for count in counts) / sum(count["images"] for count in counts)


def format_cheaper(results: Results, timed: Sequence[Run], methods: Iterable[str]) -> str:
    """Methods that cost less than `episodic`: error, paired difference, share of the gain, time."""
    top, costs = by_level(results)[5], time_methods(timed, results.runs)
    names = [top.set_name(column) for column in top.shifted]
    whole = top.rows["fixed"][MEAN].error - top.rows["episodic"][MEAN].error
    rows = []
    for method in ("fixed", "episodic", *methods):
        row, compared = top.rows[method], ["", "", ""]
        if method not in ("fixed", "episodic"):
            gap, interval = compare(results, method, "episodic", names)
            compared = [points(gap), ends(interval), f"{100 * (1 - gap / whole):.0f}"]
        rows.append(
            [
                method_title(method) if method in ("fixed", "episodic") else f"`{method}`",
                f"{row[ORIGINAL].error:.1f}",
                f"{row[MEAN].error:.2f}",
                *compared,
                f"{100 * _share_adapted(results.runs, method):.0f}",
                _milliseconds(costs[method]),
                f"{costs[method] / costs['episodic']:.3f}",
            ]
        )
    heads = ["error in %", "original", "mean of level 5", "minus `episodic`", "95%, paired", "% of its gain"]
    return table([*heads, "% learned from", "ms an image", "× `episodic`"], rows)


def format_grid(results: Results, timed: Sequence[Run]) -> str:
    """Methods called `steps-S-copies-C`, steps down and copies across: the mean error and the time."""
    top, costs = results.tables[0], time_methods(timed, results.runs)
    found = (re.fullmatch(r"steps-(\d+)-copies-(\d+)", name) for name in top.rows)
    grid = {(int(match[1]), int(match[2])): match[0] for match in found if match}
    steps, copies = (sorted({place[axis] for place in grid}) for axis in (0, 1))
    shown = {
        "mean error in %": {method: f"{row[MEAN].error:.2f}" for method, row in top.rows.items()},
        "ms an image": {method: _milliseconds(cost) for method, cost in costs.items()},
    }
    tables = []
    for title, values in shown.items():
        rows = [["0 (`fixed`)", *([values[BASELINE]] * len(copies))]]
        rows += [[str(one), *(values.get(grid.get((one, two), ""), "") for two in copies)] for one in steps]
        tables.append(table([f"{title}: steps", *(f"{two} copies" for two in copies)], rows))
    return "\n\n".join(tables)


def format_mirrored(results: Results) -> str:
    """The method `mirrored`, its control, and the paired differences at every level."""
    levels = by_level(results)
    first = next(one for one in levels.values() if ORIGINAL in one.rows[MIRRORED])
    places = [(first, (ORIGINAL,)), *((one, one.shifted) for one in levels.values())]
    rows = []
    for method in ("fixed", CONTROL, "online", MIRRORED):
        cells = [one.rows[method][ORIGINAL if columns == (ORIGINAL,) else MEAN] for one, columns in places]
        rows.append([method_title(method), *(f"{cell.error:.2f}" for cell in cells)])
    for one, two in ((CONTROL, "fixed"), (MIRRORED, CONTROL), (MIRRORED, "online")):
        found = [compare(results, one, two, [place.set_name(name) for name in names]) for place, names in places]
        rows.append([f"{one} minus {two}", *(points(gap) for gap, _ in found)])
        rows.append(["95%, paired", *(ends(interval) for _, interval in found)])
    return table(["error in %, mean over the corruptions", "original", *(f"level {level}" for level in levels)], rows)


def format_candidates(results: Results, timed: Sequence[Run], choice: Mapping[str, Any]) -> str:
    """The candidates of which one was chosen, the lowest error first."""
    shown, costs, methods = results.tables[0], time_methods(timed, results.runs), find_methods(results.runs)
    learning = {name: held["settings"] for name, held in methods.items() if held["mode"] != "fixed"}
    keys = list(dict.fromkeys(key for held in learning.values() for key in held))
    keys = [key for key in keys if len({str(held.get(key)) for held in learning.values()}) > 1]
    rows = []
    for name, row in sorted(shown.rows.items(), key=lambda item: item[1][MEAN].error):
        chosen = " (chosen)" if is_same_method(methods[name], choice) else ""
        settings = [_value(learning.get(name, {}).get(key)) for key in keys]
        errors = [f"{row[MEAN].error:.2f}", f"{row[MEAN].half_width:.2f}"]
        rows.append([f"`{name}`{chosen}", *settings, *errors, _milliseconds(costs[name])])
    return table(["candidate", *(f"`{key}`" for key in keys), "mean error in %", "± 95%", "ms an image"], rows)


def _value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else f"`{value}`" if isinstance(value, str) else str(value)
