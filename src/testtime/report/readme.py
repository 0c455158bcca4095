"""The README's table and picture, made from a committed summary: `python -m testtime.report.readme`.

The table stands between two comments, so that the rest of the README is nobody's business here. With `--check` nothing
is written; the exit code says whether the README already is what the results say.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from testtime.report.results import MEAN, Results, collect, column_title
from testtime.report.run_figures import draw_bars
from testtime.runs import open_runs
from testtime.storage import write_whole

BEGIN = "<!-- begin: results/digits-demo.json -->"
END = "<!-- end -->"
RESULTS, PICTURE = Path("results/digits-demo.json"), Path("docs/demo.svg")


def markdown_table(results: Results) -> str:
    """Sets down and methods across, the mean in bold, and the time of an image."""
    table = results.tables[0]
    methods = list(table.rows)
    lines = ["| error in % | " + " | ".join(f"`{name}`" for name in methods) + " |", "|---|" + "---:|" * len(methods)]
    for column in table.columns:
        bold = "**" if column == MEAN else ""
        title = "mean of the shifts" if column == MEAN else column_title(column)
        cells = " | ".join(f"{bold}{table.rows[name][column].error:.1f}{bold}" for name in methods)
        lines.append(f"| {bold}{title}{bold} | {cells} |")
    lines.append("| ms for an image | " + " | ".join(f"{1000 * results.seconds[name]:.1f}" for name in methods) + " |")
    return "\n".join(lines)


def tell_results(results: Results) -> str:
    """The table with what belongs to it: how many digits, which command, hardware, seed and file."""
    table, run = results.tables[0], results.runs[0]
    demo, hardware = run.about["demo"], run.about["hardware"]
    means = {name: row[MEAN].error for name, row in table.rows.items()}
    gains = {name: 100 * (1 - mean / means["fixed"]) for name, mean in means.items()}
    count = table.rows["fixed"][table.shifted[0]].images
    half = max(row[MEAN].half_width for row in table.rows.values())
    busy = "" if demo["load"] is None else f", load average {demo['load']} at the start"
    words = (
        f"Mean error over the {len(table.shifted)} shifts: `online` {gains['online']:.0f}% and `episodic` "
        f"{gains['episodic']:.0f}% below `fixed`; the 95% intervals of the means over images are ±{half:.1f} or less. "
        f"{count} test digits in every row, one run, seed {run.units[0].seed}; `{run.about['command']}` took "
        f"{demo['seconds']:.0f} s ({demo['training']:.0f} s of it training) on {demo['cores']} cores "
        f"({hardware['processor']}{busy}), torch {run.about['versions']['torch']}; all numbers in "
        f"[`{RESULTS}`]({RESULTS})."
    )
    wrapped = textwrap.fill(f"{words} {demo['choice']}", 120, break_long_words=False, break_on_hyphens=False)
    return f"{markdown_table(results)}\n\n{wrapped}"


def update(readme: str, results: Results) -> str:
    """The README's text with the part between the comments made anew.

    Raises:
        ValueError: The comments are not there.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The README must have the lines {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{tell_results(results)}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the README and the picture of the checkout in the current folder; the exit code."""
    parser = argparse.ArgumentParser(description="Make the README's table and picture from the results file.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the table is not current")
    check = parser.parse_args(arguments).check
    results = collect(open_runs(RESULTS))
    readme = Path("README.md").read_text()
    wanted = update(readme, results)
    if check:
        return int(wanted != readme)
    write_whole("README.md", wanted)
    write_whole(PICTURE, draw_bars(results.tables[0]).svg(inline=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
