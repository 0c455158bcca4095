"""`testtime train`, `predict` and `info`: networks made, used and described."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from testtime.checks import show
from testtime.cli.console import Device, as_bad_arguments, echo, name_folder, pick_device, progress

_SEEDS = 1000  # of a range: each is a network


def train(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder; if it holds a part of this run, training goes on.",
            show_default="runs/train-…, a name made of the options",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="digits (built in), cifar10, imagenet, or a folder with a folder for each class.")
    ] = "digits",
    method: Annotated[
        Literal["joint", "plain", "alp", "uda"],
        typer.Option(
            help="joint: classes and rotations (what adapts later); plain: classes only; "
            "alp: adversarial logit pairing; uda: joint, and rotations of --target."
        ),
    ] = "joint",
    target: Annotated[
        str | None, typer.Option(help="Unlabelled target set for uda, such as cifar10-c/fog/5.", show_default=False)
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Several of them, a network for each in OUT/SET: names or patterns, such as 'cifar10-c/*/5,cifar10'.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="Network to start from, of the same architecture: a file, or a shipped one's name.",
            show_default="random weights",
            rich_help_panel="Network",
        ),
    ] = None,
    network: Annotated[
        Literal["resnet26", "resnet18", "resnet50"] | None,
        typer.Option(help="Architecture.", show_default="resnet26; imagenet resnet18", rich_help_panel="Network"),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="Depth of resnet26, 6n + 2.", show_default="26; digits 8", rich_help_panel="Network"),
    ] = None,
    norm: Annotated[
        Literal["group", "batch"], typer.Option(help="Normalization layers.", rich_help_panel="Network")
    ] = "group",
    size: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Side of the images the network sees of photographs.",
            show_default="the network's: 32, 224",
            rich_help_panel="Network",
        ),
    ] = None,
    crop_area: Annotated[
        float | None,
        typer.Option(
            help="Smallest share of a photograph that a random crop takes.",
            show_default="0.08",
            rich_help_panel="Network",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passes over the data; the learning rate's drops move along.",
            show_default="the paper's: 150 (group), 75 (batch), 90 (imagenet); digits 20",
            rich_help_panel="Recipe",
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", show_default="0.1", rich_help_panel="Recipe")
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(min=0, help="Weight decay.", show_default="0.0005; imagenet 0.0001", rich_help_panel="Recipe"),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Images in a step, over all processes.",
            show_default="128; imagenet 256; digits 32",
            rich_help_panel="Recipe",
        ),
    ] = None,
    rotations: Annotated[
        Literal["all", "random"] | None,
        typer.Option(
            help="Turns of each image for the rotation task: all four, or one by chance.",
            show_default="all; imagenet random",
            rich_help_panel="Recipe",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.", rich_help_panel="Recipe")] = 0,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Several seeds, such as 0-2 or 0,3; a network for each in OUT/seed-N.",
            show_default=False,
            rich_help_panel="Recipe",
        ),
    ] = None,
    precision: Annotated[
        Literal["fp32", "tf32", "bf16"],
        typer.Option(
            help="Arithmetic: fp32 is exact, tf32 and bf16 are several times as fast on a GPU.",
            rich_help_panel="Recipe",
        ),
    ] = "fp32",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on this many images only.", show_default="all")
    ] = None,
    on_bad_image: Annotated[
        Literal["fail", "skip"],
        typer.Option(help="A picture that cannot be read: stop before training, or leave it out and name it."),
    ] = "fail",
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for decoded photographs, which the next run finds.",
            show_default="under the data root, for large sets",
            rich_help_panel="Machine",
        ),
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are.", show_default="$TESTTIME_DATA", rich_help_panel="Machine")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a network.

    Run it again to go on after an interruption, bit for bit.
    OUT/network.safetensors is the result, OUT/record.json has loss and error
    by epoch. Several seeds or targets are trained side by side, which a GPU
    does faster than one after the other, each into a folder of its own.

    Examples:
      testtime train --data digits --out runs/digits
      testtime train --data cifar10 --precision tf32 --out runs/cifar
      testtime train --data cifar10 --seeds 0-2 --precision bf16 --out runs/seeds
      testtime train --data photos/ --size 64 --epochs 30 --out runs/photos
      torchrun --nproc-per-node 8 -m testtime train --data imagenet --out runs/i
    """
    from testtime import data as datasets
    from testtime.networks import CheckpointError
    from testtime.training import is_first, prepare, process_group, tell, train_together

    if (target is not None) + (targets is not None) != (method == "uda"):
        raise typer.BadParameter("uda needs --target or --targets, and only uda takes one.", param_hint="--target")
    if seeds is not None and targets is not None:
        raise typer.BadParameter("several seeds or several targets, not both.", param_hint="--seeds")
    if seeds is not None and _is_given(context, "seed"):
        raise typer.BadParameter("one seed or several, not both.", param_hint="--seeds")
    out = out or name_folder("train", context.params)
    changes: dict[str, Any] = {"lr": lr, "batch": batch, "weight_decay": weight_decay, "rotations": rotations}
    changes |= {"method": method, "precision": precision}
    with process_group(pick_device(device)) as place, contextlib.ExitStack() as stack:
        first = is_first()
        decoding = progress("decode") if first else contextlib.nullcontext()
        with as_bad_arguments(datasets.DataError, CheckpointError), decoding as decoded:
            each = [seed] if seeds is None else _parse_seeds(seeds)
            names = [target] if target else [] if targets is None else list(datasets.expand(targets.split(",")))
            setup = prepare(
                data,
                network,
                depth=depth,
                norm=norm,
                size=size,
                area=crop_area,
                start=start,
                seed=each[0],
                root=data_root,
                limit=limit,
                cache=cache,
                spare=not names,  # source and target images must be alike
                on_bad=on_bad_image,
                progress=decoded,
            )
            unlabelled = [_open_target(name, data_root, setup.source.shape[1]) for name in names]
            recipe = setup.recipe.change(epochs=epochs, **changes)
        folders = [out]
        if seeds is not None:
            folders = [out / f"seed-{one}" for one in each]
        elif targets is not None:
            folders = [out / name for name in names]
            each *= len(names)
        nets = [setup.build(one) for one in each]
        if first:
            for line in setup.skipped:
                echo(f"left out: {line}", err=True)
        report = stack.enter_context(progress("train")) if first else None
        train_together(
            [net.to(place) for net in nets],
            setup.source,
            recipe=recipe,
            seeds=each,
            folders=folders,
            test=setup.test,
            targets=unlabelled * (len(nets) // len(unlabelled)) if unlabelled else None,
            progress=report,
        )
    if first:
        for net, folder in zip(nets, folders, strict=True):
            echo(f"{folder / 'network.safetensors'}: {tell(net.card.record['epochs'][-1])}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option that has a default was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parse_seeds(text: str) -> list[int]:
    """Seeds from a text such as 0-2 or 0,3."""
    seeds: list[int] = []
    for word in text.split(","):
        low, _, high = word.strip().partition("-")
        ends = [low, high or low]
        if not all(end.isdecimal() and len(end) < 19 for end in ends) or not 0 <= int(ends[1]) - int(low) < _SEEDS:
            raise ValueError(f"`seeds` must be such as 0-2 or 0,3; got {show(text)}.")
        seeds.extend(range(int(low), int(ends[1]) + 1))
    return list(dict.fromkeys(seeds))


def _open_target(name: str, root: Path | None, side: int) -> Any:
    """A target set, its images as large as the training images."""
    from testtime import data as datasets
    from testtime.data.registry import SIZED

    options: dict[str, Any] = {"size": side} if name.startswith(SIZED) else {}
    return datasets.open(name, root, **options)


def predict(
    images: Annotated[list[Path], typer.Argument(help="Picture files or folders of them.", show_default=False)],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", help="Network file, or a shipped network's name.", show_default="shipped"),
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Keep what was learned from one picture for the next.")
    ] = False,
    preset: Annotated[
        Literal["paper", "best"] | None,
        typer.Option(help="Settings of online learning by name; implies --online.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Gradient steps on each picture.", show_default="10; online 1")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.001")] = None,
    copies: Annotated[int | None, typer.Option(min=1, help="Augmented copies in a step.", show_default="32")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Adapt only below this confidence of the rotation task.", show_default="1"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the augmentations.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    device: Device = "auto",
) -> None:
    """Classify pictures, before and after the network has learned from each.

    A picture's central square is scaled to the network's size. The last
    column is the change, by adaptation, of the probability of the class that
    is predicted after it. A picture that cannot be read is named and left
    out; the exit code is then 1.

    Examples:
      testtime predict cat.jpg
      testtime predict holiday/ --online --json
      testtime predict holiday/ --preset best
      testtime predict *.png -c runs/photos/network.safetensors --steps 1
    """
    import json
    from dataclasses import asdict

    from testtime.data import DataError
    from testtime.networks import load
    from testtime.predict import default_network, find_pictures, prepare_adapter, tell
    from testtime.predict import predict as predict_pictures

    place = pick_device(device)
    online = online or preset is not None
    pictures = find_pictures(images)
    name = checkpoint or default_network()
    net = load(name).to(place)
    if checkpoint is None:
        echo(f"network: {name} (another one: --checkpoint)", err=True)
    together = 16 if place.startswith("cuda") and not online else 1
    with as_bad_arguments():
        adapter = prepare_adapter(
            net, online, together, preset=preset, steps=steps, lr=lr, copies=copies, threshold=threshold, seed=seed
        )
    unread: list[str] = []

    def skip(fault: DataError) -> None:
        unread.append(str(fault))
        echo(f"error: {fault}", err=True)

    answers = predict_pictures(adapter, net.card, pictures, together, skip)
    if as_json:
        found = []
        with progress("pictures") as report:
            for answer in answers:
                found.append(asdict(answer))
                report(len(found) + len(unread), len(pictures))
        typer.echo(json.dumps({"network": name, "answers": found, "unread": unread}, indent=1))
    else:
        for answer in answers:
            echo(tell(answer))
    if unread:
        raise typer.Exit(1)


def info(
    checkpoint: Annotated[str, typer.Argument(help="Network file, or a shipped network's name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint holds: architecture, classes, parameters, and how it was trained.

    Example:
      testtime info runs/digits/network.safetensors
    """
    import json

    from testtime.predict import summarise, tell_summary

    summary = summarise(checkpoint)
    text = json.dumps(summary, indent=1) if as_json else tell_summary(summary)
    echo(*text.split("\n"))
