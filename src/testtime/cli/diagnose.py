"""`testtime diagnose`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from testtime.cli.console import (
    as_bad_arguments,
    echo,
    format_command,
    pick_device,
    progress,
    report_skipped,
)
from testtime.cli.options import CHECKPOINT, MODELS, Classes, DataRoot, Device, Json, OnBadImage, Weights, open_network

_ASK = (
    "a diagnosis is of one network: pass yours, e.g. -c RUN/network.safetensors, or a bundled one, "
    "e.g. -c cifar10-resnet26-gn-joint."
)

Network = Annotated[
    str | None,
    Option(
        *CHECKPOINT,
        help=f"Network, required: a file, the name of a bundled one, or a model: {MODELS}.",
        show_default=False,
    ),
]
Data = Annotated[
    list[str], Option(help="A folder of images, or sets, e.g. digits-c/contrast/5 or digits-c/*/5. May be repeated.")
]
ReferenceData = Annotated[
    str | None,
    Option(
        help="A set or folder that resembles the training data.",
        show_default="the training set, or the record of the network's card",
    ),
]
Limit = Annotated[int, Option(min=32, help="Use at most this many images of each set.")]
TrialLength = Annotated[int, Option(min=32, help="Length of the trial stream.")]
Steps = Annotated[int, Option(min=1, help="Gradient steps per image of the trial.")]
Lr = Annotated[float, Option(help="Learning rate of the trial.")]
Threshold = Annotated[float, Option(min=0, max=1, help="Confidence threshold of the trial.")]
Seed = Annotated[int, Option(help="Seed of the trial.")]
Out = Annotated[Path | None, Option(help="Folder for a page and the JSON document.", show_default=False)]


def diagnose(
    context: typer.Context,
    data: Data,
    checkpoint: Network = None,
    weights: Weights = None,
    classes: Classes = None,
    reference: ReferenceData = None,
    limit: Limit = 500,
    trial: TrialLength = 200,
    steps: Steps = 1,
    lr: Lr = 0.001,
    threshold: Threshold = 0.9,
    seed: Seed = 0,
    on_bad_image: OnBadImage = "fail",
    as_json: Json = False,
    out: Out = None,
    data_root: DataRoot = None,
    device: Device = "auto",
) -> None:
    """Estimate, without labels, whether adaptation helps on a set of images.

    Compares the network's self-supervised task with the training data, checks
    whether it is too easy or ill-defined, compares the gradients of the two tasks,
    and runs a short trial stream. With labels, it also reports the true agreement
    of the gradients and the improvement on the stream. The network must be named.

    Examples:
      testtime diagnose --data photos/ -c runs/photos/network.safetensors
      testtime diagnose --data cifar10 --data cifar10-c/fog/5 --out diagnosis \\
        -c cifar10-resnet26-gn-joint
      testtime diagnose --data digits-c/fog/5 -c digits-resnet8-gn-joint --json
    """
    if checkpoint is None:
        raise typer.BadParameter(_ASK, param_hint="--checkpoint")

    from testtime.data import DataError
    from testtime.diagnosis import name_sets, open_for
    from testtime.diagnosis.measure import diagnose_all, find_reference
    from testtime.diagnosis.result import format_diagnosis
    from testtime.provenance import describe_machine

    if out is not None:
        from testtime.report import require

        require()
    name, net = open_network(checkpoint, weights, classes, True, pick_device(device))
    settings: dict[str, Any] = {"steps": steps, "lr": lr, "threshold": threshold, "seed": seed}
    with as_bad_arguments(DataError):
        on_bad = "skip" if on_bad_image == "skip" else None
        with progress("pictures") as report:
            sets = [open_for(net, text, data_root, on_bad, report) for text in name_sets(data)]
        report_skipped(line for one in sets for line in one.skipped)
        known = find_reference(net, reference, data_root, limit)
        with progress("images") as report:
            found = diagnose_all(net, sets, reference=known, limit=limit, trial=trial, progress=report, **settings)
    document = {
        "network": name,
        "command": format_command(context),
        **describe_machine(next(net.parameters()).device),
        "diagnoses": [one.describe() for one in found],
    }
    if as_json:
        typer.echo(json.dumps(document, indent=1, allow_nan=False))
    else:
        echo(f"network: {name}", *"\n\n".join(map(format_diagnosis, found)).split("\n"))
    if out is not None:
        from testtime.report.diagnosis import write_page

        echo(f"{write_page(document, out)}: written", err=as_json)
