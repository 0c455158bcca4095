"""Tables about streams: the error along them, and where learning from them raises the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from testtime.evaluation import Run
from testtime.evaluation.protocols import read_layout
from testtime.report.results import BASELINE, MEAN, ORIGINAL, Results, Table, column_title, method_title
from testtime.report.run_figures import stream_verdicts
from testtime.report.run_tables import difference
from testtime.report.statistics import bootstrap_means, interval_of

from .documents import ends, points, table
from .result_files import by_level, compare


def format_harm(results: Results) -> str:
    """The sets on which the error of `online` is above that of `fixed`, the largest difference first."""
    levels = by_level(results)
    places = [(levels[1], ORIGINAL), *((each, column) for each in levels.values() for column in each.shifted)]
    harmed = [place for place in places if _gap(*place) > 0]
    harmed.sort(key=lambda place: _gap(*place), reverse=True)
    names = [each.set_name(column) for each, column in harmed]
    rows = []
    for (each, column), name in zip(harmed, names, strict=True):
        base, cell = each.rows["fixed"][column], each.rows["online"][column]
        gap, interval = compare(results, "online", "fixed", [name])
        errors = [f"{base.error:.2f}", f"{cell.error:.2f}", f"{points(gap)}{cell.significance}", ends(interval)]
        rows.append([title_of(each, column), *errors, difference(_paper_gap(each, column), 0)])
    gap, interval = compare(results, "online", "fixed", names)
    rows.append(["mean of these", "", "", points(gap), ends(interval), ""])
    return table(["set and level", "JT", "TTT-Online", "difference", "95%, paired", "the paper's difference"], rows)


def _gap(one: Table, column: str) -> float:
    return one.rows["online"][column].error - one.rows["fixed"][column].error


def _paper_gap(one: Table, column: str) -> float:
    return (one.paper_value("online", column, "error") or 0) - (one.paper_value("fixed", column, "error") or 0)


def title_of(one: Table, column: str) -> str:
    """A set and its level."""
    return "original" if column == ORIGINAL else f"{column_title(column)} {one.level}"


def format_orders(top: Table, runs: Mapping[str, Run]) -> str:
    """`online` minus `fixed` in several orders of the images, by network.

    Args:
        top: Its columns are the sets.
        runs: A run for each network, by title.
    """
    columns = [column for column in top.columns if column != MEAN]
    rows = []
    for title, run in runs.items():
        gaps = np.array([_gaps_by_order(run, top.set_name(column)) for column in columns])  # (sets, orders)
        means = gaps.mean(0)
        rows.append([title, *map(points, [*gaps.mean(1), gaps.mean(), means.min(), means.max()])])
    theirs = [_paper_gap(top, column) for column in columns]
    rows.append(["the paper's, one order", *map(points, [*theirs, float(np.mean(theirs))]), "", ""])
    heads = [title_of(top, column) for column in columns]
    return table(["TTT-Online minus JT, points", *heads, "mean", "lowest order", "highest"], rows)


def _gaps_by_order(run: Run, name: str) -> list[float]:
    right = {(unit.method, unit.seed): unit.verdicts().right for unit in run.units if unit.set_name == name}
    return [100 * float(right[BASELINE, seed].mean() - right["online", seed].mean()) for seed in run.about["seeds"]]


def format_noise(documents: Sequence[Mapping[str, Any]]) -> str:
    """The error on the whole set while the network learns from copies of one image, or of many."""
    rows, counts = [], []
    for row in (row for document in documents for row in document["rows"]):
        counts = [int(count) for count in row["errors"]]
        name, _, rest = row["set"].partition("/")
        title = rest.replace("/", " ") if rest else {"cifar10": "original"}.get(name, name)
        errors = [f"{error:.2f}" for error in (row["error_before"], *row["errors"].values())]
        rows.append([f"{title}, {row['stream']}", *errors, points(row["difference"])])
    heads = ["error in % on the whole set", "JT", *(f"after {count:,} steps" for count in counts)]
    return table([*heads, "mean minus JT"], rows)


def format_thousands(results: Results) -> str:
    """The error of `fixed` and `online` along the stream at level 5, and on the original set."""
    top = by_level(results)[5]
    streams = [stream_verdicts(results, top.set_name(column)) for column in top.shifted]
    original = stream_verdicts(results, top.set_name(ORIGINAL))
    count = len(original["online"])
    rows = []
    for start in range(0, count, 1000):
        end = min(start + 1000, count)
        base, online = (
            100 * float(np.mean([1 - stream[method][start:end].mean() for stream in streams]))
            for method in ("fixed", "online")
        )
        clean = 100 * float((original["fixed"] - original["online"])[start:end].mean())
        rows.append([f"{start + 1:,}–{end:,}", f"{base:.1f}", f"{online:.1f}", points(online - base), points(clean)])
    heads = [f"images, mean over the {len(streams)} corruptions", "JT", "TTT-Online", "difference"]
    return table([*heads, "difference on the original set"], rows)


def format_gradual(results: Results) -> str:
    """The error along each growing noise, and over its first and last tenth."""
    one = results.tables[0]
    rows = []
    for method, row in one.rows.items():
        tenths = np.mean([_tenths(results, method, one.set_name(column)) for column in one.shifted], axis=0)
        errors = [row[column].error for column in one.columns]
        rows.append([method_title(method), *(f"{error:.1f}" for error in (*errors, tenths[0], tenths[-1]))])
    heads = ["error in %", *(column_title(column) for column in one.columns)]
    return table([*heads, "first tenth", "last tenth"], rows)


def _tenths(results: Results, method: str, name: str) -> list[float]:
    right = np.mean([source.unit.verdicts().right for source in results.sources[method, name]], axis=0)
    return [100 - 100 * float(part.mean()) for part in np.array_split(right, 10)]


def format_gaps(runs: Mapping[str, Run], one: str, two: str) -> str:
    """The errors of two methods along streams of several sets, on the same images; `runs` by title."""
    rows = []
    for title, run in runs.items():
        ours, theirs = (split_answers(run, method) for method in (one, two))
        for kind, is_shifted in (("corrupted", True), ("original", False)):
            names = [name for name in ours if ("-c/" in name) == is_shifted]
            if not names:
                continue
            images = np.concatenate([ours[name][0] for name in names])
            right = [np.concatenate([held[name][1] for name in names]).astype(float) for held in (ours, theirs)]
            _, places = np.unique(images, return_inverse=True)
            gaps = 100 * np.bincount(places, right[1] - right[0]) / np.bincount(places)  # mean of each image
            interval = interval_of(bootstrap_means(gaps[:, None])[:, 0])
            cells = [f"{100 - 100 * values.mean():.2f}" for values in right]
            rows.append([title, kind, f"{len(images):,}", *cells, points(float(gaps.mean())), ends(interval)])
    heads = ["stream", "images", "answers", f"`{one}`", f"`{two}`", "difference", "95%, paired"]
    return table(heads, rows, words=(0, 1))


def format_answers(runs: Mapping[str, Run], methods: Mapping[str, str]) -> str:
    """The errors of methods along streams, on corrupted and on original images; runs by title, titles by method."""
    rows = []
    for title, run in runs.items():
        held = {method: split_answers(run, method) for method in methods}
        for kind, is_shifted in (("corrupted", True), ("original", False)):
            right = [
                np.concatenate([answers[1] for name, answers in own.items() if ("-c/" in name) == is_shifted])
                for own in held.values()
            ]
            rows.append([title, kind, f"{len(right[0]):,}", *(f"{100 - 100 * one.mean():.2f}" for one in right)])
    heads = ["stream", "images", "answers", *methods.values()]
    return table(heads, rows, words=(0, 1))


def split_answers(run: Run, method: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Number and correctness of the images that a method answered, by set, in the same order for every method."""
    found = {}
    for unit in run.units:
        if unit.method != method:
            continue
        verdicts, layout = unit.verdicts(), read_layout(run.configuration, unit.set_name)
        if layout is None:
            found[unit.set_name] = verdicts.samples, verdicts.right
            continue
        starts = np.cumsum([0, *layout.sets.values()])
        images = verdicts.samples % starts[-1]
        for name, start, stop in zip(layout.sets, starts, starts[1:], strict=False):
            own = (images >= start) & (images < stop)
            found[name] = images[own] - start, verdicts.right[own]
    return found
