"""Photographs in the document of results: Imagenette under the corruptions of ImageNet-C at level 5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from testtime.report.canvas import Drawing
from testtime.report.committed import Findings
from testtime.report.documents import points, table, wrap
from testtime.report.finding_levels import images_of, show_table
from testtime.report.finding_variants import tell_absence, tell_origin
from testtime.report.further import Part, compare
from testtime.report.paper import PAPER_NAMES, find_table
from testtime.report.results import MEAN, ORIGINAL, Table, column_title
from testtime.report.run_figures import draw_streams

STREAMS = Path("docs/imagenette-streams.svg")


def tell_photographs(found: Findings) -> str:
    """Accuracies, and what adaptation gains beside what it gains in the paper."""
    part = found.parts.get("photographs")
    if part is None:
        return tell_absence("photographs")
    top = part.results.tables[0]
    shape = next(iter(part.runs[0].configuration["networks"].values()))["architecture"]
    words = (
        f"{images_of(top):,} photographs of {shape['classes']} classes in every column; "
        f"{shape['name'].replace('resnet', 'ResNet-')} with {shape['norm'].capitalize()} Normalization, which "
        f"sees {shape['size']}×{shape['size']} pixels. The paper's ImageNet-C has 1,000 classes, so its accuracies are "
        "not to be compared with these; what adaptation adds to JT may be:"
    )
    shown = show_table(part.results, replace(top, paper=None), "accuracy")
    picture = f"![Accuracy of JT and TTT-Online along the stream of photographs]({STREAMS.name})\n\n"
    picture = "" if draw_photographs(part) is None else picture
    return f"{shown}\n\n{wrap(words)}\n\n{_tell_gains(part, top)}\n\n{picture}{tell_origin(part)}"


def _tell_gains(part: Part, top: Table) -> str:
    """The accuracy above that of `fixed`, ours with its paired interval and the paper's."""
    known = find_table("imagenet-c", 5)
    assert known is not None
    methods = [method for method in ("episodic", "online") if method in top.rows]
    rows = []
    for column in top.columns:
        names = [top.set_name(name) for name in (top.shifted if column == MEAN else (column,))]
        row = [column_title(column)]
        for method in methods:
            gap, ends = compare(part.results, method, "fixed", names)
            ours = [points(-gap), f"{points(-ends.high)} to {points(-ends.low)}"]
            both = [
                known.mean(one, top.shifted, "accuracy") if column == MEAN else known.value(one, column, "accuracy")
                for one in (method, "fixed")
            ]
            theirs = "" if both[0] is None or both[1] is None else points(both[0] - both[1])
            row += [*ours, theirs]
        rows.append(row)
    heads = ["accuracy minus that of JT, points"]
    for method in methods:
        heads += [PAPER_NAMES[method], "95%, paired", "the paper's"]
    return table(heads, rows)


def draw_photographs(part: Part) -> Drawing | None:
    """Accuracy in a sliding window, on the original set and every third corruption."""
    top = part.results.tables[0]
    original = (ORIGINAL,) if ORIGINAL in top.columns else ()
    return draw_streams(part.results, replace(top, columns=(*original, *top.shifted[::3])))
