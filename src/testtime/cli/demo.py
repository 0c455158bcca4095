"""`testtime demo`: the two minutes that show what it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testtime.cli.console import echo, progress


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and its numbers.")] = Path("demo"),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training digits.", show_default="25; quick 3")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A rough version in seconds.")] = False,
) -> None:
    """Train on the built-in digits, shift the test digits, adapt, and write a page.

    It needs no download and no GPU, and takes one to two minutes on two cores.
    OUT/index.html is the page, OUT/network.safetensors the network, OUT/run the
    records of every digit and OUT/summary.json their sum. Run it again to go on
    after an interruption.

    Example:
      testtime demo --out demo
    """
    from rich.console import Console

    from testtime.demo import run
    from testtime.report.run_tables import terminal

    results, seconds = run(out, epochs=epochs, seed=seed, quick=quick, progress=progress)
    console = Console()
    for table in terminal(results, width=console.width):
        console.print(table)
    echo(f"{out / 'index.html'}: open it in a browser ({seconds:.0f} s)")
