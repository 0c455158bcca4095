"""Figures with matplotlib, without its global state: SVG for pages, SVG or PNG for files.

A drawing is a function that draws a figure in given tones. On a page (`inline`) text and lines use the page's colours
and font, and so follow its light and dark style; in a file they are drawn on white with text as outlines, identical
everywhere. The palette is colour-blind safe, and each method has the same colour in every figure.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from testtime.storage import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "plain": "#4a5260",
    "fixed": "#8b929c",
    "episodic": "#e08e0b",
    "online": "#1a7fc4",
    "uda": "#c76fa0",
    "alp": "#159a74",
}
_HOVER = "hover-"
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
        self._save(out, _PLACEHOLDERS if inline else _ON_WHITE, inline, format="svg")
        svg = out.getvalue()
        return self._fit_page(svg[svg.index("<svg") :]) if inline else svg

    def png(self, dpi: int = 200) -> bytes:
        """Render the figure as PNG."""
        out = io.BytesIO()
        self._save(out, _ON_WHITE, False, format="png", dpi=dpi)
        return out.getvalue()

    def _save(self, out: Any, tones: Tones, inline: bool, **options: Any) -> None:
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
            self.draw(figure, tones)
            for axes in figure.axes:
                axes.tick_params(color=tones.rule, labelsize=10)
            figure.savefig(out, transparent=inline, metadata=metadata, **options)

    def _fit_page(self, svg: str) -> str:
        svg = svg.replace(_PLACEHOLDERS.ink, "currentColor").replace(_PLACEHOLDERS.rule, "var(--rule)")
        svg = svg.replace(_PLACEHOLDERS.paper, "var(--paper)").replace(COLOURS["plain"], "var(--plain)")
        svg = _add_hovers(svg)
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{self.name}-", svg)
        svg = re.sub(r"font: ((?:bold |\d+ )*)([\d.]+px) [^;\"]*", _own_font, svg)
        opening, rest = svg.split(">", 1)
        opening = re.sub(r' (?:width|height)="[^"]*"', "", opening)  # set by the page
        return f'{opening} role="img" aria-label="{html.escape(self.title)}">{rest}'


def _add_hovers(svg: str) -> str:
    """Turn the ids made by `hover` into titles, which browsers show on hover."""

    def replace(found: re.Match[str]) -> str:
        text = bytes.fromhex(found[1]).decode()
        return f"<g><title>{html.escape(printable(text))}</title>"

    return re.sub(rf'<g id="{_HOVER}([0-9a-f]+)-\d+">', replace, svg)


def hover(artist: Any, text: str, number: int) -> None:
    """Show a text when the pointer is on an artist of a page's figure.

    Args:
        artist: The artist.
        text: The text.
        number: Distinguishes artists with the same text.
    """
    artist.set_gid(f"{_HOVER}{text.encode(errors='backslashreplace').hex()}-{number}")


def _own_font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1].strip()}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}"
