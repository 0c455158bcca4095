"""Variants of the method in the document of results: Batch Normalization, a gradual shift, fewer steps, other numbers.

A part whose files are missing says that it was not run yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from testtime.report.committed import Findings, by_level
from testtime.report.documents import commands, link, points, table, wrap
from testtime.report.finding_levels import images_of, show_table
from testtime.report.further import FILES, Part, compare, seconds_an_image
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import BASELINE, MEAN, ORIGINAL, Results, column_title, method_title
from testtime.report.sources import ResultsError

GRADUAL = Path("docs/cifar10-gradual.svg")


def tell_absence(name: str) -> str:
    """What stands in place of a part that was not run yet."""
    files = ", ".join(f"`{file}`" for file in FILES[name])
    return wrap(f"Not run yet: {files} will hold it.")


def tell_origin(part: Part) -> str:
    """The files, the hardware and the commands of a part."""
    devices = dict.fromkeys(run.about["hardware"]["device"] for run in part.runs)
    words = f"{', '.join(link(file) for file in part.files)}; {', '.join(devices)}."
    return f"{wrap(words)}\n\n{commands([run.about['command'] for run in part.runs])}"


def tell_batch_norm(found: Findings) -> str:
    """The networks with Batch Normalization at level 5."""
    part = found.parts.get("batch norm")
    if part is None:
        return tell_absence("batch norm")
    top, group = by_level(part.results)[5], found.levels[5]
    both = [method for method in top.rows if method in group.rows]
    pairs = [
        f"{PAPER_NAMES[method]} {top.rows[method][MEAN].error:.1f} against {group.rows[method][MEAN].error:.1f}"
        for method in both
    ]
    learned = _share_learned(part.results, "episodic")
    held = part.runs[0].configuration["methods"]["episodic"]["settings"]
    words = (
        f"{images_of(top):,} images of each set. TTT learns from images below a confidence of {held['threshold']}, "
        f"{100 * learned:.0f}% of them. Mean over the corruptions against that with Group Normalization on "
        f"{images_of(group):,} images: {', '.join(pairs)}."
    )
    return f"{show_table(part.results, top)}\n\n{wrap(words)}\n\n{tell_origin(part)}"


def tell_gradual(found: Findings) -> str:
    """The error over each growing noise, and at its beginning and end."""
    part = found.parts.get("gradual")
    if part is None:
        return tell_absence("gradual")
    one = part.results.tables[0]
    rows = [
        [method_title(method), *(f"{row[column].error:.1f}" if column in row else "" for column in one.columns)]
        for method, row in one.rows.items()
    ]
    ends = []
    for method in one.rows:
        parts = [_tenths(part.results, method, one.set_name(column)) for column in one.shifted]
        first, last = np.mean(parts, axis=0)[[0, -1]]
        ends.append(f"{PAPER_NAMES.get(method, method)} {first:.1f} and {last:.1f}")
    words = (
        f"{images_of(one):,} images of each noise, in the order of the set. Over the first and the last tenth of the "
        f"shift, mean over the noises: {', '.join(ends)}. The paper has this as a figure alone."
    )
    heads = ["error in %, mean along the shift", *(column_title(column) for column in one.columns)]
    picture = f"![Error of each method while the noise grows from level 1 to level 5]({GRADUAL.name})"
    return f"{picture}\n\n{table(heads, rows)}\n\n{wrap(words)}\n\n{tell_origin(part)}"


def _tenths(results: Results, method: str, name: str) -> list[float]:
    """The error in percent over each tenth of a set that is its own order."""
    found = results.sources.get((method, name))
    if not found:
        raise ResultsError(f"{method} was not run on {name}.")
    right = np.mean([source.unit.verdicts().right for source in found], axis=0)
    return [100 - 100 * float(part.mean()) for part in np.array_split(right, 10)]


def tell_short(found: Findings) -> str:
    """The variants that cost less than ten steps on every image, beside those."""
    told = []
    for name, title in (("fast", "One long step"), ("threshold", "The least sure images alone")):
        part = found.parts.get(name)
        shown = tell_absence(name) if part is None else _tell_cheaper(part)
        told.append(f"### {title}\n\n{shown}")
    return "\n\n".join(told)


def _tell_cheaper(part: Part) -> str:
    """Methods of a part beside `fixed` and `episodic`: mean error, share of the images learned from, time."""
    top, runs = by_level(part.results)[5], part.results.runs
    names = [top.set_name(column) for column in top.shifted]
    costs = {method: seconds_an_image(runs, method) for method in top.rows}
    own = [method for method in top.rows if method not in PAPER_NAMES]
    rows, texts = [], []
    for method in ("fixed", "episodic", *own):
        row = top.rows[method]
        rows.append(
            [
                f"`{method}`" if method in own else method_title(method),
                f"{row[ORIGINAL].error:.1f}" if ORIGINAL in row else "",
                f"{row[MEAN].error:.2f}",
                f"{row[MEAN].half_width:.2f}",
                f"{100 * _share_learned(part.results, method):.0f}",
                f"{1000 * costs[method]:.2f}",
                f"{costs[method] / costs['episodic']:.2f}",
            ]
        )
    whole = top.rows["fixed"][MEAN].error - top.rows["episodic"][MEAN].error
    for method in own:
        gap, ends = compare(part.results, method, "episodic", names)
        texts.append(
            f"`{method}` is {points(gap)} points from `episodic` (95% {points(ends.low)} to {points(ends.high)}, "
            f"paired), has {100 * (1 - gap / whole):.0f}% of its gain over `fixed` and "
            f"takes {100 * costs[method] / costs['episodic']:.0f}% of its time."
        )
    heads = ["", "original", "mean of level 5", "± 95%", "% learned from", "ms an image", "× episodic"]
    texts += [_tell_changes(part, method) for method in own]
    words = f"{images_of(top):,} images of each set. {' '.join(texts)}"
    return f"{table(heads, rows)}\n\n{wrap(words)}\n\n{tell_origin(part)}"


def _tell_changes(part: Part, method: str) -> str:
    """The settings of a method that are not those of `episodic`."""
    methods = {name: held for run in part.results.runs for name, held in run.configuration["methods"].items()}
    held, usual = methods[method]["settings"], methods["episodic"]["settings"]
    changed = [f"{key} {value}" for key, value in held.items() if key in usual and usual[key] != value]
    return f"`{method}`: {', '.join(changed) or 'the settings of episodic'}."


def _share_learned(results: Results, method: str) -> float:
    counts = [unit.about["counts"] for run in results.runs for unit in run.units if unit.method == method]
    return sum(count["adapted"] for count in counts) / sum(count["images"] for count in counts)


def tell_steps(found: Findings) -> str:
    """Steps down and copies across: the mean error and the time, and what to choose."""
    part = found.parts.get("steps")
    if part is None:
        return tell_absence("steps")
    top, runs = part.results.tables[0], part.results.runs
    column = MEAN if MEAN in top.columns else top.shifted[0]
    grid = read_grid(top.rows)
    cells = {place: top.rows[method][column].error for place, method in grid.items()}
    costs = {place: 1000 * seconds_an_image(runs, method) for place, method in grid.items()}
    base, base_cost = top.rows[BASELINE][column].error, 1000 * seconds_an_image(runs, BASELINE)
    steps, copies = (sorted({place[axis] for place in grid}) for axis in (0, 1))
    tables = []
    for title, values, first in (("mean error in %", cells, base), ("ms an image", costs, base_cost)):
        rows = [["0 (`fixed`)", *([f"{first:.2f}"] * len(copies))]]
        for one in steps:
            there = [values.get((one, two)) for two in copies]
            rows.append([str(one), *("" if value is None else f"{value:.2f}" for value in there)])
        tables.append(table([f"{title}: steps", *(f"{two} copies" for two in copies)], rows))
    names = [top.set_name(name) for name in top.shifted]
    half = max(top.rows[method][column].half_width for method in grid.values())
    words = (
        f"The standard version on {images_of(top):,} images of {len(names)} sets of level {top.level}: "
        f"{', '.join(column_title(name) for name in top.shifted)}. The 95% intervals of the mean errors over "
        f"images are ±{half:.1f} or less. {_tell_choice(part, grid, costs, names)}"
    )
    return "\n\n".join([*tables, wrap(words), tell_origin(part)])


def read_grid(methods: Sequence[str] | Mapping[str, object]) -> dict[tuple[int, int], str]:
    """Methods called `steps-S-copies-C` by steps and copies.

    Raises:
        ResultsError: There is none.
    """
    found = {(int(m[1]), int(m[2])): m[0] for name in methods if (m := re.fullmatch(r"steps-(\d+)-copies-(\d+)", name))}
    if not found:
        raise ResultsError(f"No method is called steps-S-copies-C among {', '.join(methods)}.")
    return dict(sorted(found.items()))


def _tell_choice(
    part: Part, grid: Mapping[tuple[int, int], str], costs: Mapping[tuple[int, int], float], names: Sequence[str]
) -> str:
    """The lowest error, the cheapest that cannot be told from it, and what the default is worth."""

    def words(place: tuple[int, int]) -> str:
        return f"{place[0]} step{'' if place[0] == 1 else 's'} with {place[1]} copies"

    gains = {place: -compare(part.results, method, BASELINE, names)[0] for place, method in grid.items()}
    best = max(gains, key=lambda place: gains[place])
    equal = [
        place
        for place, method in grid.items()
        if place == best or compare(part.results, method, grid[best], names)[1].low <= 0
    ]
    cheap = min(equal, key=lambda place: costs[place])
    told = f"The lowest mean error is that of {words(best)}, {gains[best]:.2f} points below `fixed`. "
    if cheap == best:
        told += "Every cheaper choice is worse by more than the paired 95% interval allows for. "
    else:
        told += (
            f"The cheapest that cannot be told from it (the paired 95% interval of the difference holds 0) is "
            f"{words(cheap)}, at {100 * costs[cheap] / costs[best]:.0f}% of its time: choose that where errors matter "
            "most. "
        )
    half = [place for place in grid if gains[place] >= gains[best] / 2]
    least = min(half, key=lambda place: costs[place])
    told += (
        f"Half the gain or more costs least with {words(least)}: {100 * gains[least] / gains[best]:.0f}% of it at "
        f"{100 * costs[least] / costs[best]:.0f}% of the time."
    )
    if (10, 32) in grid:
        told += (
            f" The default, {words((10, 32))}, has {100 * gains[10, 32] / gains[best]:.0f}% of it at "
            f"{100 * costs[10, 32] / costs[best]:.0f}% of the time."
        )
    return told
