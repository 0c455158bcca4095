"""`testtime demo`: the three minutes that show what it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testtime.cli.console import progress


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and its numbers.")] = Path("demo"),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training digits.", show_default="25; quick 3")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A rough version in seconds.")] = False,
) -> None:
    """Train on the built-in digits, shift the test digits, adapt, and write a page.

    It needs no download and no GPU, and takes about three minutes on two cores.
    OUT/index.html is the page, OUT/demo.json has every number on it,
    OUT/network.safetensors is the network.

    Example:
      testtime demo --out demo
    """
    from testtime.demo import run
    from testtime.report import text_table

    results = run(out, epochs=epochs, seed=seed, quick=quick, progress=progress)
    typer.echo(text_table(results))
    typer.echo(f"\n{out / 'index.html'}: open it in a browser ({results['seconds']['total']:.0f} s)")
