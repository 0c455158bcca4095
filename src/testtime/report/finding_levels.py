"""The tables of errors in the document of results: the means of every level, each level, flips, arithmetic."""

from __future__ import annotations

from dataclasses import replace

from testtime.report.committed import PRECISIONS, Findings, by_level
from testtime.report.documents import bullets, link, table, wrap
from testtime.report.paper import PAPER_NAMES, Measure
from testtime.report.results import MEAN, ORIGINAL, Results, Table, column_title, method_title
from testtime.report.run_tables import explain, markdown


def tell_means(found: Findings) -> str:
    """The mean over the corruptions at every level, the paper's beside it."""
    levels, part = found.levels, by_level(found.part)
    heads = ["error in %, mean over the corruptions", "original", *(f"level {level}" for level in levels)]
    rows = []
    for method in (name for name in levels[5].rows if name != "episodic"):
        cells = [
            levels[5].rows[method].get(ORIGINAL),
            *(each.rows.get(method, {}).get(MEAN) for each in levels.values()),
        ]
        rows.append([method_title(method), *(f"{cell.error:.1f}" if cell else "" for cell in cells)])
        places = [(levels[5], ORIGINAL), *((each, MEAN) for each in levels.values())]
        known = [each.paper_value(method, column, "error") for each, column in places]
        if any(known):
            rows.append(["the paper's", *(f"{value:.1f}" if value else "" for value in known)])
    for method, title in (("fixed", "fixed (JT), TTT's images"), ("episodic", method_title("episodic"))):
        some = [f"{each.rows[method][MEAN].error:.1f} ‡" for each in part.values()]
        rows.append([title, _error(levels[5], method, ORIGINAL), *some, _error(levels[5], method, MEAN)])
    known = [paper_value(each, "episodic", MEAN) for each in levels.values()]
    rows.append(
        ["the paper's", f"{paper_value(levels[5], 'episodic', ORIGINAL):.1f}", *(f"{value:.1f}" for value in known)]
    )
    half = max(row[MEAN].half_width for each in levels.values() for row in each.rows.values() if MEAN in row)
    wide = max(row[MEAN].half_width for each in part.values() for row in each.rows.values())
    words = (
        f"{images_of(levels[5]):,} images of each set; ‡ the first {images_of(part[1]):,} of the shuffled order. The "
        f"95% intervals of the means over images are ±{half:.1f} or less, on ‡ ±{wide:.1f} or less. One network"
        f"{' of each kind' if found.more else ''}, one seed."
    )
    return f"{table(heads, rows)}\n\n{wrap(words)}"


def tell_level(found: Findings, level: int) -> str:
    """The table of one level, as the paper prints it, and under level 5 what its signs mean."""
    one = found.levels[level]
    shown = show_table(found.results, one)
    if level < 5:
        note = f"\n\n{wrap(one.paper.note)}" if one.paper is not None and one.paper.note and "alp" in one.rows else ""
        return f"### Level {level}\n\n{shown}{note}"
    return f"{shown}\n\n{bullets([text.replace('*', chr(92) + '*') for text in explain(found.results, 'error')])}"


def tell_part(found: Findings) -> str:
    """The standard version at the lower levels, on some of the images."""
    tables = by_level(found.part)
    return "\n\n".join(f"### Level {level}\n\n{show_table(found.part, tables[level])}" for level in (4, 3, 2, 1))


def tell_flips(found: Findings) -> str:
    """How many answers adaptation turned right and wrong at level 5."""
    top, texts = found.levels[5], []
    for method in ("episodic", "online"):
        cells = [top.rows[method][column] for column in top.shifted]
        right, wrong = sum(cell.to_right or 0 for cell in cells), sum(cell.to_wrong or 0 for cell in cells)
        texts.append(
            f"{PAPER_NAMES[method]} turns {right:,} wrong answers right and {wrong:,} right ones wrong, "
            f"{right / wrong:.1f} to 1"
        )
    count = sum(top.rows["fixed"][column].images for column in top.shifted)
    return wrap(f"Of the {count:,} answers at level 5, {'; '.join(texts)}.")


def tell_precisions(found: Findings) -> str:
    """The error of `online` in each arithmetic, on the same images."""
    tables = {name: results.tables[0] for name, results in found.precisions.items()}
    columns = tables["fp32"].columns
    rows = [
        [f"`{name}`", *(f"{shown.rows['online'][column].error:.1f}" for column in columns)]
        for name, shown in tables.items()
    ]
    exact = tables["fp32"].rows["online"]
    apart = max(
        abs(shown.rows["online"][column].error - exact[column].error) for shown in tables.values() for column in columns
    )
    links = ", ".join(link(PRECISIONS[name]) for name in tables)
    words = (
        f"TTT-Online at level 5 on the first {exact[columns[0]].images:,} images of the shuffled order; `fp32` on a "
        f"CPU, the others on the {found.results.runs[0].about['hardware']['device']}; {links}. The largest difference "
        f"from `fp32` is {apart:.2f} points."
    )
    return f"{table(['error in %', *(column_title(column) for column in columns)], rows)}\n\n{wrap(words)}"


def show_table(results: Results, one: Table, measure: Measure = "error") -> str:
    """A table as the paper prints it, the paper's values beside."""
    text = markdown(replace(results, tables=(one,)), measure, paper=True)
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def paper_value(one: Table, method: str, column: str) -> float:
    """The paper's error for a cell.

    Raises:
        ValueError: It has none.
    """
    value = one.paper_value(method, column, "error")
    if value is None:
        raise ValueError(f"The paper has no {column} of {method} at level {one.level}.")
    return value


def _error(one: Table, method: str, column: str) -> str:
    return f"{one.rows[method][column].error:.1f}"


def images_of(one: Table) -> int:
    """How many images of each shifted set a table is of."""
    return next(iter(one.rows.values()))[one.shifted[0]].images
