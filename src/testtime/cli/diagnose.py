"""`testtime diagnose` and `correlate`: will adaptation help, and what told so."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from testtime.cli.console import Device, as_bad_arguments, echo, pick_device, progress


def diagnose(
    context: typer.Context,
    data: Annotated[
        list[str],
        typer.Option(help="A folder of pictures, or sets such as digits-c/contrast/5, digits-c/*/5; may be repeated."),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", help="Network file, or a shipped network's name.", show_default="shipped"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="A set or folder like the training data.", show_default="what it was trained on, or its card's record"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=32, help="At most so many images of each set.")] = 500,
    trial: Annotated[int, typer.Option(min=32, help="Length of the stream that is tried out.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps on each image of it.")] = 1,
    lr: Annotated[float, typer.Option(help="Its learning rate.")] = 0.001,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="The gate's threshold.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of the stream.")] = 0,
    on_bad_image: Annotated[
        Literal["fail", "skip"],
        typer.Option(help="A picture of a folder that cannot be read: stop, or leave it out and name it."),
    ] = "fail",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a page and the JSON document.", show_default=False)
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are.", show_default="$TESTTIME_DATA", rich_help_panel="Machine")
    ] = None,
    device: Device = "auto",
) -> None:
    """Say whether adaptation is likely to help on some images; no labels needed.

    It looks at the rotation task against the training data, at what would
    make it trivial or ill-defined, at whether the two tasks' gradients agree,
    and tries out a short stream. With labels it adds the true agreement and
    the gain along the stream.

    Examples:
      testtime diagnose --data photos/ -c runs/photos/network.safetensors
      testtime diagnose --data cifar10 --data cifar10-c/fog/5 --out diagnosis
      testtime diagnose --data digits-c/fog/5 -c digits-resnet8-gn-joint --json
    """
    import json

    from testtime import data as datasets
    from testtime.analysis import name_sets, open_for
    from testtime.diagnose import diagnose_all, find_reference
    from testtime.machine import describe_machine
    from testtime.networks import load
    from testtime.predict import default_network
    from testtime.verdict import tell

    if out is not None:
        from testtime.report import require

        require()
    place = pick_device(device)
    name = checkpoint or default_network()
    net = load(name).to(place)
    if checkpoint is None:
        echo(f"network: {name} (another one: --checkpoint)", err=True)
    with as_bad_arguments(datasets.DataError):
        on_bad = "skip" if on_bad_image == "skip" else None
        with progress("pictures") as looked:
            sets = [open_for(net, text, data_root, on_bad, looked) for text in name_sets(data)]
        for line in dict.fromkeys(line for one in sets for line in one.skipped):
            echo(f"left out: {line}", err=True)
        known = find_reference(net, reference, data_root, limit)
        with progress("images") as report:
            found = diagnose_all(
                net,
                sets,
                reference=known,
                limit=limit,
                trial=trial,
                steps=steps,
                lr=lr,
                threshold=threshold,
                seed=seed,
                progress=report,
            )
    document = {
        "network": name,
        "command": shlex.join(["testtime", *context.obj]),
        **describe_machine(next(net.parameters()).device),
        "diagnoses": [one.describe() for one in found],
    }
    if as_json:
        typer.echo(json.dumps(document, indent=1, allow_nan=False))
    else:
        echo(*"\n\n".join(tell(one) for one in found).split("\n"))
    if out is not None:
        from testtime.report.diagnosis import write_page

        echo(f"{write_page(document, out)}: written", err=as_json)


def correlate(
    study: Annotated[Path, typer.Argument(help="What python -m testtime.analysis wrote.", show_default=False)],
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the figures and numbers.")] = Path("correlation"),
    seed: Annotated[int, typer.Option(help="Seed of the confidence intervals.")] = 0,
) -> None:
    """Set gradient correlation against the improvement in error (paper, figure 4).

    OUT/correlation.json has every point and fit; the figures are SVG and PNG.

    Example:
      testtime correlate correlations.json runs/cifar-c --out correlation
    """
    from testtime.report import require
    from testtime.report.correlation import join, publish, tell

    require()
    joined = join(study, runs, seed)
    publish(joined, out)
    echo(*tell(joined).split("\n"), f"{out}: written")
