"""`testtime corrupt`: pictures and whole data sets under the fifteen corruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from testtime.cli.console import Device, as_bad_arguments, pick_device, progress


def corrupt(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Picture, folder, or data set.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="What to write.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Corruption, such as fog.", show_default=False)] = None,
    severity: Annotated[int, typer.Option(min=1, max=5, help="How much of it.")] = 3,
    whole: Annotated[
        bool, typer.Option("--all", help="All 15 at all 5 severities, in the layout of CIFAR-10-C or ImageNet-C.")
    ] = False,
    gallery: Annotated[
        bool, typer.Option("--gallery", help="One PNG with every corruption of a picture at every severity.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    frost: Annotated[
        Path | None, typer.Option(help="Folder with photographs frost1 to frost5.", show_default="made by code")
    ] = None,
    scale: Annotated[
        Literal["auto", "cifar", "imagenet"], typer.Option(help="Whose severities; auto goes by a picture's size.")
    ] = "auto",
    device: Device = "auto",
) -> None:
    """Corrupt a picture, a folder of pictures, or a whole data set.

    A folder keeps its tree. With --all, IN is CIFAR-10's folder or a folder of
    pictures such as ImageNet's validation set. Run it again to go on after an
    interruption.

    Examples:
      testtime corrupt cat.jpg foggy.jpg --name fog --severity 3
      testtime corrupt photos/ snowy/ --name snow --severity 5
      testtime corrupt cifar-10-batches-bin/ CIFAR-10-C/ --all
      testtime corrupt --gallery cat.jpg gallery.png
    """
    from testtime import corruptions
    from testtime.data import cifar

    if (name is not None) + whole + gallery != 1:
        raise typer.BadParameter("give one of --name, --all and --gallery.")
    with as_bad_arguments(corruptions.FileError), progress("corrupt") as report:
        if gallery:
            corruptions.write_gallery(source, target, seed=seed, scale=scale, frost=frost)
            report(1, 1)
            return
        settings: dict[str, Any] = {"seed": seed, "frost": frost, "device": pick_device(device)}
        if name is not None:
            steps = corruptions.corrupt_path(source, target, name, severity, scale=scale, **settings)
        elif cifar.find(source) is not None:
            clean = cifar.load(source)
            assert clean.labels is not None
            steps = corruptions.corrupt_cifar(clean.images(slice(None)), clean.labels, target, **settings)
        else:
            steps = corruptions.corrupt_imagenet(source, target, **settings)
        for step in steps:
            report(step.done, step.total, step.what)
