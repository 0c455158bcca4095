"""Diagnoses as a page of their own, and as a section of a run's page.

Both are made of the JSON document that `testtime diagnose` writes, and of nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testtime.report.canvas import Drawing, Tones, colour_of
from testtime.storage import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TONES = {"helps": "online", "little to gain": "fixed", "unclear": "fixed"}  # the others warn
_WARNING = "#b3541e"


class DiagnosisError(ValueError):
    """A file that holds no diagnoses; the message says why."""


def read_diagnoses(path: str | Path) -> dict[str, Any]:
    """The document that `testtime diagnose` wrote.

    Raises:
        DiagnosisError: It is not there, or no such document.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DiagnosisError(f"{path}: {error.strerror or 'cannot be read'}.") from None
    except ValueError as error:
        raise DiagnosisError(f"{path}: no document of diagnoses ({error}).") from None
    entries = found.get("diagnoses") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not entries:
        raise DiagnosisError(f"{path}: no document of diagnoses.")
    for entry in entries:
        verdict = entry.get("verdict") if isinstance(entry, dict) else None
        if not isinstance(verdict, dict) or not isinstance(entry.get("facts"), dict):
            raise DiagnosisError(f"{path}: no document of diagnoses.")
    return found


def as_sections(document: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """A title and paragraphs for each diagnosis, as a run's page takes them."""
    return [
        (f"Diagnosis of {entry['name']}", [entry["verdict"]["headline"], " ".join(entry["verdict"]["reasons"])])
        for entry in document["diagnoses"]
    ]


def write_page(document: Mapping[str, Any], out: str | Path) -> Path:
    """Write `diagnosis.json` and `index.html` into a folder, each whole or not at all; gives the page's path."""
    folder = Path(out)
    page = render_page(document)
    write_whole(folder / "diagnosis.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_whole(folder / "index.html", page)
    return folder / "index.html"


def render_page(document: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    entries = document["diagnoses"]
    drawing = draw_agreement(entries)
    layers = [draw_layers(entry, place) for place, entry in enumerate(entries)]
    return environment.get_template("diagnosis.html").render(
        document=document,
        entries=list(zip(entries, [None if one is None else Markup(one.svg()) for one in layers], strict=True)),
        agreement=None if drawing is None else Markup(drawing.svg()),
        headline=_headline(entries),
    )


def _headline(entries: Sequence[Mapping[str, Any]]) -> str:
    if len(entries) == 1:
        return entries[0]["verdict"]["headline"]
    helps = sum(entry["verdict"]["kind"] == "helps" for entry in entries)
    return f"Adaptation is likely to help on {helps or 'none'} of {len(entries)} sets"


def draw_agreement(entries: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """The cosine of the two gradients on each set with its 95% interval; None for a single set or none with one."""
    known = [entry for entry in entries if entry["agreement"] is not None]
    if len(known) < 2:
        return None

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for place, entry in enumerate(known):
            kind, own = entry["verdict"]["kind"], entry["agreement"]
            colour = colour_of(_TONES[kind]) if kind in _TONES else _WARNING
            half = 2 * (own["cosine_error"] or 0)
            axes.hlines(place, own["cosine"] - half, own["cosine"] + half, color=colour, linewidth=1.8)
            axes.plot(own["cosine"], place, marker="o", markersize=7, color=colour)
        axes.axvline(0, color=tones.ink, linewidth=0.8)
        axes.set_yticks(range(len(known)), [f"{entry['name']}: {entry['verdict']['kind']}" for entry in known])
        axes.set_ylim(len(known) - 0.4, -0.6)
        axes.set_xlabel("cosine of the two tasks' gradients, predictions in place of labels")
        axes.grid(axis="x")

    return Drawing("agreement", "agreement of the two gradients by set", (7.2, 0.32 * len(known) + 1.0), draw)


def draw_layers(entry: Mapping[str, Any], place: int = 0) -> Drawing | None:
    """The cosine of the two gradients on each layer of the encoder; None where it was not measured."""
    own = entry["agreement"]
    if own is None:
        return None
    names = list(own["layers"])

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        cosines = [own["layers"][name]["cosine"] for name in names]
        axes.bar(range(len(names)), cosines, 0.7, color=colour_of("online"))
        axes.axhline(0, color=tones.ink, linewidth=0.8)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_ylabel("cosine")
        axes.grid(axis="y")

    return Drawing(f"layers-{place}", f"{entry['name']}: agreement by layer of the encoder", (7.2, 2.6), draw)
