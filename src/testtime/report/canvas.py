"""Figures with matplotlib, without its global state: SVG for pages, SVG or PNG for files.

A drawing is a function that draws a figure in given tones. On a page (`inline`) text and lines use the page's colours
and font, and so follow its light and dark style; in a file they are drawn on white with text as outlines, identical
everywhere. The palette is colour-blind safe, and each method has the same colour in every figure. Values shown on hover
are transparent areas above a page's figure, which `hover.js` also makes available to touch and the keyboard.
"""

from __future__ import annotations

import html
import io
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from testtime.storage import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "plain": "#4a5260",
    "fixed": "#8b929c",
    "episodic": "#e08e0b",
    "online": "#1a7fc4",
    "uda": "#c76fa0",
    "alp": "#159a74",
}
_REACH = 7.0  # points around a value in which it is shown
_OTHERS = ("#7a5bb5", "#8f7a1c", "#b8434e", "#3f8f9b", "#6a6f2f")


class Tones(NamedTuple):
    """Colours of a figure that follow its background.

    Attributes:
        ink: Text and markers.
        rule: Axes and grids.
        paper: Background.
    """

    ink: str
    rule: str
    paper: str


_ON_WHITE = Tones("#1c2733", "#d5dae0", "#ffffff")
_PLACEHOLDERS = Tones("#010203", "#040506", "#070809")  # replaced by the page's colours in the SVG


def colour_of(method: str, methods: tuple[str, ...] = ()) -> str:
    """Return a method's colour; unknown methods get one by their position in `methods`."""
    if method in COLOURS:
        return COLOURS[method]
    others = [name for name in methods if name not in COLOURS]
    return _OTHERS[others.index(method) % len(_OTHERS) if method in others else 0]


class _Area(NamedTuple):
    """An area of axes that shows a text on hover, in data coordinates; None: up to the edges of the axes."""

    axes: Axes
    text: str
    x: tuple[float, float]
    y: tuple[float, float] | None

    def find_corners(self) -> Any:
        """Return two opposite corners as fractions of the figure, `(2, 2)`; call after the layout."""
        figure: Any = self.axes.figure
        corners = list(zip(self.x, self.y or self.axes.get_ylim(), strict=True))
        return figure.transFigure.inverted().transform(self.axes.transData.transform(corners))


_areas: ContextVar[list[_Area]] = ContextVar("areas of the figure that is being drawn")


def hover(axes: Axes, text: str, x: float | tuple[float, float], y: float | tuple[float, float] | None = None) -> None:
    """Show a text when the pointer is on a point or an area of a page's figure.

    Args:
        axes: The axes.
        text: The text.
        x: A value, or the edges of an area.
        y: A value, or the edges of an area; None: the height of the axes.
    """
    across, up = x if isinstance(x, tuple) else (x, x), y if isinstance(y, tuple) or y is None else (y, y)
    _areas.get([]).append(_Area(axes, text, across, up))


def hover_along(axes: Axes, seen: np.ndarray, texts: list[str], most: int = 40) -> None:
    """Show a text on hover at each of at most `most` positions along the horizontal axis, at any height."""
    chosen = np.unique(np.linspace(0, len(seen) - 1, min(most, len(seen))).round().astype(int)).tolist()
    places = [float(seen[at]) for at in chosen]
    middles = [(one + two) / 2 for one, two in itertools.pairwise(places)]
    edges = [places[0], *middles, places[-1]]
    for at, left, right in zip(chosen, edges, edges[1:], strict=False):
        hover(axes, texts[at], (left, right))


@dataclass(frozen=True)
class Drawing:
    """A figure to be rendered.

    Attributes:
        name: File name, and prefix of the SVG ids, which are unique on a page; letters, digits and dashes.
        title: Alternative text.
        size: Width and height in inches.
        draw: Draws the figure.
    """

    name: str
    title: str
    size: tuple[float, float]
    draw: Callable[[Figure, Tones], None]

    def svg(self, inline: bool = True) -> str:
        """Render the figure as SVG."""
        out = io.StringIO()
        areas = self._save(out, _PLACEHOLDERS if inline else _ON_WHITE, inline, format="svg")
        svg = out.getvalue()
        return self._fit_page(svg[svg.index("<svg") :], self._format_areas(areas)) if inline else svg

    def png(self, dpi: int = 200) -> bytes:
        """Render the figure as PNG."""
        out = io.BytesIO()
        self._save(out, _ON_WHITE, False, format="png", dpi=dpi)
        return out.getvalue()

    def _save(self, out: Any, tones: Tones, inline: bool, **options: Any) -> list[_Area]:
        """Draw and save the figure; returns its areas for `hover`."""
        import matplotlib
        from matplotlib.figure import Figure

        style: Any = {
            "svg.fonttype": "none" if inline else "path",
            "svg.hashsalt": f"testtime {self.name}",  # reproducible ids
            "font.size": 11,
            "text.color": tones.ink,
            "axes.labelcolor": tones.ink,
            "axes.edgecolor": tones.rule,
            "axes.facecolor": "none",
            "figure.facecolor": tones.paper,
            "xtick.color": tones.ink,
            "ytick.color": tones.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "grid.color": tones.rule,
            "grid.linewidth": 0.7,
            "legend.frameon": False,
            "axes.unicode_minus": False,
            "text.parse_math": False,  # a name may contain a dollar sign
        }
        metadata = {"Date": None, "Creator": None} if options["format"] == "svg" else {"Software": None}
        with matplotlib.rc_context(style), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a name may be too long, or lack glyphs
            figure = Figure(figsize=self.size, layout="constrained")
            areas: list[_Area] = []
            token = _areas.set(areas)
            try:
                self.draw(figure, tones)
            finally:
                _areas.reset(token)
            for axes in figure.axes:
                axes.tick_params(color=tones.rule, labelsize=10)
            figure.savefig(out, transparent=inline, metadata=metadata, **options)
        return areas

    def _format_areas(self, areas: Sequence[_Area]) -> str:
        """Return the areas of `hover` as SVG; the points of values reach a little around them."""
        width, height = (72 * inches for inches in self.size)
        parts: list[str] = []
        for area in areas:
            (left, bottom), (right, top) = area.find_corners()
            (left, right), (top, bottom) = (
                _widen(width * left, width * right),
                _widen(height - height * top, height - height * bottom),
            )
            parts.append(
                f'<rect class="hit" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{bottom - top:.1f}"><title>{html.escape(printable(area.text))}</title></rect>'
            )
        return f'<g class="hits">{"".join(parts)}</g>' if parts else ""

    def _fit_page(self, svg: str, areas: str) -> str:
        svg = svg.replace(_PLACEHOLDERS.ink, "currentColor").replace(_PLACEHOLDERS.rule, "var(--rule)")
        svg = svg.replace(_PLACEHOLDERS.paper, "var(--paper)").replace(COLOURS["plain"], "var(--plain)")
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{self.name}-", svg)
        svg = re.sub(r"font: ((?:bold |\d+ )*)([\d.]+px) [^;\"]*", _own_font, svg)
        opening, rest = svg.split(">", 1)
        opening = re.sub(r' (?:width|height)="[^"]*"', "", opening)  # set by the page
        rest = rest.replace("</svg>", f"{areas}</svg>")
        return f'{opening} role="img" aria-label="{html.escape(self.title)}">{rest}'


def _widen(one: float, other: float) -> tuple[float, float]:
    low, high = min(one, other), max(one, other)
    return (low - _REACH, high + _REACH) if high - low < 2 else (low, high)


def _own_font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1].strip()}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}"
