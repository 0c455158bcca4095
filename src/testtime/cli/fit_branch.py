"""`testtime fit-branch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from testtime.cli.console import (
    as_bad_arguments,
    echo,
    name_folder,
    pick_device,
    progress,
    report_skipped,
)
from testtime.cli.options import (
    CHECKPOINT,
    MODELS,
    RECIPE,
    Cache,
    Classes,
    DataRoot,
    Device,
    OnBadImage,
    TrainingLimit,
    TrainingPrecision,
    Weights,
    open_network,
)

Network = Annotated[
    str,
    Option(
        *CHECKPOINT,
        help=f"Network: a file, the name of a bundled one, or a model: {MODELS}.",
        show_default=False,
    ),
]
Data = Annotated[
    str, Option(help="digits (bundled), cifar10, cifar100, imagenet, or a folder of images; labels are not used.")
]
Out = Annotated[
    Path | None,
    Option(
        help="Folder of the run; an unfinished training in it is resumed.",
        show_default="runs/fit-branch-…, named by a hash of the options",
    ),
]
IsJoint = Annotated[
    bool,
    Option(
        "--joint", help="Fine-tune the encoder too; distillation preserves the predictions.", rich_help_panel=RECIPE
    ),
]
IsCopy = Annotated[
    bool,
    Option("--copy", help="Start from a copy of the classifier, with a new last layer.", rich_help_panel=RECIPE),
]
Epochs = Annotated[int, Option(min=1, help="Maximum number of epochs.", rich_help_panel=RECIPE)]
OptimizerName = Annotated[Literal["sgd", "adamw"], Option(help="Optimizer.", rich_help_panel=RECIPE)]
Lr = Annotated[
    float | None,
    Option(
        help="Initial learning rate; it follows a cosine to 0.",
        show_default="sgd 0.05, adamw 0.001; joint 0.02, 0.0001",
        rich_help_panel=RECIPE,
    ),
]
Batch = Annotated[int, Option(min=1, help="Batch size.", rich_help_panel=RECIPE)]
WeightDecay = Annotated[float, Option(min=0, help="Weight decay.", rich_help_panel=RECIPE)]
Distillation = Annotated[
    float, Option(min=0, help="Weight of the distillation loss of --joint.", rich_help_panel=RECIPE)
]
Patience = Annotated[
    int,
    Option(
        min=1, help="Stop after this many epochs without a lower error on the held-out images.", rich_help_panel=RECIPE
    ),
]
Seed = Annotated[int, Option(help="Seed of order, augmentation and a new last layer.", rich_help_panel=RECIPE)]
HoldOut = Annotated[
    int | None,
    Option(
        min=0,
        help="Do not train on this many images, and measure the task on them; the result is the best epoch there. "
        "0: none, the result is the last epoch.",
        show_default="a tenth",
    ),
]


def fit_branch(
    context: typer.Context,
    checkpoint: Network,
    weights: Weights = None,
    classes: Classes = None,
    data: Data = "digits",
    out: Out = None,
    joint: IsJoint = False,
    copy: IsCopy = False,
    epochs: Epochs = 10,
    optimizer: OptimizerName = "sgd",
    lr: Lr = None,
    batch: Batch = 256,
    weight_decay: WeightDecay = 5e-4,
    distillation: Distillation = 1.0,
    patience: Patience = 5,
    seed: Seed = 0,
    precision: TrainingPrecision = "fp32",
    hold_out: HoldOut = None,
    limit: TrainingLimit = None,
    on_bad_image: OnBadImage = "fail",
    cache: Cache = None,
    data_root: DataRoot = None,
    device: Device = "auto",
) -> None:
    """Train the self-supervised branch of a network, so that it can adapt.

    Needs no labels. Encoder and classifier stay bit-identical, except with
    --joint. Run the same command again to resume after an interruption, bit for
    bit. OUT/network.safetensors is the result; OUT/record.json has the loss and
    the task's error of each epoch.

    Examples:
      testtime fit-branch -c cifar10-resnet26-gn-plain --data cifar10 \\
        --copy --precision bf16 --out runs/branch
      testtime fit-branch -c runs/plain/network.safetensors --data digits \\
        --batch 32 --epochs 15 --out runs/digits-branch
      testtime fit-branch -m timm:resnet18 --weights model.safetensors \\
        --data photos/ --joint --epochs 6 --out runs/photos-joint
    """
    if distillation != 1.0 and not joint:
        raise typer.BadParameter("only --joint accepts it.", param_hint="--distillation")

    from testtime import training
    from testtime.data.held_out import hold_out_images
    from testtime.storage import FileError

    folder = out or name_folder("fit-branch", context.params)
    reading: dict[str, Any] = {"root": data_root, "cache": cache, "on_bad": on_bad_image}
    options: dict[str, Any] = {"epochs": epochs, "optimizer": optimizer, "lr": lr, "batch": batch, "seed": seed}
    options |= {"weight_decay": weight_decay, "patience": patience, "joint": joint, "distillation": distillation}
    options |= {"precision": precision, "start": "copy" if copy else "own"}
    with as_bad_arguments(FileError):
        training.BranchRecipe(**options)
        _, net = open_network(checkpoint, weights, classes, True, pick_device(device))
        with progress("decode") as report:
            images = training.open_images(data, net, progress=report, **reading)
        held_out: Any = 0.1 if hold_out is None else 0
        if hold_out:
            images, held_out = hold_out_images(images, hold_out)
        images = training.limit_images(images, limit)
    report_skipped(images.skipped)
    with progress("fit-branch") as report:
        training.fit_branch(net, images, hold_out=held_out, folder=folder, progress=report, **options)
    echo(f"{folder / 'network.safetensors'}: {training.format_branch(net.card.record['branch'])}")
