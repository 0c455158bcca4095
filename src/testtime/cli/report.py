"""`testtime report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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

    Runs with a protocol other than reset are compared: methods x protocols,
    with forgetting, calibration, collapses and cost.

    Examples:
      testtime report runs/digits-c
      testtime report runs/cifar-c --paper --out report
      testtime report runs/seed0 runs/seed1 runs/seed2 --format md,latex
      testtime report runs/reset runs/continual runs/correlated
    """
    from rich.console import Console

    from testtime.evaluation import open_runs
    from testtime.report import require
    from testtime.report.comparison import has_protocol
    from testtime.report.comparison_tables import explain_comparison, make_sheets
    from testtime.report.diagnosis import as_sections, read_diagnoses
    from testtime.report.publish import compare, publish, read_formats
    from testtime.report.run_tables import explain, has_paper, terminal
    from testtime.report.sheets import format_terminal

    sections = as_sections(read_diagnoses(diagnosis)) if diagnosis is not None else []
    with as_bad_arguments():
        chosen = read_formats(formats)
    if "html" in chosen:
        require()
    console, measure = Console(), "accuracy" if accuracy else "error"
    same: dict[str, Any] = {"formats": chosen, "seed": seed, "sections": sections, "command": format_command(context)}
    opened = [run for path in runs for run in open_runs(path)]
    if any(map(has_protocol, opened)):
        if accuracy or paper:
            raise typer.BadParameter("--accuracy and --paper are for runs with the protocol reset.")
        with progress("figures") as show:
            comparison = compare(opened, out, progress=show, **same)
        tables = format_terminal(make_sheets(comparison), console.width)
        words = [*explain_comparison(), *comparison.notes]
    else:
        with progress("figures") as show:
            results = publish(opened, out, measure=measure, paper=paper, root=data_root, progress=show, **same)
        if paper and not any(map(has_paper, results.tables)):
            echo("--paper: the paper has no numbers for these sets.", err=True)
        tables = terminal(results, measure, paper, console.width)
        words = [*explain(results, measure), *results.notes]
    for table in tables:
        console.print(table)
    echo(*words, f"{out / 'index.html' if 'html' in chosen else out}: written")
