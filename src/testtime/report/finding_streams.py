"""What learning along the stream does, in the document of results."""

from __future__ import annotations

from testtime.report.committed import Findings, by_level
from testtime.report.documents import signed, table, wrap
from testtime.report.finding_levels import paper_value
from testtime.report.results import ORIGINAL, column_title


def tell_losses(found: Findings) -> str:
    """Where learning along the stream does harm, here and in the paper."""
    levels = found.levels
    rows, places, worse = [], [(levels[1], ORIGINAL)], []
    places += [(each, column) for each in levels.values() for column in each.shifted]
    above = 0
    for each, column in places:
        base, cell = each.rows["fixed"][column], each.rows["online"][column]
        theirs = paper_value(each, "online", column) - paper_value(each, "fixed", column)
        above += round(theirs, 1) > 0
        if cell.error <= base.error:
            continue
        title = "original" if column == ORIGINAL else f"{column_title(column)} {each.level}"
        worse += [title] if cell.mark else []
        gain = f"{cell.error - base.error:+.2f}{cell.mark}"
        rows.append([title, f"{base.error:.2f}", f"{cell.error:.2f}", gain, signed(theirs)])
    rows.sort(key=lambda row: -float(row[3].rstrip("†")))
    words = (
        f"On {len(rows)} of {len(places)} sets TTT-Online's error is above JT's, in the paper on {above}; with † as in "
        f"the tables on {len(worse)} of them{': ' if worse else ''}{', '.join(worse)}."
    )
    harm = [
        f"{column_title(column)} {each.level}"
        for results in (found.results, found.part)
        for each in by_level(results).values()
        if "episodic" in each.rows
        for column in each.columns
        if each.rows["episodic"][column].error > each.rows["fixed"][column].error
    ]
    words += f" TTT's error is above JT's on {', '.join(harm) if harm else 'no set'}."
    heads = ["set and level", "JT", "TTT-Online", "difference", "the paper's difference"]
    return f"{wrap(words)}\n\n{table(heads, rows)}"
