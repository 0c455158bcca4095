"""Tables of a demo's results: as text for the terminal, as Markdown for the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODES = ("fixed", "episodic", "online")


def rows(results: Mapping[str, Any]) -> list[tuple[str, list[float]]]:
    """Title and percent error of each mode for the clean set, every shift, and the mean of the shifts."""
    found = [(entry["title"], [entry["modes"][mode]["error"] for mode in MODES]) for entry in results["sets"]]
    return [*found, ("mean of the shifts", [results["summary"][mode]["mean"] for mode in MODES])]


def text_table(results: Mapping[str, Any]) -> str:
    """Errors in percent and milliseconds for an image, in columns."""
    lines = [f"{'error in %':20}" + "".join(f"{mode:>10}" for mode in MODES)]
    lines += [f"{title:20}" + "".join(f"{value:10.1f}" for value in values) for title, values in rows(results)]
    lines.append(f"{'ms for an image':20}" + "".join(f"{results['summary'][mode]['ms']:10.1f}" for mode in MODES))
    return "\n".join(lines)


def markdown_table(results: Mapping[str, Any]) -> str:
    """The same for a README, the mean in bold."""
    lines = ["| error in % | " + " | ".join(f"`{mode}`" for mode in MODES) + " |", "|---|" + "---:|" * len(MODES)]
    for title, values in rows(results):
        bold = "**" if title.startswith("mean") else ""
        cells = " | ".join(f"{bold}{value:.1f}{bold}" for value in values)
        lines.append(f"| {bold}{title}{bold} | {cells} |")
    lines.append("| ms for an image | " + " | ".join(f"{results['summary'][mode]['ms']:.1f}" for mode in MODES) + " |")
    return "\n".join(lines)
