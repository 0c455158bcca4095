"""The results on CIFAR-10 as a document, made from committed files: `python -m testtime.report.findings`.

Reads the files of `results/cifar10/` and writes the parts of `docs/results.md` between comments, and its figures. With
`--check` nothing is written; the exit code says whether the document is what the files say. The curves along the
stream need every record: `--records RUN` names the folder of the run that `levels.json` is the summary of, and without
it that figure stays as it is.
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
from testtime.report.finding_differences import tell_differences
from testtime.report.finding_gradients import tell_gradients, tell_stand_ins
from testtime.report.finding_levels import tell_flips, tell_level, tell_means, tell_part, tell_precisions
from testtime.report.finding_runs import tell_commands, tell_runs
from testtime.report.finding_streams import tell_losses
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import collect
from testtime.report.run_figures import draw_bars, draw_correlation, draw_flips, draw_levels, draw_streams
from testtime.report.sources import ResultsError
from testtime.runs import open_run
from testtime.storage import write_whole

DOCUMENT = Path("docs/results.md")
BARS, STREAMS = Path("docs/cifar10-level-5.svg"), Path("docs/cifar10-streams.svg")


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
        "level 5": tell_level(found, 5),
        "levels 1 to 4": "\n\n".join(tell_level(found, level) for level in (4, 3, 2, 1)),
        "the standard version at levels 1 to 4": tell_part(found),
        "differences": tell_differences(found),
        "online above fixed": tell_losses(found),
        "flips": tell_flips(found),
        "arithmetic": tell_precisions(found),
        "gradients": tell_gradients(found),
        "gradients without labels": tell_stand_ins(found),
    }


def draw_figures(found: Findings, records: Path | None = None) -> dict[Path, Drawing]:
    """The figures by path; the streams' only where there are records.

    Raises:
        ValueError: The records are not those of a run with streams.
    """
    levels = found.levels
    plain = [replace(each, rows={name: each.rows[name] for name in ("fixed", "online")}) for each in levels.values()]
    flips = draw_flips(levels[5])
    assert flips is not None
    figures = {
        BARS: draw_bars(levels[5], paper=True),
        Path("docs/cifar10-levels.svg"): draw_levels(plain, paper=True),
        Path("docs/cifar10-flips.svg"): flips,
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
    if records is not None:
        streams = collect([open_run(records)])
        top = next((one for one in streams.tables if one.level == 5), streams.tables[0])
        chosen = tuple(column for column in STREAMED if column in top.columns)
        drawing = draw_streams(streams, replace(top, columns=chosen))
        if drawing is None:
            raise ResultsError(f"{records} has no records of fixed and online at level 5.")
        figures[STREAMS] = drawing
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the document and its figures in the checkout in the current folder; the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/results.md and its figures from the results files.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the document is not current"
    )
    parser.add_argument("--records", type=Path, help="folder of the run, for the curves along the stream")
    options = parser.parse_args(arguments)
    try:
        found = read()
        drawn = {} if options.check else draw_figures(found, options.records)
        figures = {path: drawing.svg(inline=False) for path, drawing in drawn.items()}
        current = update({DOCUMENT: tell_all(found)}, options.check)
        for path, svg in figures.items():
            write_whole(path, svg)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return int(options.check and not current)


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
