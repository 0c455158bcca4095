"""`testtime gradients`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from testtime.cli.console import as_bad_arguments, echo, pick_device
from testtime.cli.options import DataRoot, Device, Limit

Joint = Annotated[
    str, Option("--checkpoint", "-c", help="Jointly trained network: a file, or the name of a bundled one.")
]
Data = Annotated[list[str], Option(help="Test sets: cifar10-c, digits-c/*/5, a folder, …. May be repeated.")]
Out = Annotated[Path, Option(help="JSON file; an unfinished study in it is resumed.")]
Batch = Annotated[int, Option(min=1, help="Batch size.")]
Single = Annotated[int, Option(min=0, help="Number of images whose gradients are also compared one by one.")]
Confident = Annotated[float, Option(min=0, max=1, help="Minimum confidence of a prediction used as pseudo-label.")]
Precision = Annotated[Literal["fp32", "tf32"], Option(help="fp32 is exact; tf32 is faster on a GPU.")]


def gradients(
    checkpoint: Joint,
    data: Data,
    out: Out,
    limit: Limit = None,
    batch: Batch = 128,
    single: Single = 1000,
    confident: Confident = 0.9,
    precision: Precision = "fp32",
    data_root: DataRoot = None,
    device: Device = "auto",
) -> None:
    """Measure the correlation of the two tasks' gradients on test sets.

    OUT is written after every set. Run the same command again to resume after
    an interruption: only the missing sets are measured. testtime correlate
    relates the results to the improvement of evaluation runs.

    Example:
      testtime gradients -c net.safetensors --data cifar10-c --out gradients.json
    """
    from testtime.data import DataError
    from testtime.diagnosis import name_sets, run_study
    from testtime.networks import load

    net = load(checkpoint).to(pick_device(device))
    with as_bad_arguments(DataError):
        names = name_sets(data)
    settings: dict[str, Any] = {"batch": batch, "single": single, "confident": confident, "precision": precision}

    def report(done: int, total: int, text: str) -> None:
        echo(f"{done}/{total}  {text}")

    run_study(net, names, out, root=data_root, limit=limit, progress=report, **settings)
