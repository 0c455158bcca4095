"""The figures of runs: those of the paper, and a few more.

Each function returns a `Drawing`, which can be rendered as SVG or PNG.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from testtime.report.axes import PAPER, draw_legend, scale_cost
from testtime.report.canvas import Drawing, Tones, colour_of, hover, hover_along
from testtime.report.paper import Measure
from testtime.report.results import (
    BASELINE,
    MEAN,
    Cell,
    Results,
    Table,
    column_title,
    method_title,
    order_methods,
)
from testtime.report.sources import stream_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.2
_POINTS = 240
_NAMED = 10  # columns whose whole titles fit
_BECAME_RIGHT, _BECAME_WRONG = "#0f8b8d", "#c8553d"  # not used by any method
_DASHES: Mapping[str, tuple[float, ...]] = {"plain": (1, 1.2), "episodic": (4, 1.5), "uda": (6, 1.5, 1, 1.5)}


class Curve(NamedTuple):
    """A value along a stream.

    Attributes:
        seen: Images seen, `(P,)`.
        percent: The value in percent, `(P,)`.
    """

    seen: np.ndarray
    percent: np.ndarray


def sliding_mean(values: np.ndarray, window: int, points: int = _POINTS) -> Curve:
    """Return the mean of the last `window` values in percent (fewer at the beginning), starting at a quarter window.

    Args:
        values: `(N,)`, in [0, 1].
        window: Size of the window.
        points: Approximate maximum number of points.
    """
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = max(1, min(window // 4, count))
    seen = np.arange(first, count + 1)
    if len(seen) > points:
        seen = np.unique(np.linspace(first, count, points).round().astype(int))
    begin = np.maximum(seen - window, 0)
    return Curve(seen, 100 * (sums[seen] - sums[begin]) / (seen - begin))


def choose_window(count: int) -> int:
    """Return a window of a twentieth of the stream, at least the paper's 100 images; smaller on short streams."""
    return max(1, min(count // 5, max(100, count // 20)))


def draw_bars(table: Table, measure: Measure = "error", paper: bool = False) -> Drawing:
    """Draw grouped bars of all methods and sets with 95% intervals, and the paper's values as diamonds."""
    methods = tuple(table.rows)
    width = 0.82 / len(methods)

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        shown = False
        for index, method in enumerate(methods):
            row = table.rows[method]
            places = [at for at, column in enumerate(table.columns) if column in row]
            cells = [row[table.columns[at]] for at in places]
            x = np.array(places) + (index - (len(methods) - 1) / 2) * width
            values = np.array([cell.value(measure) for cell in cells])
            ends = np.array([cell.ends(measure) for cell in cells]).reshape(-1, 2)
            axes.bar(x, values, width * 0.92, color=colour_of(method, methods), label=method_title(method))
            for middle, at, cell in zip(x, places, cells, strict=True):
                edges = (middle - width / 2, middle + width / 2)
                text = _format_cell(f"{column_title(table.columns[at])}, {method}", cell, measure)
                hover(axes, text, edges, (0, max(cell.value(measure), cell.ends(measure).high)))
            axes.vlines(x, ends[:, 0], ends[:, 1], color=tones.ink, linewidth=0.8)
            if paper:
                known = [table.paper_value(method, table.columns[at], measure) for at in places]
                pairs = [(at, value) for at, value in zip(x, known, strict=True) if value is not None]
                if pairs:
                    _diamonds(axes, tones, pairs, tones.ink, None if shown else PAPER)
                    shown = True
        names = _titles(table)
        long = max(map(len, names)) > 8
        axes.set_xticks(range(len(names)), names, rotation=30 if long else 60, ha="right", rotation_mode="anchor")
        for label, column in zip(axes.get_xticklabels(), table.columns, strict=True):
            if column == MEAN:
                label.set_fontweight("bold")
        if MEAN in table.columns:
            axes.axvline(len(names) - 1.5, color=tones.rule, linewidth=1)
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylim(0, min(axes.get_ylim()[1], 100))
        axes.set_ylabel(f"{measure} in %")
        axes.grid(axis="y")
        draw_legend(figure, axes)

    return Drawing(f"bars-{_slug(table)}", f"{table.title}: {measure} of each method", (_WIDTH, 3.6), draw)


def draw_streams(results: Results, table: Table, measure: Measure = "error") -> Drawing | None:
    """Draw the sliding-window error along the stream, `fixed` and `online`, one panel per set (paper, figure 2)."""
    columns = [column for column in table.columns if column != MEAN]
    curves = {column: found for column in columns if len(found := _stream_curves(results, table, column, measure)) == 2}
    if not curves:
        return None
    window = choose_window(_stream_length(results, table, next(iter(curves))))
    across = min(4, len(curves))
    titles = dict(zip(table.columns, _titles(table), strict=True))
    down = -(-len(curves) // across)

    def draw(figure: Figure, tones: Tones) -> None:
        grid = figure.subplots(down, across, sharex=True, squeeze=False)
        for axes, (column, found) in zip(grid.flat, curves.items(), strict=False):
            for method, curve in found.items():
                axes.plot(*curve, color=colour_of(method), linewidth=1.7, label=method_title(method))
            axes.set_title(titles[column], fontsize=11, loc="left", pad=3)
            axes.grid(axis="y")
            axes.locator_params(axis="y", nbins=3)
            axes.locator_params(axis="x", nbins=3, integer=True)
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 0), min(high, 100))
            _hover_curves(axes, found)
        _hide_rest(grid, len(curves), across)
        figure.supxlabel("images seen", fontsize=11)
        figure.supylabel(f"{measure} of the last {window} in %", fontsize=11)
        draw_legend(figure, grid[0, 0])

    title = f"{table.title}: {measure} along the stream"
    return Drawing(f"stream-{_slug(table)}", title, (_WIDTH, 1.25 * down + 1.0), draw)


def _stream_curves(results: Results, table: Table, column: str, measure: Measure) -> dict[str, Curve]:
    streams = stream_verdicts(results, table.set_name(column))
    window = choose_window(_stream_length(results, table, column))
    return {
        method: sliding_mean(right if measure == "accuracy" else 1 - right, window) for method, right in streams.items()
    }


def stream_verdicts(results: Results, name: str) -> dict[str, np.ndarray]:
    """Return whether `fixed` and `online` are right, `(N,)` in stream order, averaged over repetitions.

    The results of `fixed` do not depend on the order, so it may have been run in another one.
    """
    online = results.sources.get(("online", name), ())
    fixed = results.sources.get((BASELINE, name), ())
    streams = [stream for source in online if (stream := stream_of(source)) is not None]
    if not streams or not fixed or len(streams) < len(online):
        return {}
    verdicts = [source.unit.verdicts() for source in fixed]
    share, samples = np.mean([found.right for found in verdicts], 0), verdicts[0].samples
    places = [np.searchsorted(samples, stream) for stream in streams]
    after = [source.unit.verdicts().right[place] for source, place in zip(online, places, strict=True)]
    return {BASELINE: np.mean([share[place] for place in places], 0), "online": np.mean(after, 0)}


def draw_gradual(results: Results, table: Table, measure: Measure = "error") -> Drawing:
    """Draw the error of each method along a gradual shift, one panel per noise (paper, figure 3)."""
    columns = [column for column in table.columns if column != MEAN]
    methods = tuple(table.rows)
    window = max(1, _stream_length(results, table, columns[0]) // 10)

    def draw(figure: Figure, tones: Tones) -> None:
        grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)
        for axes, column in zip(grid.flat, columns, strict=True):
            curves: dict[str, Curve] = {}
            for method in methods:
                found = results.sources.get((method, table.set_name(column)), ())
                if not found:
                    continue
                right = np.mean([source.unit.verdicts().right for source in found], 0)
                curve = sliding_mean(right if measure == "accuracy" else 1 - right, window)
                dashes = _DASHES.get(method, ())
                curves[method] = curve
                (line,) = axes.plot(*curve, color=colour_of(method, methods), linewidth=1.9, label=method_title(method))
                if dashes:
                    line.set_dashes(dashes)
            axes.set_title(column_title(column), fontsize=11, loc="left", pad=3)
            axes.grid(axis="y")
            axes.locator_params(axis="x", nbins=3, integer=True)
            _hover_curves(axes, curves)
        grid[0, 0].set_ylim(0, min(grid[0, 0].get_ylim()[1], 100))
        grid[0, 0].set_ylabel(f"{measure} of the last {window} in %")
        figure.supxlabel("images seen, noise growing from level 1 to level 5", fontsize=11)
        draw_legend(figure, grid[0, 0])

    return Drawing(f"gradual-{_slug(table)}", f"{table.title}: {measure} along it", (_WIDTH, 2.9), draw)


def draw_flips(table: Table) -> Drawing | None:
    """Draw how many images became right and wrong relative to `fixed`, per set and method."""
    columns = [column for column in table.columns if column != MEAN]
    methods = [
        method
        for method, row in table.rows.items()
        if method not in (BASELINE, "plain") and any(row[column].to_right is not None for column in row)
    ][:3]
    if not methods:
        return None

    def draw(figure: Figure, tones: Tones) -> None:
        grid = figure.subplots(1, len(methods), sharey=True, sharex=True, squeeze=False)
        for axes, method in zip(grid.flat, methods, strict=True):
            row = table.rows[method]
            for at, column in enumerate(columns):
                cell = row.get(column)
                if cell is None or cell.to_right is None or cell.to_wrong is None:
                    continue
                axes.barh(at, cell.to_right, 0.72, color=_BECAME_RIGHT, label="wrong → right" if at == 0 else "")
                axes.barh(at, -cell.to_wrong, 0.72, color=_BECAME_WRONG, label="right → wrong" if at == 0 else "")
                text = f"{column_title(column)}, {method}: {cell.to_right:,} became right, {cell.to_wrong:,} wrong"
                hover(axes, text, (-cell.to_wrong, cell.to_right), (at - 0.4, at + 0.4))
            axes.axvline(0, color=tones.ink, linewidth=0.8)
            axes.set_title(method_title(method), fontsize=11, loc="left", pad=3)
            axes.grid(axis="x")
            axes.locator_params(axis="x", nbins=4, integer=True)
            axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
            axes.tick_params(axis="y", length=0)
        grid[0, 0].set_yticks(range(len(columns)), [column_title(column) for column in columns])
        grid[0, 0].set_ylim(len(columns) - 0.4, -0.6)
        figure.supxlabel(f"images whose verdict differs from {BASELINE}'s", fontsize=11)
        draw_legend(figure, grid[0, 0])

    title = f"{table.title}: images that became right and wrong"
    width = min(_WIDTH, 1.6 + 1.9 * len(methods))
    return Drawing(f"flips-{_slug(table)}", title, (width, 0.24 * len(columns) + 1.3), draw)


def draw_levels(tables: Sequence[Table], measure: Measure = "error", paper: bool = False) -> Drawing:
    """Draw the mean over the shifts at each level, one line per method; the paper's as diamonds."""
    tables = sorted(tables, key=lambda table: table.level or 0)
    methods = order_methods({method for table in tables for method, row in table.rows.items() if MEAN in row})

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for method in methods:
            own = [table for table in tables if MEAN in table.rows.get(method, {})]
            levels = [table.level or 0 for table in own]
            cells = [table.rows[method][MEAN] for table in own]
            ends = [cell.ends(measure) for cell in cells]
            colour = colour_of(method, methods)
            axes.vlines(levels, [end.low for end in ends], [end.high for end in ends], color=colour, linewidth=1.6)
            values = [cell.value(measure) for cell in cells]
            (line,) = axes.plot(levels, values, "o-", color=colour, linewidth=1.9, label=method_title(method))
            line.set_dashes(_DASHES.get(method, (None, None)))
            for level, cell in zip(levels, cells, strict=True):
                hover(axes, _format_cell(f"level {level}, {method}", cell, measure), level, cell.value(measure))
            known = [(table.level or 0, table.paper_value(method, MEAN, measure)) for table in own] if paper else []
            pairs = [(level, value) for level, value in known if value is not None]
            if pairs:
                _diamonds(axes, tones, pairs, colour)
        axes.set_xticks([table.level or 0 for table in tables])
        axes.set_ylim(0, min(axes.get_ylim()[1], 100))
        axes.set_xlabel("level")
        axes.set_ylabel(f"mean {measure} in %")
        axes.grid(axis="y")
        draw_legend(figure, axes)

    title = f"{tables[0].family}: mean {measure} at every level"
    return Drawing(f"levels-{_slug(tables[0])}", title, (5.4, 3.4), draw)


def draw_cost(results: Results, table: Table, measure: Measure = "error") -> Drawing:
    """Draw error against time per image, one point per method."""
    column = MEAN if MEAN in table.columns else table.columns[-1]
    methods = tuple(method for method, row in table.rows.items() if column in row and results.seconds[method] > 0)

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        for method in methods:
            cell, cost = table.rows[method][column], 1000 * results.seconds[method]
            low, high = cell.ends(measure)
            axes.vlines(cost, low, high, color=colour_of(method, methods), linewidth=1.6)
            axes.plot(cost, cell.value(measure), marker="o", markersize=9, color=colour_of(method, methods))
            text = _format_cell(method, cell, measure)
            hover(axes, f"{text}, {cost:.3g} ms per image", cost, cell.value(measure))
            axes.annotate(
                method_title(method),
                (cost, cell.value(measure)),
                xytext=(8, 5),
                textcoords="offset points",
                fontsize=10,
                color=tones.ink,
            )
        axes.margins(x=0.35, y=0.2)
        scale_cost(axes)
        name = "mean of the shifts" if column == MEAN else column_title(column)
        axes.set_ylabel(f"{measure} in %, {name}")

    return Drawing(f"cost-{_slug(table)}", f"{table.title}: {measure} against time", (5.4, 3.4), draw)


def draw_all(results: Results, measure: Measure = "error", paper: bool = False) -> Iterator[tuple[str, Table, Drawing]]:
    """Yield all figures that the results allow, with their kind and table."""
    families: set[str] = set()
    for table in results.tables:
        if table.family.endswith("-gradual"):
            yield "gradual", table, draw_gradual(results, table, measure)
        yield "bars", table, draw_bars(table, measure, paper)
        if table.family in families or table.family.endswith("-gradual") or not _has_sets(results, table):
            continue
        families.add(table.family)  # only for the highest level
        levels = [other for other in results.tables if other.family == table.family]
        if len(levels) > 1:
            yield "levels", table, draw_levels(levels, measure, paper)
        for kind, drawing in (("streams", draw_streams(results, table, measure)), ("flips", draw_flips(table))):
            if drawing is not None:
                yield kind, table, drawing
    yield "cost", results.tables[0], draw_cost(results, results.tables[0], measure)


def _titles(table: Table) -> list[str]:
    """Return the columns' titles, abbreviated if there are many."""
    return table.short_titles() if len(table.columns) > _NAMED else [column_title(column) for column in table.columns]


def _format_cell(name: str, cell: Cell, measure: Measure) -> str:
    low, high = cell.ends(measure)
    return f"{name}: {cell.value(measure):.1f}% (95% interval {low:.1f} to {high:.1f})"


def _hover_curves(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Show the values of all curves at a position; they have the same positions."""
    seen = next(iter(curves.values())).seen
    texts = [
        f"after {count:,} images: "
        + ", ".join(f"{method} {curve.percent[at]:.1f}%" for method, curve in curves.items())
        for at, count in enumerate(seen)
    ]
    hover_along(axes, seen, texts)


def _has_sets(results: Results, table: Table) -> bool:
    """Whether the columns are shifts of one set, rather than independent sets or classes."""
    names = {name for _, name in results.sources}
    return table.family != "" and all(table.set_name(column) in names for column in table.shifted)


def _stream_length(results: Results, table: Table, column: str) -> int:
    return next(row[column].images for row in table.rows.values() if column in row)


def _slug(table: Table) -> str:
    """Return a table's name in letters, digits and dashes, for file names and SVG ids."""
    name = table.family or "sets"
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    if plain != name.replace(".", "-") or len(plain) > 60:
        plain = f"{plain[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return plain if table.level is None else f"{plain}-{table.level}"


def _hide_rest(grid: np.ndarray, count: int, across: int) -> None:
    for index in range(count, grid.size):
        grid.flat[index].set_visible(False)
        if index >= across:
            grid.flat[index - across].tick_params(labelbottom=True)


def _diamonds(
    axes: Axes, tones: Tones, pairs: Sequence[tuple[float, float]], colour: str, label: str | None = None
) -> None:
    """Draw the paper's values."""
    axes.plot(
        [at for at, _ in pairs],
        [value for _, value in pairs],
        linestyle="none",
        marker="D",
        markersize=4,
        markerfacecolor=tones.paper,
        markeredgecolor=colour,
        markeredgewidth=0.9,
        zorder=4,
        label=label,
    )
