"""Where the results differ from the paper, in the document of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testtime.report.committed import Findings, by_level
from testtime.report.documents import bullets, signed
from testtime.report.finding_levels import images_of, paper_value
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import MEAN, ORIGINAL, Table, column_title


def tell_differences(found: Findings) -> str:
    """What is further from the paper than chance over images explains."""
    levels, part = found.levels, by_level(found.part)
    texts = []
    leveled = {name: here for name in PAPER_NAMES if len(here := _with_paper(levels, name)) > 1}
    for method, here in leveled.items():
        gaps = [_gap(each, method, MEAN) for each in here.values()]
        out = [f"level {level}" for level, each in here.items() if _is_beyond(each, method, MEAN)]
        part_of = "" if len(here) == len(levels) else f" {min(here)} to {max(here)}"
        texts.append(
            f"{PAPER_NAMES[method]}, mean over the corruptions: {signed(min(gaps))} to {signed(max(gaps))} from the "
            f"paper's over the levels{part_of}; outside: {', '.join(out) or 'none'}."
        )
    shown = (*part.values(), levels[5])
    ours = [each.rows["fixed"][MEAN].error - each.rows["episodic"][MEAN].error for each in shown]
    theirs = [paper_value(each, "fixed", MEAN) - paper_value(each, "episodic", MEAN) for each in shown]
    apart = [each.rows["fixed"][MEAN].error - levels[level].rows["fixed"][MEAN].error for level, each in part.items()]
    texts.append(
        f"TTT lowers the mean error of JT on the same images by {_list(ours)} points at levels 1 to 5, in the paper by "
        f"{_list(theirs)}. At levels 1 to 4 these are the first {images_of(part[1]):,} images; JT's mean on them is "
        f"{', '.join(map(signed, apart))} from that on all."
    )
    texts += [_tell_beyond(levels[5], method) for method in levels[5].rows if method in PAPER_NAMES]
    texts += [_tell_constant(here, method) for method, here in leveled.items()]
    for one, two in (("fixed", "plain"), ("online", "uda"), ("online", "alp")):
        if two in levels[5].rows:
            texts.append(_tell_order(levels[5], one, two))
    if "batch norm" in found.parts:
        top = by_level(found.parts["batch norm"].results)[5]
        texts += [f"With Batch Normalization, {_tell_beyond(top, method)}" for method in top.rows]
    return bullets(texts)


def _with_paper(levels: Mapping[int, Table], method: str) -> dict[int, Table]:
    """The levels at which a method was run and the paper has a row of it that can be trusted."""
    found = {}
    for level, each in levels.items():
        doubtful = method == "alp" and each.paper is not None and each.paper.note
        if MEAN in each.rows.get(method, {}) and each.paper_value(method, MEAN, "error") is not None and not doubtful:
            found[level] = each
    return found


def _tell_order(top: Table, one: str, two: str) -> str:
    """Which of two methods is better, here and in the paper."""
    sets = [column for column in top.shifted if column in top.rows[two]]
    ours = [top.rows[one][column].error - top.rows[two][column].error for column in sets]
    theirs = [paper_value(top, one, column) - paper_value(top, two, column) for column in sets]
    below = [sum(gap < 0 for gap in gaps) for gaps in (ours, theirs)]
    means = [sum(gaps) / len(gaps) for gaps in (ours, theirs)]
    return (
        f"{PAPER_NAMES[one]} is below {PAPER_NAMES[two]} on {below[0]} of {len(sets)} corruptions at level {top.level}"
        f", in the paper on {below[1]}; the difference of their means is {signed(means[0])}, in the paper "
        f"{signed(means[1])}."
    )


def _tell_beyond(one: Table, method: str) -> str:
    columns = [column for column in (ORIGINAL, *one.shifted) if column in one.rows[method]]
    out = {column: _gap(one, method, column) for column in columns if _is_beyond(one, method, column)}
    lists = []
    for sign, word in ((1, "higher"), (-1, "lower")):
        ordered = sorted((column for column in out if sign * out[column] > 0), key=lambda column: -abs(out[column]))
        if ordered:
            lists.append(f"{word} on {', '.join(f'{column_title(each)} ({signed(out[each])})' for each in ordered)}")
    words = [f"outside on {len(out)} of {len(columns)} sets", *lists]
    return f"{PAPER_NAMES[method]} at level {one.level}: {'; '.join(words)}."


def _tell_constant(levels: Mapping[int, Table], method: str) -> str:
    """Which corruptions are off to the same side at every level."""
    found = []
    for column in next(iter(levels.values())).shifted:
        gaps = [_gap(each, method, column) for each in levels.values()]
        if all(_is_beyond(each, method, column) for each in levels.values()) and (min(gaps) > 0 or max(gaps) < 0):
            found.append(f"{column_title(column)} ({signed(min(gaps))} to {signed(max(gaps))})")
    return f"{PAPER_NAMES[method]} outside at every level and to the same side: {', '.join(found) or 'none'}."


def _gap(one: Table, method: str, column: str) -> float:
    """Ours minus the paper's, both as printed."""
    return round(round(one.rows[method][column].error, 1) - round(paper_value(one, method, column), 1), 1)


def _is_beyond(one: Table, method: str, column: str) -> bool:
    """Whether the paper's value lies outside the 95% interval of ours."""
    low, high = one.rows[method][column].interval
    return not low <= paper_value(one, method, column) <= high


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)
