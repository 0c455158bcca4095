"""`testtime pack` and `testtime unpack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from testtime.cli.console import echo, progress

Run = Annotated[Path, Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
Packed = Annotated[Path, Argument(metavar="OUT", help="Folder of the packed run.", show_default=False)]
Limit = Annotated[int, Option(min=1, help="Maximum size of a part in MiB.")]


def pack(run: Run, out: Packed, limit: Limit = 15) -> None:
    """Pack the folder of a run into files of limited size, to carry it elsewhere.

    The run may be at work: unpacked elsewhere, it resumes from its last
    checkpoint. Use an empty folder for OUT.

    Example:
      testtime pack runs/joint packed/
    """
    from testtime.bundle import MIB, pack_folder

    with progress("pack") as report:
        parts = pack_folder(run, out, limit * MIB, report)
    echo(f"{out}: {parts} parts")


def unpack(out: Packed, run: Run) -> None:
    """Recreate the folder of a packed run, after checking all of it.

    Example:
      testtime unpack packed/ runs/joint
    """
    from testtime.bundle import unpack_folder

    with progress("unpack") as report:
        files = unpack_folder(out, run, report)
    echo(f"{run}: {files} files")
