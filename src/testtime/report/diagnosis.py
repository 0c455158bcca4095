"""Diagnoses as a page, and as sections of a run's page.

Both are generated from the JSON document written by `testtime diagnose`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testtime.checks import (
    Kind,
    check_entries,
    check_table,
    is_list_of,
    is_number,
    is_table,
    is_table_of,
    is_text,
)
from testtime.report.axes import draw_legend
from testtime.report.canvas import Drawing, Tones, colour_of, hover
from testtime.report.pages import open_template
from testtime.storage import FileError, printable, read_json, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TONES = {"helps": "online", "little to gain": "fixed", "unclear": "fixed"}  # the others warn
_WARNING = "#b3541e"


class DiagnosisError(FileError):
    """A file that is not a document of diagnoses."""


_TEXT: Kind = ("a string", is_text)
_TEXTS: Kind = ("a table of strings", is_table_of(is_text))
_DOCUMENT: dict[str, Kind] = {
    "network": _TEXT,
    "command": _TEXT,
    "versions": ("a table", is_table),
    "hardware": ("a table", is_table),
    "diagnoses": ("a non-empty list of tables", lambda value: is_list_of(is_table)(value) and bool(value)),
}
_ENTRY: dict[str, Kind] = {
    "name": _TEXT,
    "verdict": ("a table", is_table),
    "facts": _TEXTS,
    "agreement": ("a table or null", lambda value: value is None or is_table(value)),
}
_TEXT_LIST: Kind = ("strings", is_list_of(is_text))
_VERDICT: dict[str, Kind] = {"kind": _TEXT, "headline": _TEXT, "reasons": _TEXT_LIST}
_LATER: dict[str, Kind] = {"plain": _TEXT_LIST, "advice": _TEXT}  # documents of version 0.1 do not have them
_TASK: dict[str, Kind] = {  # nor these
    "task_error": ("a table of numbers", is_table_of(is_number)),
    "reference": ("a table or null", lambda value: value is None or is_table(value)),
    "chance": ("a number", is_number),
}
_AGREEMENT: dict[str, Kind] = {
    "cosine": ("a number", is_number),
    "cosine_error": ("a number or null", lambda value: value is None or is_number(value)),
    "layers": ("tables with a cosine", is_table_of(lambda value: is_table(value) and is_number(value.get("cosine")))),
}


def read_diagnoses(path: str | Path) -> dict[str, Any]:
    """The document that `testtime diagnose` wrote, given its path or that of its folder.

    Raises:
        DiagnosisError: It is not there, or no such document.
    """
    if Path(path).is_dir():
        path = Path(path) / "diagnosis.json"
    try:
        found = read_json(path, 1 << 26)
        check_table(found)
        check_entries(found, _DOCUMENT, ["diagnoses"])
        for entry in found["diagnoses"]:
            check_entries(entry, _ENTRY, list(_ENTRY))
            check_entries(entry["verdict"], _VERDICT, list(_VERDICT))
            check_entries(entry | entry["verdict"], _LATER | _TASK)
            if entry["agreement"] is not None:
                check_entries(entry["agreement"], _AGREEMENT, list(_AGREEMENT))
    except FileError as error:
        raise DiagnosisError(path, error.fault) from None
    except ValueError as error:
        fault = f"not a document of diagnoses ({str(error).removesuffix('.')})"
        raise DiagnosisError(path, fault, "write one with testtime diagnose --out") from None
    return found


def as_sections(document: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return a title and paragraphs for each diagnosis, for a run's page."""
    return [
        (f"Diagnosis of {entry['name']}", [entry["verdict"]["headline"], " ".join(_list_facts(entry)), *_advise(entry)])
        for entry in document["diagnoses"]
    ]


def _list_facts(entry: Mapping[str, Any]) -> list[str]:
    return list(entry.get("plain") or entry["verdict"]["reasons"])[:3]


def _advise(entry: Mapping[str, Any]) -> list[str]:
    advice = entry["verdict"].get("advice")
    return [f"Next: {advice}"] if advice else []


def write_page(document: Mapping[str, Any], out: str | Path) -> Path:
    """Write `diagnosis.json` and `index.html` into a folder atomically; returns the page's path."""
    folder = Path(out)
    page = render_page(document)
    write_atomic(folder / "diagnosis.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_atomic(folder / "index.html", page.encode(errors="backslashreplace"))
    return folder / "index.html"


def render_page(document: Mapping[str, Any]) -> str:
    """Render the page as HTML."""
    from markupsafe import Markup

    entries = document["diagnoses"]
    drawing, task = draw_agreement(entries), draw_task(entries)
    layers = [draw_layers(entry, index) for index, entry in enumerate(entries)]
    return open_template("diagnosis.html").render(
        document=document,
        entries=[
            {
                **entry,
                "plain": _list_facts(entry),
                "advice": " ".join(_advise(entry)),
                "layers": None if drawing is None else Markup(drawing.svg()),
            }
            for entry, drawing in zip(entries, layers, strict=True)
        ],
        task=None if task is None else Markup(task.svg()),
        agreement=None if drawing is None else Markup(drawing.svg()),
        headline=_headline(entries),
    )


def _headline(entries: Sequence[Mapping[str, Any]]) -> str:
    if len(entries) == 1:
        return entries[0]["verdict"]["headline"]
    helps = sum(entry["verdict"]["kind"] == "helps" for entry in entries)
    return f"Adaptation is likely to help on {helps or 'none'} of {len(entries)} sets"


def draw_task(entries: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Draw the error of the task on each set, with its 95% interval, on the training images, and of guessing."""
    known = [entry for entry in entries if {"value", "error"} <= {*entry.get("task_error", ())} and "chance" in entry]
    if not known:
        return None

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for at, entry in enumerate(known):
            error, half = (100 * entry["task_error"][name] for name in ("value", "error"))
            marks = {"in training": (entry["reference"] or {}).get("task_error"), "guessing": entry["chance"]}
            low, high = max(error - 2 * half, 0), min(error + 2 * half, 100)
            axes.hlines(at, low, high, color=colour_of("online"), linewidth=2)
            axes.plot(error, at, "o", color=colour_of("online"), markersize=9, label="" if at else "these images")
            texts = [f"{entry['name']}: error {error:.1f}% (95% interval {low:.1f} to {high:.1f})"]
            for (name, value), colour in zip(marks.items(), (tones.ink, colour_of("fixed")), strict=True):
                if is_number(value):
                    line = {"color": colour, "markersize": 16, "markeredgewidth": 2, "linestyle": "none"}
                    axes.plot(100 * value, at, marker="|", label="" if at else name, **line)
                    texts.append(f"{name} {100 * value:.1f}%")
            hover(axes, ", ".join(texts), (0, 100), (at - 0.5, at + 0.5))
        axes.set_yticks(range(len(known)), [printable(entry["name"]) for entry in known])
        axes.set_ylim(len(known) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.set_xlabel("error of the task without labels, in %")
        axes.grid(axis="x")
        draw_legend(figure, axes)

    return Drawing("task", "error of the task without labels by set", (5.4, 0.34 * len(known) + 1.2), draw)


def draw_agreement(entries: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Draw the cosine of the two gradients per set, with its 95% interval; None for fewer than two sets."""
    known = [entry for entry in entries if entry["agreement"] is not None]
    if len(known) < 2:
        return None

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for index, entry in enumerate(known):
            kind, agreement = entry["verdict"]["kind"], entry["agreement"]
            colour = colour_of(_TONES[kind]) if kind in _TONES else _WARNING
            half = 2 * (agreement["cosine_error"] or 0)
            axes.hlines(index, agreement["cosine"] - half, agreement["cosine"] + half, color=colour, linewidth=1.8)
            axes.plot(agreement["cosine"], index, marker="o", markersize=7, color=colour)
            hover(axes, f"{entry['name']}: cosine {agreement['cosine']:+.2f} ± {half:.2f}", agreement["cosine"], index)
        axes.axvline(0, color=tones.ink, linewidth=0.8)
        axes.set_yticks(
            range(len(known)), [printable(f"{entry['name']}: {entry['verdict']['kind']}") for entry in known]
        )
        axes.set_ylim(len(known) - 0.4, -0.6)
        axes.set_xlabel("cosine of the two tasks' gradients, predictions as labels")
        axes.grid(axis="x")

    return Drawing("agreement", "agreement of the two gradients by set", (7.2, 0.32 * len(known) + 1.0), draw)


def draw_layers(entry: Mapping[str, Any], index: int = 0) -> Drawing | None:
    """Draw the cosine of the two gradients per layer of the encoder; None if it was not measured."""
    agreement = entry["agreement"]
    if agreement is None:
        return None
    names = list(agreement["layers"])

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        cosines = [agreement["layers"][name]["cosine"] for name in names]
        axes.bar(range(len(names)), cosines, 0.7, color=colour_of("online"))
        for at, (name, cosine) in enumerate(zip(names, cosines, strict=True)):
            hover(axes, f"{name}: cosine {cosine:+.2f}", (at - 0.5, at + 0.5))
        axes.axhline(0, color=tones.ink, linewidth=0.8)
        axes.set_xticks(
            range(len(names)), [printable(name) for name in names], rotation=60, ha="right", rotation_mode="anchor"
        )
        axes.set_ylabel("cosine")
        axes.grid(axis="y")

    title = f"{printable(entry['name'])}: agreement by layer of the encoder"
    return Drawing(f"layers-{index}", title, (7.2, 2.6), draw)
