"""Other networks and other settings in the document of results: training seeds, and the preset `best`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from testtime.report.committed import CONTROL, Findings, by_level
from testtime.report.documents import bullets, points, table, wrap
from testtime.report.finding_levels import images_of, show_table
from testtime.report.finding_runs import tell_settings
from testtime.report.finding_streams import tell_original
from testtime.report.finding_variants import show_time, tell_absence, tell_origin, tell_times
from testtime.report.further import Part, compare, find_costs, find_methods, is_same_method
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import MEAN, ORIGINAL, Results, Table, column_title, method_title
from testtime.report.statistics import spread

BEST = "best"
WORTH = 0.1
"""Points by which a costlier candidate had to be better to be taken."""


def tell_seeds(found: Findings) -> str:
    """JT and TTT-Online of networks trained with other seeds, and in other arithmetic."""
    part = found.parts.get("seeds")
    told = [tell_absence("seeds")] if part is None else _tell_spread(found, part)
    told += _tell_tf32(found, found.parts["tf32"]) if "tf32" in found.parts else []
    return "\n\n".join(told)


def _tell_spread(found: Findings, part: Part) -> list[str]:
    """How far networks of different seeds are apart, and from the paper's."""
    top = by_level(part.results)[5]
    texts = []
    for method in ("fixed", "online"):
        means = _means(part.results, top, method)
        known = top.paper_value(method, MEAN, "error")
        texts.append(
            f"{PAPER_NAMES[method]}: the means over the corruptions are {', '.join(f'{mean:.2f}' for mean in means)}, "
            f"standard deviation {spread(means) or 0:.2f}; the paper's {known:.2f}."
        )
        cells = [(top.rows[method][column].spread or 0.0, column) for column in top.shifted]
        widest = sorted(cells, reverse=True)[:3]
        beyond = [
            column_title(column)
            for column in top.shifted
            if (value := top.paper_value(method, column, "error")) is not None
            and abs(top.rows[method][column].error - value) > 2 * (top.rows[method][column].spread or 0.0)
        ]
        texts.append(
            f"{PAPER_NAMES[method]}: the networks differ most on "
            f"{', '.join(f'{column_title(column)} ({value:.1f})' for value, column in widest)}; further than twice the "
            f"standard deviation from the paper's: {', '.join(beyond) or 'none'}."
        )
    if ORIGINAL in top.columns:
        texts.append(f"{tell_original(part.results)} These are TTT-Online minus JT.")
    words = (
        f"s is the standard deviation over {top.rows['fixed'][MEAN].repetitions} networks, the one of the other tables "
        f"and those of training seeds {_seeds(found, 'seed-')}; numbers are their means, on "
        f"{images_of(top):,} images of each set."
    )
    return [show_table(part.results, top), wrap(words), bullets(texts), tell_origin(part)]


def _tell_tf32(found: Findings, part: Part) -> list[str]:
    """Networks trained in TF32 beside those trained in bfloat16."""
    top, texts = by_level(part.results)[5], []
    others = found.parts["seeds"].results if "seeds" in found.parts else found.results
    usual = by_level(others)[5]
    for method in ("fixed", "online"):
        means, known = _means(part.results, top, method), _means(others, usual, method)
        chance = math.comb(len(means) + len(known), len(means))
        apart = f": all below all, by chance once in {chance}" if max(means) < min(known) else ""
        texts.append(
            f"{PAPER_NAMES[method]}: the means over the corruptions are {', '.join(f'{mean:.2f}' for mean in means)}, "
            f"in bfloat16 {min(known):.2f} to {max(known):.2f}{apart}."
        )
        pairs = {column: (top.rows[method][column].error, usual.rows[method][column].error) for column in top.shifted}
        most = sorted(pairs, key=lambda column: abs(pairs[column][0] - pairs[column][1]), reverse=True)[:3]
        told = [f"{column_title(column)} ({pairs[column][0]:.1f} against {pairs[column][1]:.1f})" for column in most]
        texts.append(f"{PAPER_NAMES[method]}: the two kinds differ most on {', '.join(told)}.")
    seeds = _seeds(found, "tf32-")
    words = f"The same training in TF32, {len(part.runs)} networks (training seeds {seeds}):"
    return ["### Trained in TF32", wrap(words), show_table(part.results, top), bullets(texts), tell_origin(part)]


def _seeds(found: Findings, prefix: str) -> str:
    """The seeds of the trainings whose names begin so."""
    held = [record for name, record in found.trainings.items() if name.startswith(prefix)]
    return ", ".join(str(record["configuration"]["recipe"]["seed"]) for record in held) or "not recorded"


def _means(results: Results, top: Table, method: str) -> list[float]:
    """The mean over the corruptions for each network."""
    sets = [results.sources[method, top.set_name(column)] for column in top.shifted]
    return [
        100 - 100 * float(np.mean([sources[place].unit.verdicts().right.mean() for sources in sets]))
        for place in range(len(sets[0]))
    ]


def tell_best(found: Findings) -> str:
    """The preset beside the paper's settings, and how it was chosen."""
    part, tuning = found.parts.get("best"), found.parts.get("tuning")
    told = [tell_absence("best") if part is None else _tell_preset(part, found.parts)]
    told.append("### How it was chosen")
    told.append(tell_absence("tuning") if tuning is None else _tell_candidates(tuning, found.parts))
    return "\n\n".join(told)


def _tell_preset(part: Part, parts: Mapping[str, Part]) -> str:
    results, levels = part.results, by_level(part.results)
    chosen = by_level(parts["tuning"].results) if "tuning" in parts else {}  # whose images are some of these
    rows, texts = [], [tell_settings(BEST, _find_preset(part)["settings"])]
    first = next(iter(levels.values()))
    methods = ("fixed", *([CONTROL] if CONTROL in results.methods else []), "online", BEST)
    for method in methods:
        shown = [each.rows.get(method, {}) for each in levels.values()]
        original = next((row[ORIGINAL] for row in shown if ORIGINAL in row), None)
        cells = [original, *(row.get(MEAN) for row in shown)]
        rows.append([method_title(method), *("" if cell is None else f"{cell.error:.2f}" for cell in cells)])
    below = every = 0
    for level, each in levels.items():
        sets = [column for column in each.shifted if column in each.rows[BEST]]
        gap, ends = compare(results, BEST, "online", [each.set_name(column) for column in sets])
        gaps = {column: each.rows[BEST][column].error - each.rows["online"][column].error for column in sets}
        below, every = below + sum(value < 0 for value in gaps.values()), every + len(sets)
        worst = max(gaps, key=lambda column: gaps[column])
        title = f"Level {level}{', which it was chosen on' if level in chosen else ''}"
        texts.append(
            f"{title}: {points(gap)} from `online` (95% {points(ends.low)} to {points(ends.high)}, paired); "
            f"least gain or most loss on {column_title(worst)} ({points(gaps[worst])})."
        )
    if ORIGINAL in first.rows[BEST]:
        gap, ends = compare(results, BEST, "online", [first.set_name(ORIGINAL)])
        base, low_high = compare(results, BEST, "fixed", [first.set_name(ORIGINAL)])
        texts.append(
            f"Original set: {points(gap)} from `online` (95% {points(ends.low)} to {points(ends.high)}), "
            f"{points(base)} from `fixed` ({points(low_high.low)} to {points(low_high.high)})."
        )
    texts += [_tell_harm(levels), *_tell_control(results, levels)]
    costs = find_costs(parts, results, (BEST, "online"))
    time = "" if costs is None else f" and takes {costs[BEST] / costs['online']:.2f} times its time"
    texts.append(f"It is below `online` on {below} of {every} corrupted sets{time}.{tell_times(parts, costs)}")
    titles = [f"level {level}{' ‡' if level in chosen else ''}" for level in levels]
    heads = ["error in %, mean over the corruptions", "original", *titles]
    words = f"{images_of(first):,} images of each set."
    words += " ‡ The preset was chosen on images of this level." if any(level in chosen for level in levels) else ""
    return f"{table(heads, rows)}\n\n{wrap(words)}\n\n{bullets(texts)}\n\n{tell_origin(part)}"


def _tell_harm(levels: Mapping[int, Table]) -> str:
    """Whether the preset does harm anywhere."""
    gaps = {}
    for level, each in levels.items():
        ours, base = each.rows[BEST], each.rows["fixed"]
        for column in (column for column in (ORIGINAL, *each.shifted) if column in ours):
            title = "the original set" if column == ORIGINAL else f"{column_title(column)} {level}"
            gaps[title] = ours[column].error - base[column].error
    harmed = [title for title, gap in gaps.items() if gap > 0]
    worst = max(gaps, key=lambda title: gaps[title])
    return (
        f"It is above `fixed` on {', '.join(harmed) or 'none'} of {len(gaps)} sets; least gain or most loss on {worst} "
        f"({points(gaps[worst])})."
    )


def _find_preset(part: Part) -> Mapping[str, Any]:
    """The preset as the run has it that was made with it."""
    methods = [run.configuration["methods"] for run in part.runs]
    return next(held[BEST] for held in methods if BEST in held)


def _tell_control(results: Results, levels: Mapping[int, Table]) -> list[str]:
    """How much the mirror image alone gains, at the levels where that was run."""
    texts = []
    for level, each in levels.items():
        both = [each.rows.get(method, {}) for method in (CONTROL, BEST)]
        sets = [each.set_name(column) for column in each.shifted if all(column in row for row in both)]
        if not sets:
            continue
        alone, ends = compare(results, CONTROL, "fixed", sets)
        rest, others = compare(results, BEST, CONTROL, sets)
        texts.append(
            f"The mirror image alone at level {level}: `{CONTROL}`, which learns nothing, is {points(alone)} from "
            f"`fixed` (95% {points(ends.low)} to {points(ends.high)}, paired), and `{BEST}` {points(rest)} from "
            f"`{CONTROL}` ({points(others.low)} to {points(others.high)})."
        )
    return texts


def _tell_candidates(tuning: Part, parts: Mapping[str, Part]) -> str:
    """Every candidate, and which was taken: the one with the preset's settings."""
    shown = tuning.results.tables[0]
    column = MEAN if MEAN in shown.columns else shown.shifted[0]
    methods, costs = find_methods(tuning.results), find_costs(parts, tuning.results, list(shown.rows))
    preset = _find_preset(parts["best"]) if "best" in parts else None
    taken = [name for name, held in methods.items() if preset is not None and is_same_method(held, preset)]
    learning = {name: held["settings"] for name, held in methods.items() if held["mode"] != "fixed"}
    keys = _varying(list(learning.values()))
    errors = {name: row[column].error for name, row in shown.rows.items()}
    rows = []
    for name in sorted(errors, key=lambda name: errors[name]):
        cell, held = shown.rows[name][column], learning.get(name, {})
        rows.append(
            [
                f"`{name}`{' (taken)' if name in taken else ''}",
                *(_value(held.get(key)) for key in keys),
                f"{cell.error:.2f}",
                f"{cell.half_width:.2f}",
                *([] if costs is None else [show_time(costs[name])]),
            ]
        )
    names = ", ".join(column_title(name) for name in shown.shifted)
    words = f"{shown.title}: {images_of(shown):,} images of each of {len(shown.shifted)} sets ({names})."
    if preset is None:
        words += " Which of them became the preset is said once the preset has been run."
    elif not taken:
        words += " None of them has the settings of the preset that was run."
    else:
        lowest = min(errors, key=lambda name: (errors[name], name not in taken))
        below = "" if lowest in taken else _tell_lower(lowest, taken[0], errors, methods, costs)
        words += f" Taken: {', '.join(f'`{name}`' for name in taken)}{below or ', the lowest of all.'}"
    words += tell_times(parts, costs)
    times = [] if costs is None else ["ms an image"]
    heads = ["candidate", *(f"`{key}`" for key in keys), "mean error in %", "± 95%", *times]
    return f"{table(heads, rows)}\n\n{wrap(words)}\n\n{tell_origin(tuning)}"


def _tell_lower(
    lowest: str,
    taken: str,
    errors: Mapping[str, float],
    methods: Mapping[str, Mapping[str, Any]],
    costs: Mapping[str, float] | None,
) -> str:
    """By how much the lowest is below the candidate that was taken, and what that costs."""
    ours, theirs = (methods[name]["settings"] for name in (lowest, taken))
    gap = errors[taken] - errors[lowest]
    changed = [
        f", with `{key}` {_value(ours[key])} instead of {_value(theirs[key])}"
        for key in _varying([ours, theirs])
        if key in ours and key in theirs
    ]
    time = "" if costs is None else f", at {costs[lowest] / costs[taken]:.2f} times the time"
    rule = f" A costlier candidate had to be better by {WORTH:g} points." if gap < WORTH else ""
    return f". The lowest, `{lowest}`, is {gap:.2f} points lower{''.join(changed)}{time}.{rule}"


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which some methods differ."""
    keys = dict.fromkeys(key for held in settings for key in held)
    return [key for key in keys if len({str(held.get(key)) for held in settings}) > 1]


def _value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else f"`{value}`" if isinstance(value, str) else str(value)
