"""The page of a comparison: one self-contained HTML file, from the template `comparison.html`."""

from __future__ import annotations

from collections.abc import Sequence

from testtime.report.canvas import Drawing
from testtime.report.comparison import Comparison, ProtocolResults
from testtime.report.comparison_figures import Kind
from testtime.report.comparison_tables import explain_comparison, make_overview, make_protocol_sheets
from testtime.report.pages import open_template
from testtime.report.results import BASELINE, method_title
from testtime.report.run_page import describe_run
from testtime.report.sheets import drop_repeated_notes
from testtime.report.statistics import ROUNDS

_CAPTIONS: dict[Kind, str] = {
    "overview": "Thin lines are 95% intervals over images.",
    "errors": "Thin lines are 95% intervals over images.",
    "cost": "Time as measured in the runs, on the device above; thin lines are 95% intervals.",
    "stream": "Error in consecutive blocks of images, mean over repetitions; vertical lines separate sets.",
    "ranks": "A dot for each order and seed; the line is their mean.",
}


def render_comparison_page(
    comparison: Comparison,
    drawings: Sequence[tuple[Kind, ProtocolResults | None, Drawing]],
    *,
    sections: Sequence[tuple[str, Sequence[str]]] = (),
    seed: int = 0,
    command: str = "",
) -> str:
    """Render the page as HTML.

    Args:
        comparison: The comparison.
        drawings: The figures, from `draw_comparison`.
        sections: Sections at the beginning, each a title and paragraphs.
        seed: The seed of the intervals, to record.
        command: The command line, to record.
    """
    from markupsafe import Markup

    owners = [None, *comparison.protocols] if len(comparison.protocols) > 1 else list(comparison.protocols)
    tables = [[make_overview(comparison)] if owner is None else make_protocol_sheets(owner) for owner in owners]
    parts = [
        {
            "sheets": list(zip(sheets, drop_repeated_notes(sheets), strict=True)),
            "figures": [
                {"svg": Markup(drawing.svg()), "caption": _CAPTIONS[kind], "whole": kind in ("overview", "stream")}
                for kind, one, drawing in drawings
                if one is owner
            ],
        }
        for owner, sheets in zip(owners, tables, strict=True)
    ]
    # The first figure is shown above the fold.
    first = next((part["figures"].pop(0) for part in parts if part["figures"]), None)
    return open_template("comparison.html").render(
        words=summarize(comparison),
        first=first,
        sections=sections,
        explained=explain_comparison(),
        parts=parts,
        runs=[{"name": run.path.name, "facts": describe_run(run)} for run in comparison.runs],
        command=command,
        rounds=ROUNDS,
        seed=seed,
        notes=comparison.notes,
    )


def summarize(comparison: Comparison) -> dict[str, str]:
    """Summarize a comparison in words: title, kicker, headline and first paragraph."""
    titles = [one.title for one in comparison.protocols]
    lines = [_describe_best(one) for one in comparison.protocols]
    count = len(comparison.methods)
    counted = f"{count} method{'' if count == 1 else 's'}"
    headline = f"{counted} under {len(titles)} protocols" if len(titles) > 1 else lines[0].removesuffix(".")
    return {
        "title": f"Methods under {', '.join(titles)}",
        "kicker": f"{counted} · {', '.join(titles)}",
        "headline": headline,
        "lead": " ".join(lines) if len(titles) > 1 else "",
    }


def _describe_best(results: ProtocolResults) -> str:
    best = min(results.scores, key=lambda method: results.scores[method].error)
    text = f"Under {results.title}, {method_title(best)} has the lowest error, {results.scores[best].error:.1f}%"
    base = results.scores.get(BASELINE)
    return text + (f" ({BASELINE}: {base.error:.1f}%)." if base is not None and best != BASELINE else ".")
