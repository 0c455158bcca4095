"""`testtime train`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer import Option

from testtime.checks import format_value
from testtime.cli.console import as_bad_arguments, echo, name_folder, pick_device, progress, report_skipped
from testtime.cli.options import NETWORK, RECIPE, Cache, DataRoot, Device, OnBadImage, TrainingLimit, TrainingPrecision
from testtime.progress import Progress

if TYPE_CHECKING:
    from testtime.data import TestSet
    from testtime.training import Setup

_SEEDS = 1000  # maximum length of a range; each seed is a network

Out = Annotated[
    Path | None,
    Option(
        help="Folder of the run; an unfinished training in it is resumed.",
        show_default="runs/train-…, named by a hash of the options",
    ),
]
Data = Annotated[str, Option(help="digits (bundled), cifar10, cifar100, imagenet, or a folder of class folders.")]
TrainingMethod = Annotated[
    Literal["joint", "plain", "alp", "uda"],
    Option(
        help="joint: classes and the self-supervised task, required for adaptation; plain: classes only; "
        "alp: adversarial logit pairing; uda: joint, with the task on --target too."
    ),
]
RecipeName = Annotated[
    Literal["paper", "robust"] | None,  # None by default, so that the folders of earlier versions keep their names
    Option(
        help="paper: the paper's, for vit one with AdamW; robust: joint training with AugMix and a consistency loss.",
        show_default="paper",
        rich_help_panel=RECIPE,
    ),
]
TaskName = Annotated[
    Literal["rotation", "jigsaw", "masked"] | None,
    Option(
        help="Self-supervised task: rotation of the image, arrangement of its tiles, or masked patches (vit only).",
        show_default="rotation",
    ),
]
Target = Annotated[str | None, Option(help="Unlabelled target set of uda, e.g. cifar10-c/fog/5.", show_default=False)]
Targets = Annotated[
    str | None,
    Option(
        help="Several target sets, one network for each in OUT/SET: names or patterns, e.g. 'cifar10-c/*/5,cifar10'.",
        show_default=False,
    ),
]
Start = Annotated[
    str | None,
    Option(
        help="Network of the same architecture to start from: a file, or the name of a bundled one.",
        show_default="random weights",
        rich_help_panel=NETWORK,
    ),
]
Network = Annotated[
    str | None,
    Option(
        help="Architecture: resnet26, resnet18, resnet50 or vit.",
        show_default="resnet26; imagenet resnet18",
        rich_help_panel=NETWORK,
    ),
]
Depth = Annotated[
    int | None,
    Option(
        help="Depth of resnet26, 6n + 2, or blocks of vit.",
        show_default="26, 10; digits 8, 4",
        rich_help_panel=NETWORK,
    ),
]
Width = Annotated[
    int | None,
    Option(
        min=1,
        help="Multiplier of the channels of resnet26, or width of the tokens of vit.",
        show_default="1, 192; digits 1, 48",
        rich_help_panel=NETWORK,
    ),
]
Patch = Annotated[int | None, Option(min=1, help="Side of a patch of vit.", show_default="4", rich_help_panel=NETWORK)]
Norm = Annotated[Literal["group", "batch"], Option(help="Normalization layers.", rich_help_panel=NETWORK)]
Size = Annotated[
    int | None,
    Option(min=8, help="Input size for photographs.", show_default="the network's: 32, 224", rich_help_panel=NETWORK),
]
CropArea = Annotated[
    float | None,
    Option(help="Minimum area of a random crop, as a fraction.", show_default="0.08", rich_help_panel=NETWORK),
]
Epochs = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of epochs; the learning rate schedule scales with it.",
        show_default="the recipe's: 150 (group), 75 (batch), 90 (imagenet), 300 (vit); digits 20, 40 (vit)",
        rich_help_panel=RECIPE,
    ),
]
Lr = Annotated[
    float | None,
    Option(help="Learning rate.", show_default="0.1; vit 0.001, with digits 0.003", rich_help_panel=RECIPE),
]
WeightDecay = Annotated[
    float | None,
    Option(min=0, help="Weight decay.", show_default="0.0005; imagenet 0.0001; vit 0.05", rich_help_panel=RECIPE),
]
Batch = Annotated[
    int | None,
    Option(
        min=1,
        help="Batch size, over all processes.",
        show_default="128; imagenet, vit 256; digits 32",
        rich_help_panel=RECIPE,
    ),
]
Views = Annotated[
    Literal["all", "random"] | None,
    Option(
        help="Views of each image in the rotation task: all four, or one at random.",
        show_default="all; imagenet random",
        rich_help_panel=RECIPE,
    ),
]
Consistency = Annotated[
    float | None,
    Option(min=0, help="Weight of the consistency loss of robust.", show_default="12", rich_help_panel=RECIPE),
]
Severity = Annotated[
    float | None,
    Option(help="Strength of the augmented views of robust, up to 10.", show_default="3", rich_help_panel=RECIPE),
]
Seed = Annotated[int, Option(help="Seed of weights, order and augmentation.", rich_help_panel=RECIPE)]
Seeds = Annotated[
    str | None,
    Option(
        help="Several seeds, e.g. 0-2 or 0,3; one network for each in OUT/seed-N.",
        show_default=False,
        rich_help_panel=RECIPE,
    ),
]
HoldOut = Annotated[
    int | None,
    Option(
        min=1,
        help="Do not train on this many training images, and evaluate on them instead of the test set: "
        "for choosing settings, see testtime tune.",
        show_default="none",
    ),
]
Statistics = Annotated[
    int | None,
    Option(
        min=0,
        help="Training images for the statistics stored with the network, which some methods need; 0: none.",
        show_default="2000",
    ),
]


def train(
    context: typer.Context,
    out: Out = None,
    data: Data = "digits",
    method: TrainingMethod = "joint",
    task: TaskName = None,
    target: Target = None,
    targets: Targets = None,
    start: Start = None,
    network: Network = None,
    depth: Depth = None,
    width: Width = None,
    patch: Patch = None,
    norm: Norm = "group",
    size: Size = None,
    crop_area: CropArea = None,
    recipe: RecipeName = None,
    epochs: Epochs = None,
    lr: Lr = None,
    weight_decay: WeightDecay = None,
    batch: Batch = None,
    views: Views = None,
    consistency: Consistency = None,
    severity: Severity = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    precision: TrainingPrecision = "fp32",
    hold_out: HoldOut = None,
    limit: TrainingLimit = None,
    statistics: Statistics = None,
    on_bad_image: OnBadImage = "fail",
    cache: Cache = None,
    data_root: DataRoot = None,
    device: Device = "auto",
) -> None:
    """Train a network.

    Run the same command again to resume after an interruption, bit for bit.
    OUT/network.safetensors is the result; OUT/record.json has the loss and
    error of each epoch. Several seeds or targets are trained together, which is
    faster on a GPU than separate runs; each has its own folder.

    Examples:
      testtime train --data digits --out runs/digits
      testtime train --data cifar10 --precision tf32 --out runs/cifar
      testtime train --data cifar10 --seeds 0-2 --precision bf16 --out runs/seeds
      testtime train --data photos/ --size 64 --epochs 30 --out runs/photos
      testtime train --data cifar10 --hold-out 5000 --precision tf32 \\
        --out runs/selection/joint
      testtime train --data cifar10 --hold-out 5000 --precision tf32 \\
        --recipe robust --out runs/selection/robust
      testtime train --data cifar10 --network vit --task masked \\
        --precision bf16 --out runs/vit-masked
      torchrun --nproc-per-node 8 -m testtime train --data imagenet --out runs/i
    """
    _check_combination(context)
    with as_bad_arguments():
        jobs = _list_jobs(out or name_folder("train", context.params), seed, seeds, target, targets)

    from testtime import training

    given: dict[str, Any] = {"depth": depth, "width": width, "norm": norm, "size": size, "start": start, "task": task}
    given |= {"area": crop_area, "recipe": recipe or "paper", "patch": patch, "on_bad": on_bad_image}
    given |= {"root": data_root, "hold_out": hold_out, "limit": limit, "cache": cache}
    changes: dict[str, Any] = {"lr": lr, "batch": batch, "weight_decay": weight_decay, "views": views}
    changes |= {"consistency": consistency, "severity": severity, "precision": precision}
    changes["method"] = None if recipe == "robust" else method
    with training.process_group(pick_device(device)) as local:
        first = training.is_first()
        setup, unlabelled = _prepare(jobs, data, network, given, {"epochs": epochs, **changes})
        if first:
            report_skipped(setup.skipped)
        nets = [setup.build(job.seed).to(local) for job in jobs]
        each: dict[str, Any] = {"seeds": [job.seed for job in jobs], "folders": [job.folder for job in jobs]}
        each |= {"targets": unlabelled, "statistics": 2000 if statistics is None else statistics}
        with _progress("train", first) as report:
            training.train_together(nets, setup.source, test=setup.test, recipe=setup.recipe, progress=report, **each)
    if first:
        test = None if setup.test is None else setup.test.name
        for net, job in zip(nets, jobs, strict=True):
            echo(f"{job.folder / 'network.safetensors'}: {training.format_epoch(net.card.record['epochs'][-1], test)}")


class _Job(NamedTuple):
    """One network to train."""

    folder: Path
    seed: int
    target: str | None


def _check_combination(context: typer.Context) -> None:
    given = context.params
    one, several = given["target"] is not None, given["targets"] is not None
    if one + several != (given["method"] == "uda"):
        raise typer.BadParameter("uda requires --target or --targets; only uda accepts them.", param_hint="--target")
    if given["recipe"] == "robust" and given["method"] != "joint":
        raise typer.BadParameter("robust is a method of its own: do not pass another.", param_hint="--method")
    for name in ("consistency", "severity"):
        if given[name] is not None and given["recipe"] != "robust":
            raise typer.BadParameter("only --recipe robust accepts it.", param_hint=f"--{name}")
    if given["seeds"] is None:
        return
    if several:
        raise typer.BadParameter("several seeds or several targets, not both.", param_hint="--seeds")
    source = context.get_parameter_source("seed")
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("one seed or several, not both.", param_hint="--seeds")


def _list_jobs(out: Path, seed: int, seeds: str | None, target: str | None, targets: str | None) -> list[_Job]:
    if seeds is not None:
        return [_Job(out / f"seed-{one}", one, target) for one in _parse_seeds(seeds)]
    if targets is not None:
        from testtime.data import expand

        return [_Job(out / name, seed, name) for name in expand(targets.split(","))]
    return [_Job(out, seed, target)]


def _parse_seeds(text: str) -> list[int]:
    """Parse seeds, e.g. 0-2 or 0,3."""
    seeds: list[int] = []
    for word in text.split(","):
        low, _, high = word.strip().partition("-")
        ends = [low, high or low]
        if not all(end.isdecimal() and len(end) < 19 for end in ends) or not 0 <= int(ends[1]) - int(low) < _SEEDS:
            raise ValueError(f"`seeds` must be a range or a list, e.g. 0-2 or 0,3; got {format_value(text)}.")
        seeds.extend(range(int(low), int(ends[1]) + 1))
    return list(dict.fromkeys(seeds))


def _prepare(
    jobs: list[_Job], data: str, network: str | None, given: dict[str, Any], changes: dict[str, Any]
) -> tuple[Setup, list[TestSet] | None]:
    """Prepare data, network and recipe, with changes of the recipe, and open the target sets."""
    from testtime import training
    from testtime.data import DataError
    from testtime.networks import CheckpointError

    with as_bad_arguments(DataError, CheckpointError), _progress("decode", training.is_first()) as report:
        about: dict[str, Any] = {"seed": jobs[0].seed, "spare": jobs[0].target is None, "progress": report}
        setup = training.prepare(data, network, **given, **about)
        unlabelled = _open_targets(jobs, given["root"], setup.source.shape[1])
        return replace(setup, recipe=setup.recipe.change(**changes)), unlabelled


def _open_targets(jobs: list[_Job], root: Path | None, side: int) -> list[TestSet] | None:
    """Open the target set of each job, resized to the training images; None without targets."""
    from testtime import data
    from testtime.data import families

    opened: dict[str, TestSet] = {}
    for name in (job.target for job in jobs):
        if name is not None and name not in opened:
            options: dict[str, Any] = {"size": side} if families.find(name).sized else {}
            opened[name] = data.open(name, root, **options)
    return [opened[job.target] for job in jobs if job.target is not None] or None


def _progress(title: str, first: bool) -> AbstractContextManager[Progress | None]:
    """Show progress in the first process only."""
    return progress(title) if first else contextlib.nullcontext()
