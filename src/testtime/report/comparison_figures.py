"""The figures of a comparison: error under each protocol, against cost and along the stream, and ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from testtime.report.axes import draw_legend, scale_cost
from testtime.report.canvas import Drawing, Tones, colour_of, hover, hover_along
from testtime.report.comparison import Comparison, ProtocolResults, StreamCurves
from testtime.report.results import method_title
from testtime.report.scores import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["overview", "errors", "cost", "stream", "ranks"]

_WIDTH = 7.2
_PANELS = 3
_DASHES = ("solid", "dashed", "dotted", "dashdot")  # for methods that share a colour
_MARKERS = ("o", "s", "^", "D")
_LABELLED = 20  # segments


def draw_comparison(comparison: Comparison) -> Iterator[tuple[Kind, ProtocolResults | None, Drawing]]:
    """Yield all figures, with their kind and protocol."""
    if len(comparison.protocols) > 1:
        yield "overview", None, draw_overview(comparison)
    for one in comparison.protocols:
        if len(comparison.protocols) == 1:
            yield "errors", one, draw_errors(one, comparison.methods)
        yield "cost", one, draw_protocol_cost(one, comparison.methods)
        if len(one.repetitions) > 1 and len(one.scores) > 1:
            yield "ranks", one, draw_ranks(one, comparison.methods)
        if one.curves:
            yield "stream", one, draw_along(one, comparison.methods)


def draw_overview(comparison: Comparison) -> Drawing:
    """Draw the error of each method under each protocol, with 95% intervals."""
    methods, protocols = comparison.methods, comparison.protocols

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for index, method in enumerate(methods):
            at = [k for k, one in enumerate(protocols) if method in one.scores]
            scores = [protocols[k].scores[method] for k in at]
            x = np.array(at) + 0.5 * ((index + 0.5) / len(methods) - 0.5)
            colour, _ = _style(method, methods)
            axes.vlines(x, [one.interval.low for one in scores], [one.interval.high for one in scores], color=colour)
            axes.plot(x, [one.error for one in scores], "o", color=colour, label=method_title(method))
            for where, k, score in zip(x, at, scores, strict=True):
                hover(axes, f"{protocols[k].title}, {_format_score(method, score)}", where, score.error)
        names = [one.title for one in protocols]
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylim(0, min(axes.get_ylim()[1], 100))
        axes.set_ylabel("error in %")
        axes.grid(axis="y")
        draw_legend(figure, axes)

    return Drawing("protocols", "error of each method under each protocol", (_WIDTH, 3.8), draw)


def draw_errors(results: ProtocolResults, methods: tuple[str, ...]) -> Drawing:
    """Draw the error of each method with its 95% interval, the lowest first."""
    names = sorted(results.scores, key=lambda method: results.scores[method].error)

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for at, method in enumerate(names):
            score, (colour, _) = results.scores[method], _style(method, methods)
            axes.hlines(at, *score.interval, color=colour, linewidth=1.8)
            axes.plot(score.error, at, "o", color=colour, markersize=8)
            hover(axes, _format_score(method, score), (score.interval.low, score.interval.high), (at - 0.4, at + 0.4))
        axes.set_yticks(range(len(names)), [method_title(method) for method in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, min(axes.get_xlim()[1], 100))
        axes.set_xlabel("error in %")
        axes.grid(axis="x")

    size = 5.4, 0.3 * len(names) + 0.8
    return Drawing(f"errors-{_slug(results)}", f"{results.title}: error of each method", size, draw)


def draw_protocol_cost(results: ProtocolResults, methods: tuple[str, ...]) -> Drawing:
    """Draw error against time per image, one point per method."""

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for method, score in results.scores.items():
            colour, dashes = _style(method, methods)
            cost = max(score.milliseconds, 1e-6)
            axes.vlines(cost, *score.interval, color=colour, linewidth=1.6)
            mark: dict[str, Any] = {
                "marker": _MARKERS[_DASHES.index(dashes)],
                "linestyle": "none",
                "label": method_title(method),
            }
            axes.plot(cost, score.error, markersize=8, color=colour, **mark)
            hover(axes, f"{_format_score(method, score)}, {cost:.3g} ms per image", cost, score.error)
        axes.margins(x=0.1, y=0.2)
        scale_cost(axes)
        axes.set_ylabel("error in %")
        draw_legend(figure, axes)

    return Drawing(f"cost-{_slug(results)}", f"{results.title}: error against time", (5.4, 3.4), draw)


def draw_along(results: ProtocolResults, methods: tuple[str, ...]) -> Drawing:
    """Draw the error in blocks along the first streams, with the boundaries of the segments."""
    curves = results.curves[:_PANELS]

    def draw(figure: Figure, tones: Tones) -> None:
        grid = figure.subplots(len(curves), 1, squeeze=False, sharey=True)
        for axes, one in zip(grid.flat, curves, strict=True):
            for method, percent in one.percent.items():
                colour, dashes = _style(method, methods)
                title = method_title(method)
                axes.plot(one.seen, percent, color=colour, linestyle=dashes, linewidth=1.5, label=title)
            _draw_segments(axes, one, tones)
            axes.set_title(one.name, fontsize=11, loc="left", pad=3)
            axes.set_xlim(0, one.seen[-1])
            axes.set_ylim(0, min(axes.get_ylim()[1], 100))
            axes.set_ylabel("error in %")
            axes.grid(axis="y")
            shown = [
                ", ".join(f"{name} {values[at]:.1f}%" for name, values in one.percent.items())
                for at in range(len(one.seen))
            ]
            hover_along(
                axes, one.seen, [f"up to image {seen:,}: {text}" for seen, text in zip(one.seen, shown, strict=True)]
            )
        figure.supxlabel("images seen", fontsize=11)
        draw_legend(figure, grid[0, 0])

    size = _WIDTH, 2.4 * len(curves) + 0.9
    return Drawing(f"along-{_slug(results)}", f"{results.title}: error along the stream", size, draw)


def _draw_segments(axes: Axes, curves: StreamCurves, tones: Tones) -> None:
    end = 0
    for name, count in curves.segments:
        if end:
            axes.axvline(end, color=tones.ink, linewidth=0.5, alpha=0.5)
        if len(curves.segments) <= _LABELLED:
            text = name.partition("/")[2].replace("_", " ") or name
            where = axes.get_xaxis_transform()
            axes.text(end + count / 2, 0.98, text, transform=where, rotation=90, fontsize=7, ha="center", va="top")
        end += count


def draw_ranks(results: ProtocolResults, methods: tuple[str, ...]) -> Drawing:
    """Draw the rank of each method in each repetition, and their mean."""
    keys = results.repetitions
    names = sorted(results.scores, key=lambda method: results.scores[method].rank or 0)

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for at, method in enumerate(names):
            colour, _ = _style(method, methods)
            ranks = [results.rank_in(method, key) for key in keys]
            axes.plot(ranks, at + 0.5 * (np.linspace(0, 1, len(ranks)) - 0.5), "o", color=colour, markersize=4)
            axes.plot(np.mean(ranks), at, "|", color=tones.ink, markersize=18, markeredgewidth=1.6)
            text = f"{method}: rank {np.mean(ranks):.1f} on average, {min(ranks):g} to {max(ranks):g} in {len(ranks)}"
            hover(axes, text, (0.6, len(names) + 0.4), (at - 0.5, at + 0.5))
        axes.set_yticks(range(len(names)), [method_title(method) for method in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0.6, len(names) + 0.4)
        axes.set_xlabel("rank by error")
        axes.grid(axis="x")

    size = 5.4, 0.34 * len(names) + 1.0
    return Drawing(f"ranks-{_slug(results)}", f"{results.title}: ranks over orders and seeds", size, draw)


def _format_score(method: str, score: Score) -> str:
    low, high = score.interval
    return f"{method}: {score.error:.1f}% (95% interval {low:.1f} to {high:.1f})"


def _style(method: str, methods: tuple[str, ...]) -> tuple[str, str]:
    """Return the colour and line style of a method."""
    colour = colour_of(method, methods)
    alike = [one for one in methods if colour_of(one, methods) == colour]
    return colour, _DASHES[alike.index(method) % len(_DASHES)]


def _slug(results: ProtocolResults) -> str:
    """Return a protocol's title in letters, digits and dashes, for file names and SVG ids."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", results.title).strip("-")
    return f"{plain[:40]}-{hashlib.sha256(results.title.encode()).hexdigest()[:8]}" if "." in results.title else plain
