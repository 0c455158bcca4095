"""Options that several commands share, and the network they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

if TYPE_CHECKING:
    from testtime.networks import YNet

NETWORK, RECIPE, METHOD, MACHINE = "Network", "Recipe", "Method", "Machine"  # panels of the help

MODELS = "timm:NAME, torchvision:NAME, transformers:FOLDER, or FILE.py:FUNCTION, which runs that file"
CHECKPOINT = ("--checkpoint", "-c", "--model", "-m")
Checkpoint = Annotated[
    str | None,
    Option(
        *CHECKPOINT,
        help=f"Network: a file, the name of a bundled one, or a model: {MODELS}.",
        show_default="bundled",
    ),
]
Weights = Annotated[
    Path | None,
    Option(help="Weights of the model: a safetensors file, one of torch.save, or a network file.", show_default=False),
]
Classes = Annotated[
    Path | None, Option(help="Class names of the model, a text file with one per line.", show_default=False)
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
Cache = Annotated[
    Path | None,
    Option(
        help="Folder in which decoded photographs are cached for later runs.",
        show_default="under the data root, for large sets",
        rich_help_panel=MACHINE,
    ),
]
Images = Annotated[list[Path], Argument(help="Image files, or folders of them.", show_default=False)]
Jobs = Annotated[
    int, Option(min=1, help="Units that run concurrently on a CPU, one thread each.", rich_help_panel=MACHINE)
]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
TrainingLimit = Annotated[int | None, Option(min=1, help="Train on at most this many images.", show_default="all")]
Limit = Annotated[int | None, Option(min=1, help="Use at most this many images of each set.", show_default="all")]
OnBadImage = Annotated[
    Literal["fail", "skip"],
    Option(help="Unreadable image files: fail before the work starts, or leave them out and report them."),
]
Seeds = Annotated[list[int] | None, Option(help="Seed of augmentations and order. May be repeated.", show_default="0")]
TrainingPrecision = Annotated[
    Literal["fp32", "tf32", "bf16"],
    Option(help="fp32 is exact; tf32 and bf16 are several times as fast on a GPU.", rich_help_panel=RECIPE),
]
Runs = Annotated[
    list[Path], Argument(metavar="RUN", help="Folders of runs, or their summary.json.", show_default=False)
]


def open_network(
    checkpoint: str | None,
    weights: Path | None,
    classes: Path | None,
    branch: bool,
    device: str,
    silent: bool = False,
) -> tuple[str, YNet]:
    """Open the network of the options above; returns its name and the network.

    Args:
        checkpoint: `--checkpoint`, or None for a bundled network.
        weights: `--weights`.
        classes: `--classes`.
        branch: Whether a model gets a self-supervised branch.
        device: Where to put it.
        silent: Do not say which network is used by default.
    """
    from testtime.cli.console import as_bad_arguments, load_network
    from testtime.networks import sources
    from testtime.storage import FileError

    with as_bad_arguments(FileError):
        text = sources.add_options(checkpoint or "", weights, classes)
        if sources.parse_source(text) is None:
            return load_network(checkpoint, device, silent)
        return text, sources.open_network(text, branch).to(device)
