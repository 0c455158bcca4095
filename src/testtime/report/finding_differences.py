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
    for method in ("fixed", "online"):
        gaps = [_gap(each, method, MEAN) for each in levels.values()]
        out = [f"level {level}" for level, each in levels.items() if _is_beyond(each, method, MEAN)]
        texts.append(
            f"{PAPER_NAMES[method]}, mean over the corruptions: {signed(min(gaps))} to {signed(max(gaps))} from the "
            f"paper's over the levels; outside: {', '.join(out) or 'none'}."
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
    texts += [_tell_beyond(levels[5], method) for method in levels[5].rows]
    texts += [_tell_constant(levels, method) for method in ("fixed", "online")]
    return bullets(texts)


def _tell_beyond(one: Table, method: str) -> str:
    columns = [ORIGINAL, *one.shifted]
    out = {column: _gap(one, method, column) for column in columns if _is_beyond(one, method, column)}
    lists = []
    for sign, word in ((1, "higher"), (-1, "lower")):
        ordered = sorted((column for column in out if sign * out[column] > 0), key=lambda column: -abs(out[column]))
        if ordered:
            lists.append(f"{word} on {', '.join(f'{column_title(each)} ({signed(out[each])})' for each in ordered)}")
    return (
        f"{PAPER_NAMES[method]} at level {one.level}: outside on {len(out)} of {len(columns)} sets; {'; '.join(lists)}."
    )


def _tell_constant(levels: Mapping[int, Table], method: str) -> str:
    """Which corruptions are off to the same side at every level."""
    found = []
    for column in levels[5].shifted:
        gaps = [_gap(each, method, column) for each in levels.values()]
        if all(_is_beyond(each, method, column) for each in levels.values()) and (min(gaps) > 0 or max(gaps) < 0):
            found.append(f"{column_title(column)} ({signed(min(gaps))} to {signed(max(gaps))})")
    return f"{PAPER_NAMES[method]} outside at all five levels and to the same side: {', '.join(found) or 'none'}."


def _gap(one: Table, method: str, column: str) -> float:
    """Ours minus the paper's, both as printed."""
    return round(round(one.rows[method][column].error, 1) - round(paper_value(one, method, column), 1), 1)


def _is_beyond(one: Table, method: str, column: str) -> bool:
    """Whether the paper's value lies outside the 95% interval of ours."""
    low, high = one.rows[method][column].interval
    return not low <= paper_value(one, method, column) <= high


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)
