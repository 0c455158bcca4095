"""`testtime corrupt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from testtime.cli.console import as_bad_arguments, pick_device, progress
from testtime.cli.options import Device

Source = Annotated[Path, Argument(metavar="IN", help="Image, folder, or data set.", show_default=False)]
Destination = Annotated[Path, Argument(metavar="OUT", help="File or folder to write.", show_default=False)]
Name = Annotated[str | None, Option(help="Corruption, e.g. fog.", show_default=False)]
Severity = Annotated[int, Option(min=1, max=5, help="Severity level.")]
IsWhole = Annotated[
    bool, Option("--all", help="All 15 corruptions at all 5 levels, in the layout of CIFAR-10-C or ImageNet-C.")
]
IsGallery = Annotated[bool, Option("--gallery", help="One PNG with every corruption of an image at every level.")]
Seed = Annotated[int, Option(help="Seed of the random draws.")]
Frost = Annotated[Path | None, Option(help="Folder with the photographs frost1 to frost5.", show_default="procedural")]
Scale = Annotated[
    Literal["auto", "cifar", "imagenet"], Option(help="Severity parameters; auto chooses by the image size.")
]


def corrupt(
    source: Source,
    target: Destination,
    name: Name = None,
    severity: Severity = 3,
    whole: IsWhole = False,
    gallery: IsGallery = False,
    seed: Seed = 0,
    frost: Frost = None,
    scale: Scale = "auto",
    device: Device = "auto",
) -> None:
    """Corrupt an image, a folder of images, or a whole data set.

    OUT has the same subfolders as IN. With --all, IN is the folder of CIFAR-10
    or a folder of images, e.g. ImageNet's validation set. Run the same
    command again to resume after an interruption.

    Examples:
      testtime corrupt cat.jpg foggy.jpg --name fog --severity 3
      testtime corrupt photos/ snowy/ --name snow --severity 5
      testtime corrupt cifar-10-batches-bin/ CIFAR-10-C/ --all
      testtime corrupt --gallery cat.jpg gallery.png
    """
    if (name is not None) + whole + gallery != 1:
        raise typer.BadParameter("give one of --name, --all and --gallery.")

    from testtime import data
    from testtime.data import cifar
    from testtime.storage import FileError

    with as_bad_arguments(FileError), progress("corrupt") as report:
        if gallery:
            data.write_gallery(source, target, seed=seed, scale=scale, frost=frost)
            report(1, 1, "")
            return
        settings: dict[str, Any] = {"seed": seed, "frost": frost, "device": pick_device(device), "progress": report}
        if name is not None:
            data.corrupt_path(source, target, name, severity, scale=scale, **settings)
        elif cifar.find(source) is not None:
            clean = cifar.load(source)
            assert clean.labels is not None
            data.corrupt_cifar(clean.images(slice(None)), clean.labels, target, **settings)
        else:
            data.corrupt_imagenet(source, target, **settings)
