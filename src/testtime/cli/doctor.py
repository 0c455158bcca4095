"""`testtime doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Option

from testtime.cli.console import echo, pick_device, progress
from testtime.cli.options import Device, Json

NoSpeed = Annotated[bool, Option("--no-speed", help="Do not measure the speed.")]


def doctor(as_json: Json = False, no_speed: NoSpeed = False, device: Device = "auto") -> None:
    """Show what is installed and in use: versions, device, threads, kernels, speed.

    The output is for bug reports; it names no files and no users. The speed is
    measured for a few seconds; the first time, the kernels are compiled.

    Examples:
      testtime doctor
      testtime doctor --json --device cpu
    """
    from testtime.doctor import examine, format_examination

    with progress("speed", percent=True) as report:
        found = examine(pick_device(device), not no_speed, report)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        echo(*format_examination(found))
