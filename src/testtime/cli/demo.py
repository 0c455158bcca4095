"""`testtime demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from testtime.cli.console import echo, progress

Out = Annotated[Path, Option(help="Folder for the page and its data.")]
Epochs = Annotated[int | None, Option(min=1, help="Number of training epochs.", show_default="25")]
Seed = Annotated[int, Option(help="Random seed.")]
IsQuick = Annotated[
    bool, Option("--quick", help="A first look in seconds: the bundled network, no training, three shifts.")
]


def demo(out: Out = Path("demo"), epochs: Epochs = None, seed: Seed = 0, quick: IsQuick = False) -> None:
    """Train on the bundled digits, shift the test digits, adapt, and write a page.

    A second network, trained on classes only, is made adaptable as by testtime
    fit-branch. Needs no download and no GPU, and takes one to two minutes on two
    cores. OUT/index.html is the page, OUT/network.safetensors the first network,
    OUT/run has a record of every digit, and OUT/summary.json the summary. Run
    the same command again to resume after an interruption.

    With --quick nothing is trained: the bundled network adapts to three shifts.

    Examples:
      testtime demo --quick
      testtime demo --out demo
    """
    if quick and epochs is not None:
        raise typer.BadParameter("--quick trains nothing: do not pass --epochs.")

    from rich.console import Console

    from testtime.report.run_tables import terminal

    if quick:
        from testtime.quick_demo import format_effect, run_quick

        results, seconds = run_quick(out, seed=seed, progress=progress)
        words = [format_effect(results)]
    else:
        from testtime.demo import run

        results, seconds = run(out, epochs=epochs, seed=seed, progress=progress)
        words = []
    console = Console()
    for table in terminal(results, width=console.width):
        console.print(table)
    echo(*words, f"{out / 'index.html'}: open it in a browser ({seconds:.0f} s)")
