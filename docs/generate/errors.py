"""Tables of errors: the levels of CIFAR-10-C, differences from the paper, other networks, photographs, the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from testtime.report.correlation import PAPER, PREDICTORS, Joined
from testtime.report.paper import PAPER_NAMES, Measure, find_table
from testtime.report.results import MEAN, ORIGINAL, Results, Table, column_title, method_title
from testtime.report.run_tables import difference, markdown

from .documents import ends, minus, points, table
from .result_files import by_level, compare

PAPERS = "the paper's"


def format_table(results: Results, one: Table, measure: Measure = "error") -> str:
    """A table as the paper prints it, with intervals and the paper's values."""
    text = markdown(replace(results, tables=(one,)), measure, paper=True)
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def format_expected(networks: Mapping[str, Table], methods: Sequence[str]) -> str:
    """The errors of a few methods at level 5 and on the original images, by the title of the network."""
    rows = []
    for name, top in networks.items():
        for words, column in (("original images", ORIGINAL), ("mean of 15 corruptions, level 5", MEAN)):
            rows.append([name if column == ORIGINAL else "", words, *(_error(top, each, column) for each in methods)])
    return table(["error in %", "", *(f"`{method}`" for method in methods)], rows, words=(0, 1))


def format_means(results: Results) -> str:
    """The mean over the corruptions at every level."""
    levels = by_level(results)
    places = [(levels[5], ORIGINAL), *((each, MEAN) for each in levels.values())]
    rows = []
    for method in levels[5].rows:
        rows.append([method_title(method), *(_error(each, method, column) for each, column in places)])
        known = [each.paper_value(method, column, "error") for each, column in places]
        if any(known):
            rows.append([PAPERS, *(f"{value:.1f}" if value else "" for value in known)])
    return table(["error in %, mean over the corruptions", "original", *(f"level {level}" for level in levels)], rows)


def _error(one: Table, method: str, column: str) -> str:
    cell = one.rows.get(method, {}).get(column)
    return "" if cell is None else f"{cell.error:.1f}"


def format_differences(results: Results) -> str:
    """Ours minus the paper's by method: the means, and what at level 5 lies outside our 95% interval."""
    levels = by_level(results)
    places = [(levels[5], ORIGINAL), *((each, MEAN) for each in levels.values())]
    rows = []
    for method in (name for name in levels[5].rows if name in PAPER_NAMES):
        gaps = [_gap(each, method, column) for each, column in places]
        top = levels[5]
        sets = {column: gap for column in (ORIGINAL, *top.shifted) if (gap := _gap(top, method, column)) is not None}
        outside = [column for column in sets if _is_outside(top, method, column)]
        extremes = [pick(sets, key=lambda column: sets[column]) for pick in (max, min)]
        rows.append(
            [
                PAPER_NAMES[method],
                *("" if gap is None else difference(gap, 0) for gap in gaps),
                f"{len(outside)} of {len(sets)}",
                *(f"{column_title(column)} {difference(sets[column], 0)}" for column in extremes),
            ]
        )
    heads = ["ours minus the paper's", "original", *(f"level {level}" for level in levels)]
    return table([*heads, "sets outside", "highest", "lowest"], rows)


def _gap(one: Table, method: str, column: str) -> float | None:
    """Ours minus the paper's, both as printed; None where one is missing, or the paper's row is in doubt."""
    cell, known = one.rows.get(method, {}).get(column), one.paper_value(method, column, "error")
    doubtful = method == "alp" and one.paper is not None and one.paper.note
    return None if cell is None or known is None or doubtful else round(cell.error, 1) - round(known, 1)


def _is_outside(one: Table, method: str, column: str) -> bool:
    low, high = one.rows[method][column].interval
    return not low <= (one.paper_value(method, column, "error") or 0) <= high


def format_flips(top: Table) -> str:
    """How many answers adaptation turned right and wrong."""
    rows = []
    for method in ("episodic", "online"):
        cells = [top.rows[method][column] for column in top.shifted]
        right, wrong = sum(cell.to_right or 0 for cell in cells), sum(cell.to_wrong or 0 for cell in cells)
        count = sum(cell.images for cell in cells)
        rows.append([method_title(method), f"{count:,}", f"{right:,}", f"{wrong:,}", f"{right / wrong:.1f}"])
    return table(["", "answers", "wrong → right", "right → wrong", "ratio"], rows)


def format_precisions(results: Mapping[str, Results]) -> str:
    """The error of `online` in each arithmetic, on the same images."""
    columns = next(iter(results.values())).tables[0].columns
    rows = [
        [f"`{name}`", *(f"{one.tables[0].rows['online'][column].error:.1f}" for column in columns)]
        for name, one in results.items()
    ]
    return table(["error in %", *(column_title(column) for column in columns)], rows)


def format_correlations(joined: Mapping[str, Joined]) -> str:
    """The linear correlation of every predictor with the improvement of each method."""
    fits = {(fit.predictor, fit.method): fit for one in joined.values() for fit in one.fits}
    rows = []
    for key, words in PREDICTORS.items():
        cells = []
        for method in joined:
            if (key, method) in fits:
                fit = fits[key, method]
                known = f"{PAPER[method]:.2f}" if key == "batch.inner" else ""
                interval = " to ".join(minus(f"{end:.2f}") for end in fit.interval)
                cells += [minus(f"{fit.correlation:.2f}"), interval, known]
        if cells:
            rows.append([words, *cells])
    heads = [head for method in joined for head in (method_title(method), "95%", PAPERS)]
    return table(["r with the improvement in error", *heads], rows)


def format_gains(results: Mapping[str, Results]) -> str:
    """The accuracy above that of `fixed` on photographs by method, and the paper's on ImageNet-C."""
    known = find_table("imagenet-c", 5)
    assert known is not None
    top = next(iter(results.values())).tables[0]
    rows = []
    for column in top.columns:
        names = [top.set_name(name) for name in (top.shifted if column == MEAN else (column,))]
        row = [column_title(column)]
        for method, own in results.items():
            gap, interval = compare(own, method, "fixed", names)
            both = [
                known.mean(one, top.shifted, "accuracy") if column == MEAN else known.value(one, column, "accuracy")
                for one in (method, "fixed")
            ]
            theirs = "" if both[0] is None or both[1] is None else points(both[0] - both[1])
            row += [points(-gap), ends((-interval.high, -interval.low)), theirs]
        rows.append(row)
    heads = [head for method in results for head in (PAPER_NAMES[method], "95%, paired", PAPERS)]
    return table(["accuracy minus that of JT, points", *heads], rows)


def format_demo(results: Results) -> str:
    """Sets down and methods across, with the time for an image."""
    shown = results.tables[0]
    rows = []
    for column in shown.columns:
        bold = "**" if column == MEAN else ""
        title = "mean of the shifts" if column == MEAN else column_title(column)
        cells = [f"{bold}{row[column].error:.1f}{bold}" for row in shown.rows.values()]
        rows.append([f"{bold}{title}{bold}", *cells])
    rows.append(["ms per image", *(f"{1000 * results.seconds[name]:.1f}" for name in shown.rows)])
    return table(["error in %", *(f"`{name}`" for name in shown.rows)], rows)


def format_familiar(found: Mapping[str, Any]) -> str:
    """How often `predict` marks images as unlike the training images, from benchmarks/familiar.py."""
    others = [row for row in found["rows"] if not row["known"]]
    total = {"set": "all of classes that it does not know", "known": False}
    total |= {key: sum(row[key] for row in others) for key in ("images", "marked", "unmarked_above_90_percent")}
    rows = [
        [
            row["set"],
            "yes" if row["known"] else "no",
            f"{row['images']:,}",
            f"{row['marked'] / row['images']:.1%}",
            f"{row['unmarked_above_90_percent'] / row['images']:.1%}",
        ]
        for row in [*sorted(found["rows"], key=lambda row: not row["known"]), total]
    ]
    return table(["images", "a class it knows", "n", "marked", "not marked, and above 90% sure"], rows, (0, 1))
