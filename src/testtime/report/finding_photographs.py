"""Photographs in the document of results: Imagenette under the corruptions of ImageNet-C at level 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from testtime.report.canvas import Drawing
from testtime.report.committed import Findings
from testtime.report.documents import points, table, wrap
from testtime.report.finding_levels import images_of, show_table
from testtime.report.finding_variants import tell_absence, tell_origin
from testtime.report.further import Part, compare
from testtime.report.paper import PAPER_NAMES, find_table
from testtime.report.results import MEAN, ORIGINAL, column_title
from testtime.report.run_figures import draw_streams

STREAMS = Path("docs/imagenette-streams.svg")


def tell_photographs(found: Findings) -> str:
    """Accuracies, and what adaptation gains beside what it gains in the paper."""
    shown = {name: found.parts.get(name) for name in ("photographs", "standard photographs")}
    texts = [tell_absence(name) if part is None else _show(part) for name, part in shown.items()]
    parts = [part for part in shown.values() if part is not None]
    if not parts:
        return "\n\n".join(texts)
    texts.append(
        wrap(
            "The paper's ImageNet-C has 1,000 classes, so its accuracies are not to be compared with these; what "
            "adaptation adds to JT may be:"
        )
    )
    texts.append(_tell_gains({method: part for part in parts for method in part.results.tables[0].rows}))
    if draw_photographs(parts[0]) is not None:
        texts.append(f"![Accuracy of JT and TTT-Online along the stream of photographs]({STREAMS.name})")
    return "\n\n".join([*texts, *(tell_origin(part) for part in parts)])


def _show(part: Part) -> str:
    """The accuracies of one part."""
    top = part.results.tables[0]
    shape = next(iter(part.runs[0].configuration["networks"].values()))["architecture"]
    words = (
        f"{images_of(top):,} photographs of {shape['classes']} classes in every column; "
        f"{shape['name'].replace('resnet', 'ResNet-')} with {shape['norm'].capitalize()} Normalization, which "
        f"sees {shape['size']}×{shape['size']} pixels."
    )
    return f"{show_table(part.results, replace(top, paper=None), 'accuracy')}\n\n{wrap(words)}"


def _tell_gains(parts: Mapping[str, Part]) -> str:
    """The accuracy above that of `fixed`, ours with its paired interval and the paper's; from the part of a method."""
    known = find_table("imagenet-c", 5)
    assert known is not None
    methods = [method for method in ("episodic", "online") if method in parts]
    top = parts[methods[0]].results.tables[0]
    rows = []
    for column in top.columns:
        names = [top.set_name(name) for name in (top.shifted if column == MEAN else (column,))]
        row = [column_title(column)]
        for method in methods:
            gap, ends = compare(parts[method].results, method, "fixed", names)
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
