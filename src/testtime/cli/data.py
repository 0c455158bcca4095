"""`testtime data`: what data sets there are, getting and checking them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from testtime.cli.console import as_bad_arguments, pick_device, progress
from testtime.storage import printable

app = typer.Typer(help="Data sets: what there is, where it is, getting and checking it.", no_args_is_help=True)

_DATA_ROOT = typer.Option(
    None, "--data-root", help="Folder of the data sets; else TESTTIME_DATA, else the user's cache folder."
)


@app.command("list")
def list_data(data_root: str | None = _DATA_ROOT) -> None:
    """List the known data sets: what they are, where they are looked for, and whether they are there."""
    from testtime import data

    for found in data.describe_all(data_root):
        typer.echo(f"{found.name:17} {found.state:11} {found.what}")
        if found.place is not None:
            typer.echo(f"{'':29} {printable(str(found.place))}")
        if found.detail:
            typer.echo(f"{'':29} {printable(found.detail)}")


@app.command("get")
def get_data(
    name: str = typer.Argument(help="cifar10, cifar10-c or cifar10.1."), data_root: str | None = _DATA_ROOT
) -> None:
    """Download a data set from its official place; a transfer that broke off goes on."""
    from testtime import data
    from testtime.data.download import remotes

    with as_bad_arguments():
        remotes(name, data_root)
    with progress(f"bytes of {name}") as report:
        place = data.get(name, data_root, report)
    typer.echo(f"{name} is in {place}")


@app.command("pack")
def pack_data(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="imagenet, imagenet-c, or a part such as imagenet-c/*/5.")
    ],
    size: int = typer.Option(224, min=8, help="Side of the images, as the network takes them."),
    on_bad_image: Literal["fail", "skip"] = typer.Option(
        "fail", help="A picture that cannot be read: stop, or leave it out and name it."
    ),
    data_root: str | None = _DATA_ROOT,
    device: str = typer.Option("auto", help="Where corrupted images are made: cpu, cuda; auto takes a GPU if any."),
) -> None:
    """Decode or generate sets of photographs once, into files that every run reads from.

    What broke off goes on. Without the official ImageNet-C, its images are made from the validation set.

    Example:
      testtime data pack imagenet "imagenet-c/*/5"
    """
    from testtime import data

    with as_bad_arguments(data.DataError), progress("pack") as report:
        packed = data.pack_all(
            names, data_root, size=size, on_bad=on_bad_image, device=pick_device(device), progress=report
        )
    for line in dict.fromkeys(line for one in packed for line in one.skipped):
        typer.echo(f"left out: {printable(line)}", err=True)
    typer.echo(f"{len(packed)} sets are in {data.data_root(data_root) / 'packed'}")


@app.command("check")
def check_data(
    name: str = typer.Argument(help="A data set, a part of one such as imagenet-c/fog/5, or packed."),
    data_root: str | None = _DATA_ROOT,
) -> None:
    """Read a data set through and name every fault; exit code 1 if there are any."""
    from testtime import data

    with as_bad_arguments(), progress(f"checking {name}") as report:
        faults = data.check(name, data_root, report)
    for fault in faults:
        typer.echo(printable(fault))
    if faults:
        raise typer.Exit(1)
    typer.echo(f"{name} is sound")
