"""What hostile images in a stream cost: the error on the others, with and without the guard, and how fast it recovers.

    python benchmarks/poison.py --quick
    python benchmarks/poison.py --checkpoint cifar10-resnet26-gn-joint --data cifar10-c/gaussian_noise/5 \\
        --images 2000 --device cuda --out results/poison.json

Hostile images are spread over the middle third of a stream; the last third shows whether it recovers. The error is that
of the other images, which are the same in every run, with the same augmentations. Kinds:

    random      uniform noise
    constant    a gray image
    duplicate   one image of the stream, with a little noise
    task        images of the stream, changed by up to 8/255 to raise the loss that the method minimises
    classes     the same, so that the gradient of that loss raises the classes' loss: of other images, with labels

The last two know the network and the labels, but not what the stream has learned. For methods without the network's
task they attack the entropy of the predictions. `ttt` and `rehearsal` see single images, the others batches.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import testtime as tt
from testtime.adaptation.objectives import measure_entropy
from testtime.data.held_out import find_training_data
from testtime.provenance import describe_machine

KINDS = ("random", "constant", "duplicate", "task", "classes")
METHODS = ("ttt", "rehearsal", "tent", "eata", "cotta")
SINGLE = ("ttt", "rehearsal")
EPSILON, STEPS = 8 / 255, 5
WINDOW = 50  # images of the running error
CLOSE = 0.01  # above the error without hostile images, which counts as recovered
FIRST_HOSTILE = 1 << 30  # sample number


def make_losses(net: tt.YNet, method: str) -> Callable[[Tensor], Tensor]:
    """Return a function from images to the losses that a method minimises, or to entropies, `(N,)`."""
    if method not in SINGLE:
        return lambda images: measure_entropy(net(images))
    task = tt.tasks.make(net.card.task)

    def measure(images: Tensor) -> Tensor:
        views, targets = task.probe(images)
        return task.loss(net.self_supervise(views), targets).view(len(images), -1).mean(1)

    return measure


def attack(images: Tensor, goal: Callable[[Tensor], Tensor]) -> Tensor:
    """Raise the goal of each image, `(N,)`, by projected gradient steps of the sign."""
    moved = images.clone()
    for _ in range(STEPS):
        moved.requires_grad_(True)
        (gradient,) = torch.autograd.grad(goal(moved).sum(), moved)
        moved = moved.detach() + EPSILON / 3 * gradient.sign()
        moved = torch.minimum(torch.maximum(moved, images - EPSILON), images + EPSILON).clamp(0, 1)
    return moved


def make_hostile(kind: str, count: int, net: tt.YNet, method: str, images: Tensor, labels: Tensor) -> Tensor:
    """Return hostile images `(count, C, H, W)` for a stream of images in [0, 1]."""
    draws = tt.Draws.of(7, torch.arange(count, device=images.device))
    shape, chosen = images.shape[1:], images[torch.arange(count, device=images.device) * 7 % len(images)]
    if kind == "random":
        return draws.uniform(*shape)
    if kind == "constant":
        return torch.full((count, *shape), 0.5, device=images.device)
    if kind == "duplicate":
        return (images[:1] + (draws.uniform(*shape) - 0.5) * 4 / 255).clamp(0, 1)
    losses = make_losses(net, method)
    if kind == "task":
        return torch.cat([attack(part, losses) for part in chosen.split(64)])
    moving = [parameter for parameter in net.encoder.parameters() if parameter.requires_grad]
    known = images[:256], labels[:256]
    wanted = torch.autograd.grad(F.cross_entropy(net(known[0]), known[1]), moving)

    def goal(moved: Tensor) -> Tensor:
        """A step against this gradient raises the loss of the classes if their inner product is negative."""
        found = torch.autograd.grad(losses(moved).sum(), moving, create_graph=True)
        return -torch.stack([(a * b).sum() for a, b in zip(found, wanted, strict=True)]).sum().expand(len(moved))

    return torch.cat([attack(part, goal) for part in chosen.split(64)])


def place_hostile(count: int, hostile: int) -> list[int]:
    """Return the order of a stream: numbers of images, and -1, -2, … for hostile ones in the middle third."""
    order: list[int] = []
    first, last = count // 3, 2 * count // 3
    for number in range(count):
        if first <= number < last:
            span = last - first
            due = range(hostile * (number - first) // span, hostile * (number - first + 1) // span)
            order += [-1 - one for one in due]
        order.append(number)
    return order


def run_streams(
    net: tt.YNet, method: str, guard: Any, images: Tensor, hostile: Sequence[Tensor], batch: int, settings: dict
) -> list[tuple[Tensor, float]]:
    """Predict several streams of the same images, each with other hostile ones.

    Returns:
        For each, the predicted classes of the images, and the fraction of all updates that the guard undid.
    """
    orders = [place_hostile(len(images), len(some)) for some in hostile]

    def pick(stream: int, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = [images[place] if place >= 0 else hostile[stream][-1 - place] for place in places]
        numbers = [place if place >= 0 else FIRST_HOSTILE - place for place in places]
        return torch.stack(chosen), torch.tensor(numbers, device=images.device)

    classes = [torch.full((len(images),), -1, dtype=torch.int64, device=images.device) for _ in orders]
    undone = [0] * len(orders)

    def store(stream: int, places: Sequence[int], prediction: tt.Prediction) -> None:
        for row, place in enumerate(places):
            if place >= 0:
                classes[stream][place] = prediction.classes[row]
        undone[stream] += int(prediction.rolled_back.sum())

    if method in SINGLE:
        adapter = tt.Streams(net, len(orders), method=method, guard=guard, **settings)
        for step in range(max(map(len, orders))):
            active = [stream for stream, order in enumerate(orders) if step < len(order)]
            picked = [pick(stream, orders[stream][step : step + 1]) for stream in active]
            pictures, numbers = (torch.cat(parts) for parts in zip(*picked, strict=True))
            answers = adapter.predict(pictures, numbers, streams=torch.tensor(active, device=images.device))
            for row, stream in enumerate(active):
                store(stream, orders[stream][step : step + 1], answers[row : row + 1])
    else:
        online = tt.Online(net, method=method, guard=guard, **settings)
        for stream, order in enumerate(orders):
            online.reset()
            for first in range(0, len(order), batch):
                places = order[first : first + batch]
                store(stream, places, online.predict(*pick(stream, places)))
    return [(found, count / len(order)) for found, count, order in zip(classes, undone, orders, strict=True)]


def measure_recovery(wrong: Tensor, usual: Tensor) -> int | None:
    """Return after how many images of the last third the running error is about the usual again; None: never.

    Args:
        wrong: Which predictions are wrong, `(N,)`.
        usual: The same without hostile images.
    """
    start, width = 2 * len(wrong) // 3, min(WINDOW, len(wrong) // 6)
    for place in range(start, len(wrong) - width + 1):
        window = slice(place, place + width)
        if wrong[window].double().mean() <= usual[window].double().mean() + CLOSE:
            return place - start
    return None


def measure_method(
    net: tt.YNet, method: str, images: Tensor, labels: Tensor, fractions: Sequence[float], batch: int, settings: dict
) -> list[dict[str, Any]]:
    """Measure a method with every kind and fraction of hostile images, without and with the guard."""
    cases = [(kind, fraction) for kind in KINDS for fraction in fractions]
    counts = {fraction: max(1, round(fraction * len(images) / (1 - fraction))) for fraction in fractions}
    made = {kind: make_hostile(kind, max(counts.values()), net, method, images, labels) for kind in KINDS}
    hostile = [images[:0], *(made[kind][: counts[fraction]] for kind, fraction in cases)]
    rows: list[dict[str, Any]] = []
    for name, guard in (("rise", 3.0), ("guard", tt.Guard())):
        found = run_streams(net, method, guard, images, hostile, batch, settings)
        wrong = [classes != labels for classes, _ in found]
        for (kind, fraction), errors, (_, undone) in zip([("none", 0.0), *cases], wrong, found, strict=True):
            thirds = [round(float(part.double().mean()), 4) for part in errors.tensor_split(3)]
            rows.append(
                {
                    "method": method,
                    "guard": name,
                    "kind": kind,
                    "fraction": fraction,
                    "error": round(float(errors.double().mean()), 4),
                    "thirds": thirds,
                    "undone": round(undone, 4),
                    "recovered_after": measure_recovery(errors, wrong[0]),
                }
            )
    return rows


def open_stream(name: str, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the first images of a random order of a set, in [0, 1], and their labels."""
    test_set = tt.data.open(name)
    assert test_set.labels is not None
    order = tt.Draws.of(1, torch.arange(len(test_set))).keys.argsort()[:count]
    return test_set.images(order).to(device).float() / 255, test_set.labels[order].to(device)


def format_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format results as a table: errors without and with the guard."""
    lines = [f"{'method':10} {'hostile':10} {'share':>6}  {'error':>7} {'guarded':>8}  recovered after"]
    paired = {(row["method"], row["kind"], row["fraction"]): row for row in rows if row["guard"] == "guard"}
    for row in rows:
        if row["guard"] == "rise":
            other = paired[row["method"], row["kind"], row["fraction"]]
            after = ["never" if one["recovered_after"] is None else one["recovered_after"] for one in (row, other)]
            lines.append(
                f"{row['method']:10} {row['kind']:10} {row['fraction']:6.0%}  {row['error']:7.1%} "
                f"{other['error']:8.1%}  {after[0]} / {after[1]}"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="What hostile images in a stream cost, with and without the guard.")
    parser.add_argument("--quick", action="store_true", help="60 images, 10%% hostile, 4 copies: a minute, no result")
    parser.add_argument("--checkpoint", default="digits-resnet8-gn-joint", help="a network with a trained branch")
    parser.add_argument("--data", action="append", help="sets (default: digits-c/gaussian_noise/5)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.01, 0.05, 0.1])
    parser.add_argument("--images", type=int, default=500, help="images of a stream that are not hostile")
    parser.add_argument("--batch", type=int, default=64, help="of the methods that need batches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    settings: dict[str, Any] = {}
    if given.quick:
        given.images, given.fractions, given.batch = min(given.images, 60), [0.1], 16
        settings = {"copies": 4, "lr": 0.02}  # high, since the stream is short
        torch.set_num_threads(1)  # steps this small are slower on several
    warnings.simplefilter("ignore")  # about batches of single images
    net = tt.load(given.checkpoint).to(given.device)
    if net.statistics is None and "eata" in given.methods:
        source = find_training_data(net.card.record)
        if source is None:
            parser.error(f"{given.checkpoint} has no statistics, which eata needs: leave it out with --methods.")
        tt.collect(net, tt.data.open(source, split="train"), count=500)
    if not net.card.augment.get("flip", True):
        settings["mirrored"] = False  # the classes are not those of the mirror image
    begin, results = time.perf_counter(), {}
    for name in given.data or ["digits-c/gaussian_noise/5"]:
        images, labels = open_stream(name, given.images, given.device)
        results[name] = [
            row
            for method in given.methods
            for row in measure_method(net, method, images, labels, given.fractions, given.batch, settings)
        ]
        print(f"{name}, {len(images):,} images", *format_rows(results[name]), sep="\n")
    seconds = round(time.perf_counter() - begin, 1)
    print(f"{seconds} s")
    if given.out is not None:
        words = sys.argv[1:] if arguments is None else arguments
        about: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/poison.py", *words])}
        about |= {"checkpoint": given.checkpoint, "images": given.images, "batch": given.batch, "settings": settings}
        about |= {"guard": tt.Guard().describe(), "window": WINDOW, "epsilon": EPSILON, "seconds": seconds}
        about |= describe_machine(torch.device(given.device))
        given.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
