"""Axes and legends that several figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "the paper's"
"""Label of the paper's values, the last of a legend."""


def scale_cost(axes: Axes) -> None:
    """Make the horizontal axis one of milliseconds, logarithmic, and end the vertical one at 0 and 100."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("milliseconds per image")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 100))
    axes.grid(which="major")


def draw_legend(figure: Figure, axes: Axes) -> None:
    """Draw the legend of the axes above the figure, the paper's values last."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index] == PAPER)  # last
    figure.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        ncols=min(5 if figure.get_figwidth() > 6 else 2, len(labels)),
        loc="outside upper left",
        fontsize=10,
        handlelength=1.5,
        columnspacing=1.2,
        handletextpad=0.5,
    )
