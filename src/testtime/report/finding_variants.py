"""Variants of the method in the document of results: Batch Normalization, a gradual shift, fewer steps, other numbers.

What they cost is taken from runs that were made for their times, never from those that the errors are from. A part
whose files are missing says that it was not run yet.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from testtime.report.committed import Findings, by_level
from testtime.report.documents import commands, link, points, table, wrap
from testtime.report.finding_levels import images_of, show_table
from testtime.report.further import (
    FILES,
    FOLDER,
    SHARED,
    Part,
    compare,
    count_images,
    find_costs,
    find_methods,
    is_same_method,
    time_methods,
)
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
    words = f"{', '.join(link(file) for file in part.files)}; {_tell_machines(part)}."
    return f"{wrap(words)}\n\n{commands([run.about['command'] for run in part.runs])}"


def _tell_machines(part: Part) -> str:
    """The GPU, or the processor and how many threads it was given."""
    told = {}
    for held in (run.about["hardware"] for run in part.runs):
        threads = f"{held['threads']} thread{'' if held['threads'] == 1 else 's'}"
        told[held["device"] if held["device"] != "cpu" else f"{held['processor']}, {threads}"] = None
    return "; ".join(told)


def show_time(seconds: float) -> str:
    """What an image costs, in milliseconds."""
    return f"{1000 * seconds:,.1f}"


def tell_times(parts: Mapping[str, Part], costs: Mapping[str, float] | None) -> str:
    """Where the times of some methods come from, as a sentence after others; nothing where there are none."""
    if costs is None:
        return ""
    every = count_images(parts["costs"].runs)
    counts = sorted({every[method] for method in costs})
    images = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    return (
        f" Times: every method by itself on {images} images; {_tell_conditions(parts['costs'])}; "
        f"{link(parts['costs'].files[0])}."
    )


def _tell_conditions(part: Part) -> str:
    """Hardware and arithmetic of the times."""
    settings = [held["settings"] for held in find_methods(part.results).values()]
    kinds = sorted({held.get("precision", "fp32") for held in settings})
    return f"{_tell_machines(part)}, {' and '.join(kinds)}, nothing else running"


def tell_costs(found: Findings) -> str:
    """What an image costs each method that was timed by itself."""
    part = found.parts.get("costs")
    if part is None:
        return tell_absence("costs")
    seconds, images = part.results.seconds, count_images(part.runs)
    rows = [
        [
            f"`{method}`",
            f"{images[method]:,}",
            f"{100 * _share_learned(part.results, method):.0f}",
            show_time(cost),
            f"{cost / seconds[BASELINE]:,.1f}",
        ]
        for method, cost in sorted(seconds.items(), key=lambda item: item[1])
    ]
    sets = dict.fromkeys(unit.set_name for run in part.runs for unit in run.units)
    words = (
        f"The runs below went one after the other: {_tell_conditions(part)}; the first images of "
        f"{' and '.join(f'`{name}`' for name in sets)} in the shuffled order. Reading them is part of the time. "
        f"An online method is one stream.{_tell_spread(part)}"
    )
    files = {file for each in found.parts.values() for file in each.files}
    files |= {FOLDER / run.path.parent.name for run in found.more}
    shared = [link(file) for file in SHARED if file in files]
    if shared:
        words += f" The runs of {', '.join(shared)} shared their GPU with others, so that their times are no measure."
    timed = table(["", "images", "% learned from", "ms an image", f"× {BASELINE}"], rows)
    return f"{timed}\n\n{wrap(words)}\n\n{tell_origin(part)}"


def _tell_spread(part: Part) -> str:
    """By how much times of the same settings differ, as a sentence after others; nothing where all are of one run."""
    rates: dict[str, list[float]] = {}
    for run in part.runs:
        for method, cost in time_methods([run]).items():
            rates.setdefault(method, []).append(cost)
    methods = find_methods(part.results)
    twins = [pair for pair in itertools.combinations(rates, 2) if is_same_method(*(methods[name] for name in pair))]
    equal = [*rates.values(), *([*rates[one], *rates[two]] for one, two in twins)]
    if all(len(some) == 1 for some in equal):
        return ""
    names = f" or under two names ({', '.join(f'`{one}` and `{two}`' for one, two in twins)})" if twins else ""
    widest = 100 * (max(max(some) / min(some) for some in equal) - 1)
    return f" The same settings, measured again{names}, differ by up to {widest:.0f}%: less than that says little."


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
        raise ResultsError(results.runs[0].path, f"{method} was not run on {name}")
    right = np.mean([source.unit.verdicts().right for source in found], axis=0)
    return [100 - 100 * float(part.mean()) for part in np.array_split(right, 10)]


def tell_short(found: Findings) -> str:
    """The variants that cost less than ten steps on every image, beside those."""
    told = []
    for name, title in (("fast", "One long step"), ("threshold", "The least sure images alone")):
        part = found.parts.get(name)
        shown = tell_absence(name) if part is None else _tell_cheaper(part, found.parts)
        told.append(f"### {title}\n\n{shown}")
    return "\n\n".join(told)


def _tell_cheaper(part: Part, parts: Mapping[str, Part]) -> str:
    """Methods of a part beside `fixed` and `episodic`: mean error, share of the images learned from, time."""
    top = by_level(part.results)[5]
    names = [top.set_name(column) for column in top.shifted]
    own = [method for method in top.rows if method not in PAPER_NAMES]
    methods = ("fixed", "episodic", *own)
    costs = find_costs(parts, part.results, methods)
    rows, texts = [], []
    for method in methods:
        row = top.rows[method]
        rows.append(
            [
                f"`{method}`" if method in own else method_title(method),
                f"{row[ORIGINAL].error:.1f}" if ORIGINAL in row else "",
                f"{row[MEAN].error:.2f}",
                f"{row[MEAN].half_width:.2f}",
                f"{100 * _share_learned(part.results, method):.0f}",
                *([] if costs is None else [show_time(costs[method]), f"{costs[method] / costs['episodic']:.3f}"]),
            ]
        )
    whole = top.rows["fixed"][MEAN].error - top.rows["episodic"][MEAN].error
    for method in own:
        gap, ends = compare(part.results, method, "episodic", names)
        time = "" if costs is None else f", takes {100 * costs[method] / costs['episodic']:.0f}% of its time"
        texts.append(
            f"`{method}` is {points(gap)} points from `episodic` (95% {points(ends.low)} to {points(ends.high)}, "
            f"paired){time} and has {100 * (1 - gap / whole):.0f}% of its gain over `fixed`."
        )
    times = [] if costs is None else ["ms an image", "× episodic"]
    heads = ["", "original", "mean of level 5", "± 95%", "% learned from", *times]
    texts += [_tell_changes(part, method) for method in own]
    words = f"{images_of(top):,} images of each set. {' '.join(texts)}{tell_times(parts, costs)}"
    return f"{table(heads, rows)}\n\n{wrap(words)}\n\n{tell_origin(part)}"


def _tell_changes(part: Part, method: str) -> str:
    """The settings of a method that are not those of `episodic`."""
    methods = find_methods(part.results)
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
    top = part.results.tables[0]
    column = MEAN if MEAN in top.columns else top.shifted[0]
    grid = read_grid(part.files[0], top.rows)
    costs = find_costs(found.parts, part.results, [BASELINE, *grid.values()])
    shown = {"mean error in %": {method: f"{row[column].error:.2f}" for method, row in top.rows.items()}}
    if costs is not None:
        shown["ms an image"] = {method: show_time(cost) for method, cost in costs.items()}
    steps, copies = (sorted({place[axis] for place in grid}) for axis in (0, 1))
    tables = []
    for title, values in shown.items():
        rows = [["0 (`fixed`)", *([values[BASELINE]] * len(copies))]]
        rows += [[str(one), *(values.get(grid.get((one, two), ""), "") for two in copies)] for one in steps]
        tables.append(table([f"{title}: steps", *(f"{two} copies" for two in copies)], rows))
    names = [top.set_name(name) for name in top.shifted]
    half = max(top.rows[method][column].half_width for method in grid.values())
    words = (
        f"The standard version on {images_of(top):,} images of {len(names)} sets of level {top.level}: "
        f"{', '.join(column_title(name) for name in top.shifted)}. The 95% intervals of the mean errors over "
        f"images are ±{half:.1f} or less. {_tell_choice(part, grid, costs, names)}{tell_times(found.parts, costs)}"
    )
    return "\n\n".join([*tables, wrap(words), tell_origin(part)])


def read_grid(file: Path, methods: Sequence[str] | Mapping[str, object]) -> dict[tuple[int, int], str]:
    """Methods of a file called `steps-S-copies-C` by steps and copies.

    Raises:
        ResultsError: There is none.
    """
    found = {(int(m[1]), int(m[2])): m[0] for name in methods if (m := re.fullmatch(r"steps-(\d+)-copies-(\d+)", name))}
    if not found:
        raise ResultsError(file, f"no method is called steps-S-copies-C among {', '.join(methods)}")
    return dict(sorted(found.items()))


def _tell_choice(
    part: Part, grid: Mapping[tuple[int, int], str], seconds: Mapping[str, float] | None, names: Sequence[str]
) -> str:
    """The lowest error; where times are known, the cheapest that cannot be told from it, and the default's worth."""

    def words(place: tuple[int, int]) -> str:
        return f"{place[0]} step{'' if place[0] == 1 else 's'} with {place[1]} copies"

    gains = {place: -compare(part.results, method, BASELINE, names)[0] for place, method in grid.items()}
    best = max(gains, key=lambda place: gains[place])
    told = f"The lowest mean error is that of {words(best)}, {gains[best]:.2f} points below `fixed`."
    if seconds is None:
        return told
    costs = {place: seconds[method] for place, method in grid.items()}
    equal = [
        place
        for place, method in grid.items()
        if place == best or compare(part.results, method, grid[best], names)[1].low <= 0
    ]
    cheap = min(equal, key=lambda place: costs[place])
    if cheap == best:
        told += " Every cheaper choice is worse by more than the paired 95% interval allows for."
    else:
        told += (
            f" The cheapest that cannot be told from it (the paired 95% interval of the difference holds 0) is "
            f"{words(cheap)}, at {100 * costs[cheap] / costs[best]:.0f}% of its time: choose that where errors matter "
            "most."
        )
    half = [place for place in grid if gains[place] >= gains[best] / 2]
    least = min(half, key=lambda place: costs[place])
    told += (
        f" Half the gain or more costs least with {words(least)}: {100 * gains[least] / gains[best]:.0f}% of it at "
        f"{100 * costs[least] / costs[best]:.0f}% of the time."
    )
    if (10, 32) in grid:
        told += (
            f" The default, {words((10, 32))}, has {100 * gains[10, 32] / gains[best]:.0f}% of it at "
            f"{100 * costs[10, 32] / costs[best]:.0f}% of the time."
        )
    return told
