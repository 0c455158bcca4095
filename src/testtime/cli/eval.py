"""`testtime eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from testtime.cli.console import as_bad_arguments, echo, format_command, name_folder, pick_device, progress
from testtime.cli.options import (
    CHECKPOINT,
    MACHINE,
    METHOD,
    MODELS,
    Classes,
    DataRoot,
    Device,
    Jobs,
    Limit,
    OnBadImage,
    Seeds,
    Weights,
)

_PROTOCOL = "Protocol"
_EACH = "; METHOD=VALUE for one method. May be repeated."

Out = Annotated[
    Path | None,
    Option(
        help="Folder of the run; an unfinished run in it is resumed.",
        show_default="runs/eval-…, named by a hash of the options",
    ),
]
Joint = Annotated[
    str | None,
    Option(
        *CHECKPOINT,
        help=f"Jointly trained network: a file, or the name of a bundled one. Or a model: {MODELS}.",
    ),
]
Baseline = Annotated[
    str | None, Option(help="Network trained on classes only, for the method plain.", show_default=False)
]
Networks = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=FILE",
        help="A further network; FILE may contain {set}, {corruption}, {level}, or be a model, "
        "e.g. timm:resnet50,weights=w.pth. May be repeated.",
        show_default=False,
    ),
]
Data = Annotated[
    list[str] | None,
    Option(help="Test sets: cifar10-c, digits-c, cifar10-c/*/5, cifar10.1, a folder, …. May be repeated."),
]
Matrix = Annotated[
    str | None, Option(help="A whole study: a TOML file, or the name of a bundled one.", show_default=False)
]
Methods = Annotated[
    str | None,
    Option(
        help="Any of plain, fixed, episodic, online, auto, best, tent, cotta, lame, … (see testtime methods), the name "
        "of a network, or the methods of the study.",
        show_default="plain, fixed, episodic, online, as far as they have networks",
    ),
]
Levels = Annotated[str | None, Option(help="Severity levels of corrupted sets: 1-5, 5 or 1,3.", show_default="all")]
Corruptions = Annotated[str | None, Option(help="Corruptions: fog,frost or all.", show_default="all that a set lists")]
Original = Annotated[
    bool | None,
    Option("--original/--no-original", metavar="", help="Include the set without corruption.", show_default="included"),
]
Shuffle = Annotated[
    bool | None,
    Option("--shuffle/--no-shuffle", metavar="", help="Shuffle each set by the seed.", show_default="not shuffled"),
]
Protocol = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="How the sets are presented: reset, one stream each; or as one stream: continual, gradual (levels up and "
        "down), mixed, recurring, clean (original images in between), walk (two corruptions at a time). correlated: "
        "as reset, sorted by class.",
        show_default="reset",
        rich_help_panel=_PROTOCOL,
    ),
]
Order = Annotated[
    int | None,
    Option(min=0, help="Order of the sets in a stream: 0 as given, else a permutation.", rich_help_panel=_PROTOCOL),
]
Batch = Annotated[
    int | None,
    Option(min=1, help="Images per call of a method.", show_default="by the size of images", rich_help_panel=_PROTOCOL),
]
Concentration = Annotated[
    float | None,
    Option(
        help="Sort each set by class; the smaller, the longer the runs of one class.",
        show_default="0.1 if correlated",
        rich_help_panel=_PROTOCOL,
    ),
]
Rounds = Annotated[int | None, Option(min=1, help="Rounds of recurring.", show_default="10", rich_help_panel=_PROTOCOL)]
Pace = Annotated[
    int | None,
    Option(min=1, help="Images of a walk per change of a level.", show_default="100", rich_help_panel=_PROTOCOL),
]
Rate = Annotated[
    float | None,
    Option(
        help="Images per second of the stream; a method that is slower learns only from every k-th call.",
        show_default="waits for every method",
        rich_help_panel=_PROTOCOL,
    ),
]
Steps = Annotated[
    list[str] | None,
    Option(help=f"Gradient steps per image{_EACH}", show_default="10; online 1", rich_help_panel=METHOD),
]
Lr = Annotated[list[str] | None, Option(help=f"Learning rate{_EACH}", show_default="0.001", rich_help_panel=METHOD)]
Copies = Annotated[
    list[str] | None, Option(help=f"Augmented copies per step{_EACH}", show_default="32", rich_help_panel=METHOD)
]
Threshold = Annotated[
    list[str] | None,
    Option(
        help="Adapt only where the confidence of the self-supervised task is below this, "
        f"or on a fraction of the images, e.g. 20%{_EACH}",
        show_default="1",
        rich_help_panel=METHOD,
    ),
]
Precision = Annotated[
    list[str] | None,
    Option(
        help=f"Arithmetic precision: fp32, tf32 or bf16{_EACH}",
        show_default="the study's, else tf32 on CUDA, fp32 elsewhere",
        rich_help_panel=METHOD,
    ),
]
Together = Annotated[
    int | None,
    Option(min=1, help="Maximum number of parallel online streams.", show_default="what fits", rich_help_panel=MACHINE),
]
Ray = Annotated[
    str | None,
    Option(
        metavar="[ADDRESS]",
        help="Distribute over Ray; without an address, over workers started on this machine.",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]


def evaluate(
    context: typer.Context,
    out: Out = None,
    checkpoint: Joint = None,
    weights: Weights = None,
    classes: Classes = None,
    baseline: Baseline = None,
    network: Networks = None,
    data: Data = None,
    matrix: Matrix = None,
    methods: Methods = None,
    levels: Levels = None,
    corruptions: Corruptions = None,
    original: Original = None,
    limit: Limit = None,
    seed: Seeds = None,
    shuffle: Shuffle = None,
    protocol: Protocol = None,
    order: Order = None,
    batch: Batch = None,
    concentration: Concentration = None,
    rounds: Rounds = None,
    pace: Pace = None,
    rate: Rate = None,
    steps: Steps = None,
    lr: Lr = None,
    copies: Copies = None,
    threshold: Threshold = None,
    precision: Precision = None,
    on_bad_image: OnBadImage = "fail",
    data_root: DataRoot = None,
    together: Together = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    device: Device = "auto",
) -> None:
    """Evaluate methods on test sets and store a record of every image.

    OUT has a file for each method, set and seed, written when it is finished.
    Run the same command again to resume after an interruption: finished files
    are not repeated. Settings that are not given are those that the network's
    card recommends (see testtime info), and otherwise the paper's; for the
    methods of a study (--matrix) the study's, and otherwise the paper's.

    Examples:
      testtime eval -c digits-resnet8-gn-joint --data digits-c --levels 5 \\
        --corruptions contrast,fog --methods fixed,online --shuffle
      testtime eval -c net.safetensors --data digits-c --levels 5
      testtime eval -c net.safetensors --data photos/ --lr 0.003 --out runs/p
      testtime eval -c net.safetensors --data cifar10-c --shuffle --out runs/c
      testtime eval -c n.safetensors --data photos/ --methods fixed,best --out b
      testtime eval -c net.safetensors --data cifar10-c --levels 5 \\
        --protocol continual --order 3 --batch 64 --out runs/order-3
      testtime eval -c net.safetensors --matrix gradual --out runs/gradual
      testtime eval -c net.safetensors --matrix selection --out runs/selection
      testtime eval --network uda=uda/{set}.safetensors --data digits --out u
      testtime eval -m timm:vit_tiny_patch16_224 --weights w.pth --data photos/
    """
    networks = _name_networks(checkpoint, weights, classes, network or [])

    from testtime import evaluation
    from testtime.data import DataError
    from testtime.evaluation.recommended import describe_settings

    machine: dict[str, Any] = {"device": pick_device(device), "together": together, "jobs": jobs, "ray": ray}
    out = out or name_folder("eval", context.params)
    sets: dict[str, Any] = {"data": data, "levels": levels, "corruptions": corruptions, "original": original}
    sets |= {"data_root": data_root, "on_bad_image": on_bad_image}
    images: dict[str, Any] = {"seeds": seed, "shuffle": shuffle, "limit": limit}
    presented = {"name": protocol, "order": order, "batch": batch, "concentration": concentration}
    presented |= {"rounds": rounds, "pace": pace, "rate": rate}
    images["protocol"] = {name: value for name, value in presented.items() if value is not None}
    chosen: dict[str, Any] = {"baseline": baseline, "methods": methods, "recommended": True}
    chosen |= {"steps": steps, "lr": lr, "copies": copies, "threshold": threshold, "precision": precision}
    with as_bad_arguments(DataError):
        plan = evaluation.make_plan(matrix, **networks, **sets, **images, **chosen)
    with progress("evaluate", percent=True) as report:
        run = evaluation.run_plan(plan, out, command=format_command(context), progress=report, **machine)
    echo(*describe_settings(plan.methods), err=True)
    echo(*evaluation.format_run(run).split("\n"), f"{out}: written; for tables and a page: testtime report {out}")


def _name_networks(
    checkpoint: str | None, weights: Path | None, classes: Path | None, others: list[str]
) -> dict[str, Any]:
    """Return the networks as arguments of `make_plan`; `others` are NAME=FILE."""
    files: dict[str, str] = {}
    with as_bad_arguments():
        for text in others:
            name, equals, file = text.partition("=")
            if not (name and equals and file):
                raise ValueError(f"--network must be NAME=FILE, got {text!r}.")
            if name in files:
                raise ValueError(f"--network names {name!r} twice.")
            files[name] = file

        from testtime.networks.sources import add_options

        return {"checkpoint": add_options(checkpoint or "", weights, classes) or None, "networks": files}
