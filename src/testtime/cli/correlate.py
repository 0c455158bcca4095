"""`testtime correlate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from testtime.cli.console import echo
from testtime.cli.options import Runs

StudyFile = Annotated[Path, Argument(help="Output of testtime gradients.", show_default=False)]
Out = Annotated[Path, Option(help="Folder for the figures and data.")]
Seed = Annotated[int, Option(help="Seed of the confidence intervals.")]


def correlate(study: StudyFile, runs: Runs, out: Out = Path("correlation"), seed: Seed = 0) -> None:
    """Correlate gradient correlation with the improvement in error (paper, figure 4).

    OUT/correlation.json has all points and fits; the figures are SVG and PNG.

    Example:
      testtime correlate gradients.json runs/cifar-c --out correlation
    """
    from testtime.report import require
    from testtime.report.correlation import format_correlations, join, publish

    require()
    joined = join(study, runs, seed)
    publish(joined, out)
    echo(*format_correlations(joined).split("\n"), f"{out}: written")
