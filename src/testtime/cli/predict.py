"""`testtime predict`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from testtime.cli.console import as_bad_arguments, echo, pick_device, progress
from testtime.cli.options import METHOD, Checkpoint, Classes, Device, Images, Json, Weights, open_network

if TYPE_CHECKING:
    from testtime.data import DataError

_TOGETHER = 16  # images per call on GPUs and for methods that need batches
_UNLIKE = (
    "unlike the training images: the network may know nothing like it, and its answer may mean nothing. "
    "It does not notice all such images."
)

IsOnline = Annotated[bool, Option("--online", help="Carry the adapted network over to the next image.")]
MethodName = Annotated[
    str | None,
    Option(
        help="Adaptation method: ttt, best, tent, cotta, lame, …; most imply --online.",
        show_default="ttt, each image separately",
        rich_help_panel=METHOD,
    ),
]
Steps = Annotated[
    int | None, Option(min=0, help="Gradient steps per image.", show_default="10; online 1", rich_help_panel=METHOD)
]
Lr = Annotated[float | None, Option(help="Learning rate.", show_default="0.001", rich_help_panel=METHOD)]
Copies = Annotated[
    int | None, Option(min=1, help="Augmented copies per step.", show_default="32", rich_help_panel=METHOD)
]
Threshold = Annotated[
    float | None,
    Option(
        min=0,
        max=1,
        help="Adapt only where the confidence of the self-supervised task is below this.",
        show_default="1",
        rich_help_panel=METHOD,
    ),
]
Seed = Annotated[int, Option(help="Seed of the augmentations.", rich_help_panel=METHOD)]


def predict(
    images: Images,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    classes: Classes = None,
    online: IsOnline = False,
    method: MethodName = None,
    steps: Steps = None,
    lr: Lr = None,
    copies: Copies = None,
    threshold: Threshold = None,
    seed: Seed = 0,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Classify images before and after adaptation.

    The central square of an image is resized to the network's input size. The
    last column is the change in probability of the class predicted after
    adaptation, in percentage points. The seed and the content of a file, not its
    position, decide the augmentations. Settings that are not given are those that
    the network's card recommends (see testtime info), and otherwise the paper's.
    Images unlike those of the training are marked; not every image of an unknown
    class is. Image files that are missing or unreadable are reported and left out;
    the exit code is then 1.

    Examples:
      testtime predict cat.jpg
      testtime predict holiday/ --online --json
      testtime predict holiday/ --method best
      testtime predict *.png -c runs/photos/network.safetensors --steps 1
      testtime predict *.png -m timm:resnet50 --weights w.pth --method tent
    """
    import torch

    from testtime.adaptation.methods import find_method
    from testtime.data.pictures import SUFFIXES
    from testtime.evaluation import predict_files
    from testtime.kernels import tuning
    from testtime.storage import find_files

    with as_bad_arguments():
        chosen = find_method(method or "ttt")
    picked = pick_device(device)
    online = online or (method is not None and chosen.mode == "online")
    pictures = find_files(images, SUFFIXES, "images")
    name, net = open_network(checkpoint, weights, classes, chosen.needs_branch, picked, silent=not as_json)
    batched = "batch" in chosen.needs
    together = _TOGETHER if batched or (tuning(torch.device(picked)).waits and not online) else 1
    settings: dict[str, Any] = {"steps": steps, "lr": lr, "copies": copies, "threshold": threshold, "seed": seed}
    with as_bad_arguments():
        adapter = predict_files.prepare_adapter(net, online, together, method=method, **settings)
    unread: list[str] = []

    def skip(fault: DataError) -> None:
        unread.append(str(fault))
        echo(f"error: {fault}", err=True)

    usual = None if net.statistics is None else net.statistics.about
    answers = predict_files.predict(adapter, net.card, pictures, together, skip, net.channels, usual)
    if as_json:
        found = []
        with progress("pictures") as report:
            for answer in answers:
                found.append(asdict(answer))
                report(len(found) + len(unread), len(pictures), "")
        typer.echo(json.dumps({"network": name, "answers": found, "unread": unread}, indent=1))
    else:
        unlike = 0
        for number, answer in enumerate(answers):
            if number == 0:
                echo(predict_files.format_classes(name, net.card.classes), err=True)
            echo(predict_files.format_answer(answer))
            unlike += answer.familiar is False
        if unlike:
            echo(f"{unlike} of {len(pictures) - len(unread)}: {_UNLIKE}", err=True)
    if unread:
        raise typer.Exit(1)
