"""The figures of the documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from testtime.report.canvas import Drawing
from testtime.report.correlation import Joined, draw_correlation
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import ORIGINAL, Results, Table
from testtime.report.run_figures import (
    draw_bars,
    draw_flips,
    draw_gradual,
    draw_levels,
    draw_streams,
)

from .result_files import by_level

STREAMED = (
    *("gaussian_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("fog", "brightness", "elastic_transform", "pixelate"),
)
"""The corruptions whose streams are drawn: two of each kind."""


def draw_main(results: Results) -> dict[str, Drawing | None]:
    """The figures of CIFAR-10-C by file name."""
    levels = by_level(results)
    top = levels[5]
    return {
        "cifar10-level-5": draw_bars(_only(top, "plain", "fixed", "episodic", "online"), paper=True),
        "cifar10-levels": draw_levels(
            [_only(each, "plain", "fixed", "online", "alp") for each in levels.values()], paper=True
        ),
        "cifar10-flips": draw_flips(_only(top, "fixed", "episodic", "online")),
        "cifar10-streams": draw_streams(results, replace(top, columns=STREAMED)),
    }


def draw_others(gradual: Results, photographs: Results, demo: Results) -> dict[str, Drawing | None]:
    """The figures of other sets by file name; of the photographs the original set and every third corruption."""
    top = photographs.tables[0]
    return {
        "cifar10-gradual": draw_gradual(gradual, gradual.tables[0]),
        "imagenette-streams": draw_streams(photographs, replace(top, columns=(ORIGINAL, *top.shifted[::3]))),
        "demo": draw_bars(demo.tables[0]),
    }


def draw_gradients(joined: Mapping[str, Joined]) -> dict[str, Drawing]:
    """The inner product of the two gradients against the improvement, by file name."""
    return {
        f"cifar10-gradients-{method}": draw_correlation(
            one.values["batch.inner"],
            one.improvements[method],
            name=f"gradients-{method}",
            title=f"inner product of the two gradients against the improvement of {method}",
            x_label="inner product of the two gradients",
            y_label=f"improvement of {PAPER_NAMES[method]}, points",
            colour=method,
        )
        for method, one in joined.items()
    }


def _only(one: Table, *methods: str) -> Table:
    return replace(one, rows={name: one.rows[name] for name in methods if name in one.rows})
