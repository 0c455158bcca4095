"""The page of runs: one self-contained HTML file.

All numbers come from the results; the template `run.html` has the text around them, and `style.css` is shared by all
pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from testtime.evaluation import Run, Unit
from testtime.report.canvas import Drawing, colour_of
from testtime.report.pages import open_template
from testtime.report.paper import PAPER_NAMES, Measure
from testtime.report.results import (
    BASELINE,
    MEAN,
    SIGNIFICANT,
    Cell,
    Results,
    Table,
    column_title,
    method_title,
)
from testtime.report.run_tables import difference, explain
from testtime.report.samples import SetLookup, pick_samples
from testtime.report.statistics import ROUNDS

_ABOUT = {
    "plain": "trained on class labels only",
    "fixed": "the network as trained",
    "episodic": "learns from each image, then resets",
    "online": "learns from each image, without resetting",
    "uda": "also trained on the unlabelled test set",
    "alp": "trained on adversarial images",
}
_CAPTIONS = {  # in the order of the page
    "gradual": "In a sliding window along the stream, as the noise increases.",
    "bars": "Thin lines are 95% intervals over images.",
    "streams": "In a sliding window along the stream; both methods on the same images in the same order.",
    "levels": "The mean over the shifts; thin lines are 95% intervals.",
    "cost": "Time as measured in the runs, on the hardware below; thin lines are 95% intervals.",
    "flips": "Against fixed, on the same images.",
}
_ORDER = tuple(_CAPTIONS)


def render_run_page(
    results: Results,
    drawings: Sequence[tuple[str, Table, Drawing]],
    *,
    measure: Measure = "error",
    paper: bool = False,
    lookup: SetLookup | None = None,
    sections: Sequence[tuple[str, Sequence[str]]] = (),
    seed: int = 0,
    command: str = "",
) -> str:
    """Render the page as HTML.

    Args:
        results: The results.
        drawings: The figures, from `draw_all`.
        measure: Error or accuracy.
        paper: Whether to include the paper's numbers.
        lookup: Opens the test sets, for sample images.
        sections: Sections at the beginning, each a title and paragraphs.
        seed: The seed of the intervals, to record.
        command: The command line, to record.
    """
    from markupsafe import Markup

    samples, samples_note = pick_samples(results, results.tables[0], lookup)
    notes = [*results.notes, *_paper_notes(results, paper)]
    parts = [
        {
            "table": table,
            **_lay_out(table, measure, paper),
            "figures": [
                {
                    "svg": Markup(drawing.svg()),
                    "caption": _caption(kind, table, measure, paper),
                    "whole": kind in ("bars", "streams", "gradual"),
                }
                for kind, owner, drawing in sorted(drawings, key=lambda entry: _ORDER.index(entry[0]))
                if owner is table
            ],
        }
        for table in results.tables
    ]
    # The first figure of the first table is shown above the fold.
    first = parts[0]["figures"].pop(0) if parts[0]["figures"] else None
    return open_template("run.html").render(
        first=first,
        words=format_summary(results, measure),
        sections=sections,
        cards=_cards(results, measure, paper),
        explained=explain(results, measure),
        measure=measure,
        parts=parts,
        samples=samples,
        samples_note=samples_note,
        runs=[{"name": run.path.name, "facts": list(describe_run(run))} for run in results.runs],
        command=command,
        rounds=ROUNDS,
        seed=seed,
        notes=notes,
    )


def format_summary(results: Results, measure: Measure) -> dict[str, str]:
    """Summarise the results in words: title, kicker, headline and first paragraph."""
    table = results.tables[0]
    column = MEAN if MEAN in table.columns else table.columns[-1]
    rows = {method: row[column] for method, row in table.rows.items() if column in row}
    first = next(iter(next(iter(table.rows.values())).values()))
    repetitions = f", {first.repetitions} repetitions" if first.repetitions > 1 else ""
    counts = sorted({cell.images for row in table.rows.values() for name, cell in row.items() if name != MEAN})
    images = (
        f"{counts[0]:,} images in each set" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} images in a set"
    )
    kicker = f"{table.title} · {images}{repetitions}"
    where = f"on {len(table.shifted)} shifts" if column == MEAN else f"on {column_title(column)}"
    learner = next((name for name in ("online", "episodic") if name in rows), None)
    words = {"title": f"Test-Time Training on {table.family or table.title}", "kicker": kicker}
    if learner is None or BASELINE not in rows:
        best = min(rows, key=lambda method: rows[method].error, default=None)
        if best is None:
            return words | {"headline": f"Results {where}", "lead": "Not every set is finished yet."}
        text = f"{method_title(best)} has {measure} {rows[best].value(measure):.1f}% {where}"
        return words | {"headline": text, "lead": "There is no method to compare it with yet."}
    base, cell = rows[BASELINE], rows[learner]
    old, new = f"{base.value(measure):.1f}%", f"{cell.value(measure):.1f}%"
    verbs = {"error": ("cut", "raised"), "accuracy": ("raised", "lowered")}[measure]
    if cell.significance:
        verb = verbs[0] if cell.significance == "*" else verbs[1]
        headline = f"Learning at test time {verb} the {measure} {where} from {old} to {new}"
    else:
        headline = f"Learning at test time made no significant difference {where}: {measure} {old} before, {new} after"
    return words | {"headline": headline, "lead": _lead(table, learner, base, cell)}


def _lead(table: Table, learner: str, base: Cell, cell: Cell) -> str:
    change = round(base.error, 1) - round(cell.error, 1)  # as the two are printed
    share = f": {100 * change / base.error:.0f}% fewer mistakes" if base.error and change > 0 else ""
    side = "below" if change >= 0 else "above"
    parts = [f"The error with {learner} is {abs(change):.1f} points {side} that of the fixed network{share}."]
    marks = [table.rows[learner][column].significance for column in table.shifted if column in table.rows[learner]]
    if len(marks) > 1:
        counted = {"better": marks.count("*"), "worse": marks.count("†")}
        counts = " and ".join(f"{word} on {number}" for word, number in counted.items() if number)
        if counts:
            rest = "; on the others the difference is not significant" if marks.count("") else ""
            parts.append(f"Of the {len(marks)} sets it is {counts} (p < {SIGNIFICANT}){rest}.")
        else:
            parts.append(f"On none of the {len(marks)} sets is the difference significant.")
    clean = [table.rows[method].get("original") for method in (BASELINE, learner)]
    if clean[0] is not None and clean[1] is not None:
        moved = clean[1].error - clean[0].error
        words = (
            "is unchanged" if abs(moved) < 0.05 else f"{'rises' if moved > 0 else 'falls'} by {abs(moved):.1f} points"
        )
        parts.append(f"On the original test set the error {words}.")
    return " ".join(parts)


def _cards(results: Results, measure: Measure, paper: bool) -> list[dict[str, str]]:
    table = results.tables[0]
    column = MEAN if MEAN in table.columns else table.columns[-1]
    cards = []
    for method, row in table.rows.items():
        if column not in row:
            continue
        known = table.paper_value(method, column, measure) if paper else None
        cards.append(
            {
                "title": method_title(method),
                "tone": colour_of(method, tuple(table.rows)) if method not in _ABOUT else f"var(--{method})",
                "value": f"{row[column].value(measure):.1f}",
                "half": f"{row[column].half_width:.1f}",
                "about": _ABOUT.get(method, ""),
                "ms": _milliseconds(results.seconds[method]),
                "paper": f"{known:.1f}" if known is not None else "",
            }
        )
    return cards


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds >= 0.001 else f"{1000 * seconds:.2g}"


def _lay_out(table: Table, measure: Measure, paper: bool) -> dict[str, Any]:
    """Return headings and rows of a table with sets as rows and methods as columns."""
    compared = _compared(table, measure) if paper else set()
    heads: list[dict[str, str]] = []
    for method in table.rows:
        heads.append({"name": method, "paper": PAPER_NAMES.get(method, "")})
        if method in compared:
            heads.append({"name": "paper", "paper": "diff."})
    rows = []
    for column in table.columns:
        cells: list[Mapping[str, Any]] = []
        for method, row in table.rows.items():
            cell = row.get(column)
            cells.append(_cell(cell, measure, table.is_best(method, column)) if cell else _EMPTY)
            if method in compared:
                known = table.paper_value(method, column, measure)
                if known is None:
                    cells.append(_EMPTY)
                    continue
                change = difference(cell.value(measure), known) if cell else ""
                cells.append({"kind": "theirs", "value": known, "text": f"{known:.1f}", "change": change})
        title = f"mean of {len(table.shifted)}" if column == MEAN else column_title(column)
        rows.append({"title": title, "cells": cells, "is_mean": column == MEAN})
    several = any(cell.spread is not None for row in table.rows.values() for cell in row.values())
    return {"heads": heads, "rows": rows, "dense": len(heads) * (1.4 if several else 1) > 8}


def _compared(table: Table, measure: Measure) -> set[str]:
    """Return the methods for which the paper has numbers."""
    return {
        method
        for method in table.rows
        if any(table.paper_value(method, column, measure) is not None for column in table.columns)
    }


_EMPTY: Mapping[str, Any] = {"kind": "theirs", "value": "", "text": "–", "change": ""}


def _cell(cell: Cell, measure: Measure, best: bool) -> dict[str, Any]:
    low, high = cell.ends(measure)
    words = [f"95% interval {low:.1f} to {high:.1f}", f"{cell.images:,} images"]
    if cell.p_value is not None:
        words += [f"{cell.to_right:,} became right, {cell.to_wrong:,} wrong", f"p = {cell.p_value:.2g}"]
    return {
        "kind": "ours",
        "value": round(cell.value(measure), 4),
        "text": f"{cell.value(measure):.1f}",
        "half": f"{cell.half_width:.1f}",
        "spread": f"{cell.spread:.1f}" if cell.spread is not None else "",
        "mark": cell.significance,
        "best": best,
        "words": "; ".join(words),
    }


def _caption(kind: str, table: Table, measure: Measure, paper: bool) -> str:
    shown = kind in ("bars", "levels") and paper and _compared(table, measure)
    return _CAPTIONS[kind] + (" Diamonds are the paper's values." if shown else "")


def _paper_notes(results: Results, paper: bool) -> list[str]:
    if not paper:
        return []
    return [
        f"The paper's {table.paper.title}: {table.paper.note}"
        for table in results.tables
        if table.paper is not None and table.paper.note and "alp" in table.rows
    ]


def describe_run(run: Run) -> list[tuple[str, str, bool]]:
    """Describe a run: title, text, and whether the text is code."""
    about, plan = run.about, run.configuration
    facts: list[tuple[str, str, bool]] = []
    if about.get("command"):
        facts.append(("Command", str(about["command"]), True))
    if isinstance(about.get("hardware"), Mapping):
        facts.append(("Hardware", ", ".join(f"{key} {value}" for key, value in about["hardware"].items()), False))
    if isinstance(about.get("versions"), Mapping):
        facts.append(("Versions", ", ".join(f"{key} {value}" for key, value in about["versions"].items()), False))
    seeds = sorted({unit.seed for unit in run.units})
    facts.append(("Seeds", ", ".join(map(str, seeds)), False))
    networks = plan.get("networks")
    for role, network in networks.items() if isinstance(networks, Mapping) else ():
        architecture = network.get("architecture") if isinstance(network, Mapping) else None
        text = _pairs(architecture) if isinstance(architecture, Mapping) else str(network)
        mark = network.get("fingerprint", "") if isinstance(network, Mapping) else ""
        label = f"one for each of {len(mark)} sets" if isinstance(mark, Mapping) else str(mark)[:12]
        facts.append((f"Network, {role}", f"{text}{f'; fingerprint {label}' if label else ''}", False))
    methods = plan.get("methods")
    for method, settings in methods.items() if isinstance(methods, Mapping) else ():
        if isinstance(settings, Mapping):
            inner = settings.get("settings")
            shown = {key: value for key, value in settings.items() if key != "settings"}
            facts.append((method, _pairs(shown | (dict(inner) if isinstance(inner, Mapping) else {})), False))
    facts += [(key.capitalize(), str(plan[key]), False) for key in ("shuffle", "limit") if plan.get(key)]
    seconds = sum(unit.seconds for unit in run.units)
    facts.append(
        ("Finished", f"{len(run.units):,} results (a method on a set with a seed), {seconds:,.0f} s in total", False)
    )
    remarks = about.get("remarks")
    if isinstance(remarks, Mapping):
        facts += [(str(title), str(text), False) for title, text in remarks.items()]
    for method in dict.fromkeys(unit.method for unit in run.units):
        text = _format_learning([unit for unit in run.units if unit.method == method])
        if text:
            facts.append((f"{method} learned", text, False))
    return facts


def _format_learning(units: Sequence[Unit]) -> str:
    """Describe how many images a method learned from; empty for one that does not learn."""
    counts = [unit.about.get("counts", {}) for unit in units]
    images, adapted, undone = (
        sum(count.get(key, 0) for count in counts) for key in ("images", "adapted", "rolled_back")
    )
    if not adapted and not undone:
        return ""
    text = f"from {adapted:,} of {images:,} images ({adapted / max(images, 1):.1%}); rolled back on {undone:,}"
    found = [unit.about["threshold"] for unit in units if "threshold" in unit.about]
    if found:
        text += f"; thresholds {min(found):.4g} to {max(found):.4g}, from all images of each set"
    return text


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None) or "default"
