"""`testtime data list`, `get`, `pack` and `check`."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from testtime.cli.console import as_bad_arguments, echo, pick_device, progress, report_skipped
from testtime.cli.flags import Command, Group
from testtime.cli.options import DataRoot, Device, OnBadImage

app = typer.Typer(cls=Group, help="List, download, pack and check data sets.", no_args_is_help=True)

ToGet = Annotated[str, Argument(help="cifar10, cifar10-c, cifar10.1, cifar100 or cifar100-c.")]
ToPack = Annotated[list[str], Argument(metavar="NAME", help="imagenet, imagenet-c, or a part, e.g. imagenet-c/*/5.")]
ToCheck = Annotated[str, Argument(help="A data set, a part of one, e.g. imagenet-c/fog/5, or packed.")]
Size = Annotated[int, Option(min=8, help="Size of the images, the network's input size.")]


@app.command("list", cls=Command)
def list_data(data_root: DataRoot = None) -> None:
    """List the known data sets with their location and state."""
    from testtime import data

    for found in data.describe_all(data_root):
        echo(f"{found.name:19} {found.state:11} {found.what}")
        if found.path is not None:
            echo(f"{'':31} {found.path}")
        if found.detail:
            echo(f"{'':31} {found.detail}")


@app.command("get", cls=Command)
def get_data(name: ToGet, data_root: DataRoot = None) -> None:
    """Download a data set from its official source; an interrupted transfer is resumed."""
    from testtime import data
    from testtime.data.download import remotes

    with as_bad_arguments():
        remotes(name, data_root)
    with progress(f"bytes of {name}") as report:
        folder = data.get(name, data_root, report)
    echo(f"{name} is in {folder}")


@app.command("pack", cls=Command)
def pack_data(
    names: ToPack,
    size: Size = 224,
    on_bad_image: OnBadImage = "fail",
    data_root: DataRoot = None,
    device: Device = "auto",
) -> None:
    """Decode or generate sets of photographs once, into files that runs read directly.

    Run the same command again to resume after an interruption. If the official
    ImageNet-C is missing, it is generated from the validation set.

    Example:
      testtime data pack imagenet "imagenet-c/*/5"
    """
    from testtime import data

    with as_bad_arguments(data.DataError), progress("pack") as report:
        picked = pick_device(device)
        packed = data.pack_all(names, data_root, size=size, on_bad=on_bad_image, device=picked, progress=report)
    report_skipped(line for one in packed for line in one.skipped)
    echo(f"{len(packed)} sets are in {data.data_root(data_root) / 'packed'}")


@app.command("check", cls=Command)
def check_data(name: ToCheck, data_root: DataRoot = None) -> None:
    """Read a whole data set and report all faults; the exit code is 1 if there are any."""
    from testtime import data

    with as_bad_arguments(), progress(f"checking {name}") as report:
        faults = data.check(name, data_root, report)
    echo(*faults)
    if faults:
        raise typer.Exit(1)
    echo(f"{name} is sound")
