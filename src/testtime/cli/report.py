"""`testtime report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from testtime.cli.console import as_bad_arguments, echo, format_command, progress
from testtime.cli.options import DataRoot, Runs

Out = Annotated[Path, Option(help="Folder of the report.")]
Formats = Annotated[str, Option("--format", help="Any of md, latex, csv, json and html; html includes the figures.")]
ShowAccuracy = Annotated[bool, Option("--accuracy", help="Show accuracies instead of errors.")]
ShowPaper = Annotated[bool, Option("--paper", help="Show the paper's numbers next to ours.")]
Seed = Annotated[int, Option(help="Seed of the confidence intervals.")]
DiagnosisFile = Annotated[
    Path | None, Option(help="Output of testtime diagnose to include in the page.", show_default=False)
]


def report(
    context: typer.Context,
    runs: Runs,
    out: Out = Path("report"),
    formats: Formats = "md,latex,csv,json,html",
    accuracy: ShowAccuracy = False,
    paper: ShowPaper = False,
    seed: Seed = 0,
    data_root: DataRoot = None,
    diagnosis: DiagnosisFile = None,
) -> None:
    """Generate tables, figures and a page from evaluation runs.

    Several runs or seeds of one method are repetitions. OUT/index.html is the
    page; tables.md, tables.tex and tables.csv have its numbers, figures/ its
    figures as SVG and PNG. summary.json has the runs without their records; it
    can be used as RUN for the same tables. Sample images need the data sets.

    Examples:
      testtime report runs/digits-c
      testtime report runs/cifar-c --paper --out report
      testtime report runs/seed0 runs/seed1 runs/seed2 --format md,latex
    """
    from rich.console import Console

    from testtime.report.diagnosis import as_sections, read_diagnoses
    from testtime.report.publish import publish, read_formats
    from testtime.report.run_tables import explain, terminal

    sections = as_sections(read_diagnoses(diagnosis)) if diagnosis is not None else []
    with as_bad_arguments():
        chosen = read_formats(formats)
    measure = "accuracy" if accuracy else "error"
    with progress("figures") as show:
        results = publish(
            runs,
            out,
            formats=chosen,
            measure=measure,
            paper=paper,
            seed=seed,
            root=data_root,
            sections=sections,
            command=format_command(context),
            progress=show,
        )
    console = Console()
    for table in terminal(results, measure, paper, console.width):
        console.print(table)
    written = out / "index.html" if "html" in chosen else out
    echo(*explain(results, measure), *results.notes, f"{written}: written")
