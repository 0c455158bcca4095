"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

NETWORK, RECIPE, METHOD, MACHINE = "Network", "Recipe", "Method", "Machine"  # panels of the help

Checkpoint = Annotated[
    str | None,
    Option("--checkpoint", "-c", help="Network: a file, or the name of a bundled one.", show_default="bundled"),
]
DataRoot = Annotated[
    Path | None,
    Option(
        help="Folder of the data sets.",
        show_default="$TESTTIME_DATA, else the user's cache folder",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str, Option(help="cpu, cuda, cuda:1 or mps; auto selects a GPU if there is one.", rich_help_panel=MACHINE)
]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Limit = Annotated[int | None, Option(min=1, help="Use at most this many images of each set.", show_default="all")]
OnBadImage = Annotated[
    Literal["fail", "skip"],
    Option(help="Unreadable image files: fail before the work starts, or leave them out and report them."),
]
Runs = Annotated[
    list[Path], Argument(metavar="RUN", help="Folders of runs, or their summary.json.", show_default=False)
]
