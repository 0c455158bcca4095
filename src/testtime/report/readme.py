"""The README's table and picture, made from a committed results file: `python -m testtime.report.readme`.

The table stands between two comments, so that the rest of the README is nobody's business here. With `--check` nothing
is written; the exit code says whether the README already is what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testtime.report.figures import draw_bars
from testtime.report.tables import markdown_table
from testtime.storage import write_whole

BEGIN = "<!-- begin: results/digits-demo.json -->"
END = "<!-- end -->"
RESULTS, PICTURE = Path("results/digits-demo.json"), Path("docs/demo.svg")


def tell_results(results: Mapping[str, Any]) -> str:
    """The table with what belongs to it: how many digits, which command, hardware, seed and file."""
    summary, hardware, seconds = results["summary"], results["hardware"], results["seconds"]
    busy = "" if results["load"] is None else f", load average {results['load']} at the start"
    words = (
        f"Mean error over the {len(results['sets']) - 1} shifts: `online` {summary['online']['reduction']:.0f}% and "
        f"`episodic` {summary['episodic']['reduction']:.0f}% below `fixed`. {results['count']} test digits in every "
        f"row, one run, seed {results['seed']}; `{results['command']}` took {seconds['total']:.0f} s "
        f"({seconds['training']:.0f} s of it training) on {results['cores']} cores ({hardware['processor']}{busy}), "
        f"torch {results['versions']['torch']}; all numbers in [`{RESULTS}`]({RESULTS})."
    )
    wrapped = textwrap.fill(f"{words} {results['choice']}", 120, break_long_words=False, break_on_hyphens=False)
    return f"{markdown_table(results)}\n\n{wrapped}"


def update(readme: str, results: Mapping[str, Any]) -> str:
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
    results = json.loads(RESULTS.read_text())
    readme = Path("README.md").read_text()
    wanted = update(readme, results)
    if check:
        return int(wanted != readme)
    write_whole("README.md", wanted)
    write_whole(PICTURE, draw_bars(results, inline=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
