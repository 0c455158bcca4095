"""`testtime tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from testtime.cli.console import as_bad_arguments, echo, format_command, name_folder, pick_device, progress
from testtime.cli.options import CHECKPOINT, METHOD, MODELS, Classes, DataRoot, Device, Jobs, Limit, Seeds, Weights

Out = Annotated[
    Path | None,
    Option(
        help="Folder of the run; an unfinished run in it is resumed.",
        show_default="runs/tune-…, named by a hash of the options",
    ),
]
Network = Annotated[
    str,
    Option(
        *CHECKPOINT,
        help=f"Network, trained with --hold-out. Or a model: {MODELS}.",
        show_default=False,
    ),
]
Method = Annotated[str, Option(help="Name of the method: ttt, best, tent, cotta, lame, ….", rich_help_panel=METHOD)]
Mode = Annotated[
    Literal["online", "episodic"] | None,
    Option(help="Mode of the method.", show_default="the method's own", rich_help_panel=METHOD),
]
Lr = Annotated[str | None, Option(help="Learning rates, e.g. 0.0005,0.001.", rich_help_panel=METHOD)]
Steps = Annotated[str | None, Option(help="Gradient steps per image, e.g. 1,2.", rich_help_panel=METHOD)]
Copies = Annotated[str | None, Option(help="Augmented copies per step, e.g. 16,32.", rich_help_panel=METHOD)]
Threshold = Annotated[str | None, Option(help="Thresholds of the confidence, e.g. 0.9,1.", rich_help_panel=METHOD)]
Update = Annotated[str | None, Option(help="Parameters that learn, e.g. encoder,norm.", rich_help_panel=METHOD)]
Constants = Annotated[
    list[str] | None,
    Option(
        "--constant",
        metavar="NAME=VALUES",
        help="Constant of the method's objective, e.g. weight=0.5,1. May be repeated.",
        show_default=False,
        rich_help_panel=METHOD,
    ),
]
Precision = Annotated[
    Literal["fp32", "tf32", "bf16"] | None,
    Option(
        help="Arithmetic precision, of all settings.",
        show_default="tf32 on CUDA, fp32 elsewhere",
        rich_help_panel=METHOD,
    ),
]
Data = Annotated[
    list[str] | None,
    Option(
        help="Held-out sets, e.g. digits-held-out-c. May be repeated.",
        show_default="those of the network's training data",
    ),
]
Batch = Annotated[
    int | None,
    Option(
        min=1,
        help="Images per call of the method: as many as it will see, if it learns from batches.",
        show_default="by the size of images, and the device",
    ),
]
Levels = Annotated[str, Option(help="Severity levels of corrupted sets: 1-5, 5 or 1,3.")]


def tune(
    context: typer.Context,
    checkpoint: Network,
    weights: Weights = None,
    classes: Classes = None,
    out: Out = None,
    method: Method = "ttt",
    mode: Mode = None,
    lr: Lr = None,
    steps: Steps = None,
    copies: Copies = None,
    threshold: Threshold = None,
    update: Update = None,
    constant: Constants = None,
    precision: Precision = None,
    data: Data = None,
    levels: Levels = "5",
    batch: Batch = None,
    limit: Limit = None,
    seed: Seeds = None,
    data_root: DataRoot = None,
    jobs: Jobs = 1,
    device: Device = "auto",
) -> None:
    """Choose the settings of a method on training images that were held out.

    Every combination of the values is run on the held-out images and on their
    corruptions, which are not those of the test sets. OUT/choice.json has the
    errors and the choice; OUT is a run folder, which testtime report reads. Run
    the same command again to resume after an interruption.

    Examples:
      testtime train --data digits --hold-out 300 --out runs/selection
      testtime tune -c runs/selection/network.safetensors --lr 0.001,0.003
      testtime tune -c net.safetensors --method tent --lr 0.001,0.002 --batch 64
      testtime tune -c net.safetensors --method rehearsal --constant weight=0.5,1
      testtime tune -m timm:resnet18 --weights w.pth --data cifar10-held-out-c \\
        --method tent --lr 0.001,0.002
    """
    values = {"lr": lr, "steps": steps, "copies": copies, "threshold": threshold, "update": update}
    for text in constant or ():
        name, found, words = text.partition("=")
        if not (name and found) or name in values:
            raise typer.BadParameter(f"--constant must be NAME=VALUES, each name once, got {text!r}.")
        values[name] = words
    if all(text is None for text in values.values()):
        raise typer.BadParameter("pass the values to choose from, e.g. --lr 0.001,0.002.")

    from testtime import evaluation
    from testtime.evaluation import tune
    from testtime.networks.sources import add_options
    from testtime.storage import FileError

    picked = pick_device(device)
    out = out or name_folder("tune", context.params)
    same: dict[str, Any] = {} if precision is None else {"precision": precision}
    sets: dict[str, Any] = {"data": data, "levels": levels, "seeds": seed, "limit": limit, "data_root": data_root}
    sets["batch"] = batch
    with as_bad_arguments(FileError):
        network = add_options(checkpoint, weights, classes)
        plan = tune.make_tuning_plan(network, tune.make_grid(method, mode, values, **same), **sets)
    with progress("tune", percent=True) as report:
        run = evaluation.run_plan(plan, out, device=picked, command=format_command(context), jobs=jobs, progress=report)
    choice = tune.choose(plan, run)
    echo(*tune.format_choice(choice), f"{tune.write_choice(out, choice)}: written")
