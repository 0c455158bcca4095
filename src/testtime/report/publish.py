"""Reports of runs as files: tables in several formats, figures, and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from testtime.data.sets import TestSet
from testtime.evaluation import Run, open_runs, write_summary
from testtime.progress import Progress
from testtime.report.canvas import Drawing
from testtime.report.comparison import Comparison, compare_runs
from testtime.report.comparison_figures import draw_comparison
from testtime.report.comparison_page import render_comparison_page
from testtime.report.comparison_tables import explain_comparison, make_sheets
from testtime.report.pages import require
from testtime.report.paper import Measure
from testtime.report.results import Results, collect
from testtime.report.run_figures import draw_all
from testtime.report.run_page import render_run_page
from testtime.report.run_tables import as_csv, latex, markdown
from testtime.report.samples import SetLookup
from testtime.report.sheets import format_csv, format_latex, format_markdown
from testtime.storage import write_atomic

Format = Literal["md", "latex", "csv", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
Words = tuple[str, Sequence[str]]


def read_formats(text: str) -> tuple[Format, ...]:
    """Parse a comma-separated list of formats.

    Raises:
        ValueError: A format does not exist, or there is none.
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
    sections: Sequence[Words] = (),
    command: str = "",
    figures: bool = True,
    progress: Progress | None = None,
) -> Results:
    """Write the report of runs with the default protocol, `reset`; each file is written atomically.

    Args:
        runs: Run folders, summaries, or opened runs; several with the same method and set are repetitions.
        out: The folder for `tables.md`, `tables.tex`, `tables.csv`, `summary.json` (from which the same tables can be
            generated), `index.html` and `figures/`.
        formats: Which files to write; `html` includes the figures.
        measure: Error or accuracy.
        paper: Whether to include the paper's numbers.
        seed: Seed of the bootstrap.
        root: Root folder of the data sets, for sample images.
        sets: Test sets that cannot be opened by name, for sample images.
        sections: Sections at the beginning of the page, each a title and paragraphs.
        command: The command line to record.
        figures: Whether to write the figures of the page as files, too.
        progress: Called with the figures and pages done, their total, and the title of the last one.

    Returns:
        The reported results.

    Raises:
        RunError: A path is neither a run folder nor a summary.
        ResultsError: There is nothing to report, or the runs cannot be combined.
        ModuleNotFoundError: The extra `report` is not installed; raised before anything is read.
    """
    folder = Path(out)
    if "html" in formats:
        require()
    results = collect(_open_all(runs), seed)
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
        if figures:
            _write_figures(folder / "figures", [drawing for _, _, drawing in drawings], progress)
        page = render_run_page(
            results,
            drawings,
            measure=measure,
            paper=paper,
            lookup=SetLookup(root, sets or {}),
            sections=sections,
            seed=seed,
            command=command,
        )
        _write(folder / "index.html", page)
        if progress is not None:
            progress(len(drawings) + 1, len(drawings) + 1, "index.html")
    return results


def compare(
    runs: Sequence[str | Path | Run],
    out: str | Path,
    *,
    formats: Sequence[Format] = FORMATS,
    seed: int = 0,
    sections: Sequence[Words] = (),
    command: str = "",
    progress: Progress | None = None,
) -> Comparison:
    """Write the report of runs with several protocols, or another than `reset`; each file is written atomically.

    Args:
        runs: Run folders, summaries, or opened runs; those that differ only in order or seed are repetitions.
        out: The folder, with the same files as those of `publish`.
        formats: Which files to write; `html` includes the figures.
        seed: Seed of the bootstrap.
        sections: Sections at the beginning of the page, each a title and paragraphs.
        command: The command line to record.
        progress: Called with the figures and pages done, their total, and the title of the last one.

    Returns:
        The reported comparison.

    Raises:
        RunError: A path is neither a run folder nor a summary.
        ResultsError: There is nothing to report, or the runs cannot be combined.
        ModuleNotFoundError: The extra `report` is not installed; raised before anything is read.
    """
    folder = Path(out)
    if "html" in formats:
        require()
    comparison = compare_runs(_open_all(runs), seed)
    sheets, words = make_sheets(comparison), [*explain_comparison(), *comparison.notes]
    if "md" in formats:
        _write(folder / "tables.md", format_markdown(sheets, words))
    if "latex" in formats:
        _write(folder / "tables.tex", format_latex(sheets, words))
    if "csv" in formats:
        _write(folder / "tables.csv", format_csv(sheets))
    if "json" in formats:
        write_summary(folder / "summary.json", comparison.runs)
    if "html" in formats:
        drawings = list(draw_comparison(comparison))
        _write_figures(folder / "figures", [drawing for _, _, drawing in drawings], progress)
        page = render_comparison_page(comparison, drawings, sections=sections, seed=seed, command=command)
        _write(folder / "index.html", page)
        if progress is not None:
            progress(len(drawings) + 1, len(drawings) + 1, "index.html")
    return comparison


def _open_all(runs: Sequence[str | Path | Run]) -> list[Run]:
    return [found for run in runs for found in ([run] if isinstance(run, Run) else open_runs(run))]


def _write_figures(folder: Path, drawings: Sequence[Drawing], progress: Progress | None) -> None:
    for count, drawing in enumerate(drawings, 1):
        _write(folder / f"{drawing.name}.svg", drawing.svg(inline=False))
        write_atomic(folder / f"{drawing.name}.png", drawing.png())
        if progress is not None:
            progress(count, len(drawings) + 1, drawing.title)


def _write(path: Path, text: str) -> None:
    """Write text atomically; file names in it may contain lone surrogates."""
    write_atomic(path, text.encode(errors="backslashreplace"))
