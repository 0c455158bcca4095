"""A report of runs as files: tables in several formats, figures, and one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from testtime.data.sets import TestSet
from testtime.evaluation import Run, open_runs, write_summary
from testtime.progress import Progress
from testtime.report.canvas import Drawing
from testtime.report.pages import require
from testtime.report.paper import Measure
from testtime.report.results import Results, collect
from testtime.report.run_figures import draw_all
from testtime.report.run_page import render_run_page
from testtime.report.run_tables import as_csv, latex, markdown
from testtime.report.samples import SetLookup
from testtime.storage import write_whole

Format = Literal["md", "latex", "csv", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
Words = tuple[str, Sequence[str]]


def read_formats(text: str) -> tuple[Format, ...]:
    """The formats named in a text, separated by commas.

    Raises:
        ValueError: One of them does not exist.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"`format` must be some of {', '.join(FORMATS)}, got {name!r}.")
    if not names:
        raise ValueError(f"`format` must be some of {', '.join(FORMATS)}, got none.")
    return cast("tuple[Format, ...]", tuple(dict.fromkeys(names)))


def publish(
    runs: Sequence[str | Path | Run],
    out: str | Path,
    *,
    formats: Sequence[Format] = FORMATS,
    measure: Measure = "error",
    paper: bool = False,
    seed: int = 0,
    root: str | Path | None = None,
    sets: Mapping[str, TestSet] | None = None,
    words: Sequence[Words] = (),
    command: str = "",
    progress: Progress | None = None,
) -> Results:
    """Read runs and write their report, each file whole or not at all.

    Args:
        runs: Folders of runs, summaries, or runs that are open; several of one method and set are repetitions.
        out: The folder to write to: `tables.md`, `tables.tex`, `tables.csv`, `summary.json` (the runs without their
            records, of which the same tables can be made again), `index.html` and `figures/`.
        formats: Which of them; `html` brings the figures.
        measure: Errors or accuracies.
        paper: Whether to show the paper's own numbers as well.
        seed: Seed of the bootstrap.
        root: The folder of data sets, for sample pictures.
        sets: Test sets that have no name to be opened by, for sample pictures.
        words: Sections to begin the page with: a title and paragraphs each.
        command: What was asked for, for the record.
        progress: Called with how many figures and pages are done, of how many, and the last one's title.

    Returns:
        What was reported.

    Raises:
        RunError: A folder is no run, a file no summary.
        ResultsError: There is nothing to report, or the runs do not belong together.
        ModuleNotFoundError: The page needs an extra that is not installed; said before anything is read.
    """
    folder = Path(out)
    if "html" in formats:
        require()
    results = collect([found for run in runs for found in ([run] if isinstance(run, Run) else open_runs(run))], seed)
    if "md" in formats:
        _write(folder / "tables.md", markdown(results, measure, paper))
    if "latex" in formats:
        _write(folder / "tables.tex", latex(results, measure, paper))
    if "csv" in formats:
        _write(folder / "tables.csv", as_csv(results, measure))
    if "json" in formats:
        write_summary(folder / "summary.json", results.runs)
    if "html" in formats:
        drawings = list(draw_all(results, measure, paper))
        _write_figures(folder / "figures", [drawing for _, _, drawing in drawings], progress)
        page = render_run_page(
            results,
            drawings,
            measure=measure,
            paper=paper,
            lookup=SetLookup(root, sets or {}),
            words=words,
            seed=seed,
            command=command,
        )
        _write(folder / "index.html", page)
        if progress is not None:
            progress(len(drawings) + 1, len(drawings) + 1, "index.html")
    return results


def _write_figures(folder: Path, drawings: Sequence[Drawing], progress: Progress | None) -> None:
    for count, drawing in enumerate(drawings, 1):
        _write(folder / f"{drawing.name}.svg", drawing.svg(inline=False))
        write_whole(folder / f"{drawing.name}.png", drawing.png())
        if progress is not None:
            progress(count, len(drawings) + 1, drawing.title)


def _write(path: Path, text: str) -> None:
    """Write a text, whole or not at all; a file's name in it may not be Unicode."""
    write_whole(path, text.encode(errors="backslashreplace"))
