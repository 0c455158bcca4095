"""The results on CIFAR-10 as a document, made from committed files: `python -m testtime.report.findings`.

Reads the files of `results/cifar10/` and writes the parts of `docs/results.md` between comments, and its figures. Files
that `testtime.report.further` names may be missing; their parts then say that they were not run yet. With `--check`
nothing is written; the exit code says whether the document is what the files say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from testtime.report.canvas import Drawing
from testtime.report.committed import Findings, read
from testtime.report.documents import update
from testtime.report.finding_choices import tell_best, tell_seeds
from testtime.report.finding_differences import tell_differences
from testtime.report.finding_gradients import tell_gradients, tell_stand_ins
from testtime.report.finding_levels import tell_flips, tell_level, tell_means, tell_part, tell_precisions
from testtime.report.finding_photographs import STREAMS as PHOTOGRAPHS
from testtime.report.finding_photographs import draw_photographs, tell_photographs
from testtime.report.finding_runs import tell_commands, tell_missing, tell_runs
from testtime.report.finding_streams import tell_harm, tell_losses, tell_thousands
from testtime.report.finding_trainings import tell_trainings
from testtime.report.finding_variants import (
    GRADUAL,
    tell_batch_norm,
    tell_costs,
    tell_gradual,
    tell_short,
    tell_steps,
)
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import Table
from testtime.report.run_figures import (
    draw_bars,
    draw_correlation,
    draw_flips,
    draw_gradual,
    draw_levels,
    draw_streams,
)
from testtime.report.sources import ResultsError
from testtime.storage import printable, write_whole

DOCUMENT = Path("docs/results.md")
BARS, LINES = Path("docs/cifar10-level-5.svg"), Path("docs/cifar10-levels.svg")
FLIPS, STREAMS = Path("docs/cifar10-flips.svg"), Path("docs/cifar10-streams.svg")
STREAMED = (
    *("gaussian_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("fog", "brightness", "elastic_transform", "pixelate"),
)
"""The corruptions whose streams are drawn: two of each kind."""


def tell_all(found: Findings) -> dict[str, str]:
    """The parts of the document by name."""
    return {
        "means": tell_means(found),
        "what was run": tell_runs(found),
        "commands": tell_commands(found),
        "trainings": tell_trainings(found),
        "level 5": tell_level(found, 5),
        "levels 1 to 4": "\n\n".join(tell_level(found, level) for level in (4, 3, 2, 1)),
        "the standard version at levels 1 to 4": tell_part(found),
        "differences": tell_differences(found),
        "online above fixed": tell_losses(found),
        "where the harm arises": tell_harm(found),
        "along the stream": tell_thousands(found),
        "flips": tell_flips(found),
        "arithmetic": tell_precisions(found),
        "gradients": tell_gradients(found),
        "gradients without labels": tell_stand_ins(found),
        "seeds": tell_seeds(found),
        "batch normalization": tell_batch_norm(found),
        "gradual shift": tell_gradual(found),
        "costs": tell_costs(found),
        "cheaper variants": tell_short(found),
        "steps and copies": tell_steps(found),
        "best": tell_best(found),
        "photographs": tell_photographs(found),
        "not measured yet": tell_missing(found),
    }


def draw_figures(found: Findings) -> dict[Path, Drawing]:
    """The figures by path.

    Raises:
        ResultsError: The streams of `fixed` and `online` at level 5 are not there.
    """
    levels, parts = found.levels, found.parts
    top = levels[5]
    flips = draw_flips(_only(top, "fixed", "episodic", "online"))
    streams = draw_streams(found.results, replace(top, columns=tuple(name for name in STREAMED if name in top.columns)))
    if flips is None or streams is None:
        raise ResultsError(found.results.runs[0].path, "there are no streams of fixed and online at level 5")
    figures = {
        BARS: draw_bars(_only(top, "plain", "fixed", "episodic", "online"), paper=True),
        LINES: draw_levels([_only(each, "plain", "fixed", "online", "alp") for each in levels.values()], paper=True),
        FLIPS: flips,
        STREAMS: streams,
    }
    for method, joined in found.gradients.items():
        figures[Path(f"docs/cifar10-gradients-{method}.svg")] = draw_correlation(
            joined.values["batch.inner"],
            joined.improvements[method],
            name=f"gradients-{method}",
            title=f"inner product of the two gradients against the improvement of {method}",
            x_label="inner product of the two gradients",
            y_label=f"improvement of {PAPER_NAMES[method]}, points",
            colour=method,
        )
    if "gradual" in parts:
        figures[GRADUAL] = draw_gradual(parts["gradual"].results, parts["gradual"].results.tables[0])
    if "photographs" in parts and (drawing := draw_photographs(parts["photographs"])) is not None:
        figures[PHOTOGRAPHS] = drawing
    return figures


def _only(one: Table, *methods: str) -> Table:
    """A table with some of its rows."""
    return replace(one, rows={name: one.rows[name] for name in methods if name in one.rows})


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the document and its figures in the checkout in the current folder; the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/results.md and its figures from the results files.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the document is not current"
    )
    options = parser.parse_args(arguments)
    try:
        found = read()
        drawn = {} if options.check else draw_figures(found)
        figures = {path: drawing.svg(inline=False) for path, drawing in drawn.items()}
        current = update({DOCUMENT: tell_all(found)}, options.check)
        for path, svg in figures.items():
            write_whole(path, svg)
    except (OSError, ValueError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return int(options.check and not current)


if __name__ == "__main__":
    sys.exit(main())
