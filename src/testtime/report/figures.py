"""Figures as SVG text, drawn by matplotlib without its global state.

The colours are told apart by people who do not see red and green alike; each mode keeps its own in every figure. For a
page (`inline`) letters and lines take the page's own ink and font, so that they follow its light and dark style; for a
file they are drawn on white with letters as outlines, the same everywhere.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"fixed": "#8b929c", "episodic": "#e08e0b", "online": "#1a7fc4"}
_INK, _RULE = "#010203", "#040506"  # stand for the page's own colours until the SVG is text
_ON_WHITE = {_INK: "#1c2733", _RULE: "#d5dae0"}


def draw_bars(results: Mapping[str, Any], inline: bool = True) -> str:
    """The error of each mode on each set, as horizontal bars in groups."""
    modes = list(COLOURS)
    titles = [entry["title"] for entry in results["sets"]] + ["mean of the shifts"]
    summary = results["summary"]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        height = 0.27
        for place, mode in enumerate(modes):
            values = [entry["modes"][mode]["error"] for entry in results["sets"]] + [summary[mode]["mean"]]
            heights = [row + (place - 1) * height for row in range(len(titles))]
            bars = axes.barh(heights, values, height * 0.9, color=COLOURS[mode], label=mode)
            axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=2, fontsize=8.5, color=_INK)
        axes.set_yticks(range(len(titles)), titles)
        axes.get_yticklabels()[-1].set_fontweight("bold")
        axes.axhline(len(titles) - 1.5, color=_RULE, linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("wrong predictions in %")
        axes.margins(x=0.1, y=0.01)
        axes.grid(axis="x", color=_RULE, linewidth=0.7)
        axes.tick_params(axis="y", length=0)
        figure.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside upper left", frameon=False)

    return _svg(draw, (5.6, 0.58 * len(titles) + 0.9), inline, "bars")


def draw_streams(results: Mapping[str, Any], window: int = 100, inline: bool = True, columns: int = 3) -> str:
    """The error over the last images along each shift's stream, `fixed` against `online`, one small panel a shift."""
    shifts = results["sets"][1:]
    panels = -(-len(shifts) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(panels, columns, sharex=True, sharey=True, squeeze=False)
        for axes, entry in zip(grid.flat, shifts, strict=False):
            for mode in ("fixed", "online"):
                curve = window_error(entry["modes"][mode]["stream"], window)
                axes.plot(*curve, color=COLOURS[mode], linewidth=2.2, label=mode)
            axes.set_title(entry["title"], fontsize=11, loc="left")
            axes.grid(axis="y", color=_RULE, linewidth=0.7)
        grid[0, 0].set_ylim(0)  # after all curves: the panels share it
        for place in range(len(shifts), panels * columns):
            grid.flat[place].set_visible(False)
            if place >= columns:
                grid.flat[place - columns].tick_params(labelbottom=True)
        figure.supxlabel("images seen", fontsize=11)
        figure.supylabel(f"wrong of the last {window}, in %", fontsize=11)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), ncols=2, loc="outside upper left", frameon=False)

    return _svg(draw, (2.4 * columns, 1.75 * panels + 0.8), inline, "streams")


def window_error(stream: str, window: int) -> tuple[list[int], list[float]]:
    """Percent wrong among the last images of a stream of `+` (right) and `-` (wrong), from a quarter window on.

    Returns:
        Images seen, and the error there.
    """
    seen = list(range(max(1, min(window // 4, len(stream))), len(stream) + 1))
    shares = []
    for count in seen:
        last = stream[max(0, count - window) : count]
        shares.append(100 * last.count("-") / len(last))
    return seen, shares


def _svg(draw: Any, size: tuple[float, float], inline: bool, salt: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none" if inline else "path",
        "svg.hashsalt": f"testtime {salt}",  # else the same figure has other names in it each time
        "font.size": 11,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _RULE,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            _quiet(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=inline, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    if not inline:
        for stand_in, colour in _ON_WHITE.items():
            svg = svg.replace(stand_in, colour)
        return svg
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{salt}-", svg)  # names must differ between the figures of a page
    svg = re.sub(r"font: ((?:bold |\d+ )*)([\d.]+px) [^;\"]*", _own_font, svg)
    return re.sub(r'<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)


def _own_font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1].strip()}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}"


def _quiet(axes: Axes) -> None:
    axes.tick_params(color=_RULE, labelsize=10)


def picture_png(pixels: bytes, side: int, scale: int = 4) -> bytes:
    """A gray picture of side×side bytes as a PNG, each pixel a square of `scale`."""
    from PIL import Image

    picture = Image.frombytes("L", (side, side), pixels).resize((side * scale, side * scale), Image.Resampling.NEAREST)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


def stream_mean(results: Mapping[str, Any], mode: str, part: slice) -> float:
    """Percent wrong in a part of the streams of a mode, over all shifts."""
    pieces: Sequence[str] = [entry["modes"][mode]["stream"][part] for entry in results["sets"][1:]]
    joined = "".join(pieces)
    return 100 * joined.count("-") / len(joined)
