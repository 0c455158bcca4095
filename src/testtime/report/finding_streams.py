"""What learning along the stream does, in the document of results: where it harms, and when along the stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from testtime.data.cifar import CLASSES
from testtime.report.committed import Findings, by_level
from testtime.report.documents import points, signed, table, wrap
from testtime.report.finding_levels import paper_value
from testtime.report.finding_trainings import tell_arithmetic
from testtime.report.finding_variants import tell_origin
from testtime.report.further import Part, compare
from testtime.report.results import BASELINE, ORIGINAL, Results, Table, column_title
from testtime.report.run_figures import stream_verdicts
from testtime.report.sources import ResultsError, read_verdicts
from testtime.report.statistics import sign_test
from testtime.runs import Run

_LARGEST = 0.3
"""The most, in points, by which TTT-Online is above JT on a set of the paper's."""


def tell_losses(found: Findings) -> str:
    """Where learning along the stream does harm, here and in the paper."""
    levels = found.levels
    rows, worse, theirs_above = [], [], []
    for each, column in _places(found):
        base, cell = each.rows["fixed"][column], each.rows["online"][column]
        theirs = paper_value(each, "online", column) - paper_value(each, "fixed", column)
        title = _title(each, column)
        theirs_above += [title] if round(theirs, 1) > 0 else []
        if cell.error <= base.error:
            continue
        worse += [title] if cell.mark else []
        gain = f"{cell.error - base.error:+.2f}{cell.mark}"
        rows.append([title, f"{base.error:.2f}", f"{cell.error:.2f}", gain, signed(theirs)])
    rows.sort(key=lambda row: -float(row[3].rstrip("†")))
    words = (
        f"On {len(rows)} of {len(_places(found))} sets TTT-Online's error is above JT's, in the paper on "
        f"{len(theirs_above)} ({', '.join(theirs_above)}); with † as in the tables on {len(worse)} of them"
        f"{': ' if worse else ''}{', '.join(worse)}."
    )
    harm = [
        f"{column_title(column)} {each.level}"
        for each in (*levels.values(), *by_level(found.part).values())
        if "episodic" in each.rows
        for column in each.columns
        if each.rows["episodic"][column].error > each.rows["fixed"][column].error
    ]
    words += f" TTT's error is above JT's on {', '.join(harm) if harm else 'no set'}."
    heads = ["set and level", "JT", "TTT-Online", "difference", "the paper's difference"]
    return f"{wrap(words)}\n\n{table(heads, rows)}"


def tell_harm(found: Findings) -> str:
    """When along the stream, in which classes and by which steps the harm arises, on the sets that have it."""
    harmed = [
        (each, column)
        for each, column in _places(found)
        if each.rows["online"][column].error > each.rows["fixed"][column].error
    ]
    if not harmed:
        return "There is none."
    harmed.sort(key=lambda place: _gap(place[0], place[1]), reverse=True)
    names = [each.set_name(column) for each, column in harmed]
    rows, along = [], []
    for (each, column), name in zip(harmed, names, strict=True):
        gap, ends = compare(found.results, "online", "fixed", [name])
        p_value = sign_test(each.rows["online"][column].to_right or 0, each.rows["online"][column].to_wrong or 0)
        along.append(_by_fifth(found.results, name))
        rows.append([_title(each, column), *_signed_row([gap, *ends]), f"{p_value:.4f}", *_signed_row(along[-1])])
    gap, ends = compare(found.results, "online", "fixed", names)
    rows.append(["mean of these", *_signed_row([gap, *ends]), "", *_signed_row(np.mean(along, 0))])
    step = len(read_verdicts((BASELINE, names[0]), found.results.sources[BASELINE, names[0]]).samples) // 5
    spans = [f"{1 + step * place:,}–{step * (place + 1):,}" for place in range(5)]
    heads = ["TTT-Online minus JT, points", "all images", "95% from", "to", "p", *spans]
    sure = [row[0] for row in rows[:-1] if not row[2].startswith("−")]
    by_class = sorted(zip(_by_class(found.results, names), CLASSES, strict=True), reverse=True)
    classes = ", ".join(f"{title} {points(gap)}" for gap, title in by_class)
    own = np.mean([_own_step(found.results, name) for name in names], 0)
    words = (
        f"Paired on the same images, with bootstrap intervals; p of the sign test, not corrected for {len(names)} sets "
        f"picked out of {len(_places(found))} for their sign. The interval lies above 0 on "
        f"{', '.join(sure) if sure else 'none'}. By class, mean of these sets: {classes}. The error is {own[0]:.2f}% "
        f"just before each image's own step and {own[1]:.2f}% after it: "
    )
    words += "what harms is what earlier images left behind." if own[1] <= own[0] else "the step itself harms."
    if "seeds" in found.parts and ("online", "cifar10") in found.parts["seeds"].results.sources:
        words += f" {tell_original(found.parts['seeds'].results)}"
    others = [_tell_orders(found.parts["orders"])] if "orders" in found.parts else []
    others += [_tell_networks(found)] if "networks" in found.parts else []
    return "\n\n".join([table(heads, rows), wrap(words), *others])


def _tell_orders(part: Part) -> str:
    """The harm in several orders of the same images."""
    sets, (run,) = _mild_sets(part), part.runs
    rows = []
    for column, name in sets.items():
        gaps = _gaps_by_order(run, name)
        rows.append([_title(part.results.tables[0], column), *_signed_row([*gaps, float(np.mean(gaps))])])
    words = f"The same images in {len(run.about['seeds'])} orders, TTT-Online minus JT in points:"
    heads = ["", *(f"order {seed}" for seed in run.about["seeds"]), "mean"]
    return "\n\n".join([wrap(words), table(heads, rows), tell_origin(part)])


def _tell_networks(found: Findings) -> str:
    """The harm to networks of other trainings, in the mean of several orders."""
    part, rows = found.parts["networks"], []
    sets, top = _mild_sets(part), part.results.tables[0]
    known = {f"mild-{name}": record for name, record in found.trainings.items()}
    runs = {run.path.name: run for run in part.runs}
    if "orders" in found.parts:
        runs = {"of the tables": found.parts["orders"].runs[0]} | runs
        known["of the tables"] = found.training
    within = total = 0
    for name, run in runs.items():
        recipe = known[name]["configuration"]["recipe"] if known.get(name) else None
        title = f"seed {recipe['seed']}, {tell_arithmetic(recipe)}" if recipe else name
        gaps = np.array([_gaps_by_order(run, each) for each in sets.values()])  # (sets, orders)
        ends = gaps.mean(0).min(), gaps.mean(0).max()
        within, total = within + int((gaps.max(0) < _LARGEST + 0.005).sum()), total + gaps.shape[1]
        rows.append([title, *_signed_row([*gaps.mean(1), gaps.mean(), *ends])])
    theirs = [paper_value(top, "online", column) - paper_value(top, "fixed", column) for column in sets]
    rows.append(["the paper's network, one order", *_signed_row([*theirs, float(np.mean(theirs))]), "", ""])
    heads = ["trained with", *(_title(top, column) for column in sets), "mean", "lowest order", "highest"]
    words = f"The mean over the orders for {len(runs)} networks, and the lowest and the highest order:"
    count = (
        f"Of {total} pairs of a network and an order, {within or 'none'} stay{'s' if within == 1 else ''} within "
        f"{_LARGEST} points on all of these sets; that is the most the paper has on any set."
    )
    return "\n\n".join([wrap(words), table(heads, rows), wrap(count), tell_origin(part)])


def _mild_sets(part: Part) -> dict[str, str]:
    """The sets of a part by their columns, the original one first."""
    top = part.results.tables[0]
    columns = (*([ORIGINAL] if ORIGINAL in top.columns else []), *top.shifted)
    return {column: top.set_name(column) for column in columns}


def _gaps_by_order(run: Run, name: str) -> list[float]:
    """By how many points `online` is above `fixed` on a set, for each order that a run has."""
    right = {(unit.method, unit.seed): unit.verdicts().right for unit in run.units if unit.set_name == name}
    return [100 * float(right[BASELINE, seed].mean() - right["online", seed].mean()) for seed in run.about["seeds"]]


def tell_original(seeds: Results) -> str:
    """The harm on the original set for each of several networks."""
    sources = {method: seeds.sources[method, "cifar10"] for method in ("fixed", "online")}
    gaps = [
        100 * float(np.mean(base.unit.verdicts().right) - np.mean(one.unit.verdicts().right))
        for base, one in zip(sources["fixed"], sources["online"], strict=True)
    ]
    return f"On the original set the {len(gaps)} networks of different seeds have {', '.join(_signed_row(gaps))}."


def tell_thousands(found: Findings) -> str:
    """The error of `fixed` and `online` along the stream at level 5, and on the original set."""
    top = found.levels[5]
    streams = [_stream(found.results, top.set_name(column)) for column in top.shifted]
    original = _stream(found.results, top.set_name(ORIGINAL))
    count = len(original["online"])
    rows = []
    for start in range(0, count, 1000):
        end = min(start + 1000, count)
        base, online = (
            100 * float(np.mean([1 - stream[method][start:end].mean() for stream in streams]))
            for method in ("fixed", "online")
        )
        clean = 100 * float((original["fixed"] - original["online"])[start:end].mean())
        rows.append([f"{start + 1:,}–{end:,}", f"{base:.1f}", f"{online:.1f}", *_signed_row([online - base, clean])])
    heads = [f"images, mean over the {len(streams)} corruptions", "JT", "TTT-Online", "difference", "original set"]
    return table(heads, rows)


def _places(found: Findings) -> list[tuple[Table, str]]:
    """The original set and every corrupted one."""
    levels = found.levels
    return [(levels[1], ORIGINAL), *((each, column) for each in levels.values() for column in each.shifted)]


def _title(one: Table, column: str) -> str:
    return "original" if column == ORIGINAL else f"{column_title(column)} {one.level}"


def _gap(one: Table, column: str) -> float:
    return one.rows["online"][column].error - one.rows["fixed"][column].error


def _signed_row(values: Sequence[float] | np.ndarray) -> list[str]:
    return [points(value) for value in values]


def _stream(results: Results, name: str) -> dict[str, np.ndarray]:
    found = stream_verdicts(results, name)
    if not found:
        raise ResultsError(results.runs[0].path, f"the order of the stream of {name} is not known")
    return found


def _by_fifth(results: Results, name: str) -> list[float]:
    """By how many points `online` is above `fixed` on each fifth of the stream."""
    found = _stream(results, name)
    return [100 * float(part.mean()) for part in np.array_split(found["fixed"] - found["online"], 5)]


def _by_class(results: Results, names: Sequence[str]) -> list[float]:
    """By how many points `online` is above `fixed` on each class, mean over some sets."""
    gaps = []
    for name in names:
        base, online = (read_verdicts((method, name), results.sources[method, name]) for method in ("fixed", "online"))
        lost = 100 * (base.share - online.share)
        gaps.append([lost[base.labels == number].mean() for number in range(len(CLASSES))])
    return np.mean(gaps, 0).tolist()


def _own_step(results: Results, name: str) -> tuple[float, float]:
    """The error of `online` just before and after each image's own step."""
    counts = [source.unit.about["counts"] for source in results.sources["online", name]]
    images = sum(count["images"] for count in counts)
    before, after = (sum(count[key] for count in counts) for key in ("was_right", "is_right"))
    return 100 - 100 * before / images, 100 - 100 * after / images
