"""How fast gradients of single images are measured: a loop of backward passes, `torch.func`, a replica for each image.

    python benchmarks/gradients.py --quick                          # two CPU cores, under a minute
    python benchmarks/gradients.py --out results/gradients-cpu.json

Each row gives the inner products, by layer, of the main and the rotation gradient on the shared encoder for each image.
The loop is how it is usually written: for each image a backward pass of the one loss, then of the other, with torch's
own threads. `torch.func` maps the gradient over a chunk of images. A replica of the encoder for each image is our way.
All give the same numbers; the largest difference from the loop's, against the largest number, is printed. The
arithmetic is the same for all and bounds what a CPU can do: the last row is one backward pass of each loss for a whole
chunk, which gives the sum of the gradients and nothing about single images. The rows alternate, so that whatever else
the machine does falls on all of them; measure on one that is idle all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from testtime.diagnosis.gradients import ImageGradients
from testtime.networks import YNet, resnet26
from testtime.provenance import describe_machine
from testtime.randomness import Draws
from testtime.tasks import Rotation

TASK = Rotation("all")


def loop(net: YNet, images: Tensor, labels: Tensor) -> Tensor:
    """Inner products `(N,)`, one image and one loss at a time."""
    parameters, found = list(net.encoder.parameters()), []
    for number in range(len(images)):
        net.zero_grad()
        F.cross_entropy(net(images[number : number + 1]), labels[number : number + 1]).backward()
        main = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        net.zero_grad()
        views, targets = TASK.probe(images[number : number + 1])
        F.cross_entropy(net.self_supervise(views), targets).backward()
        task = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found.append(torch.stack([(one * two).sum() for one, two in zip(main, task, strict=True)]).sum())
    return torch.stack(found)


def by_replicas(meter: ImageGradients, images: Tensor, labels: Tensor) -> Tensor:
    """The same, a replica for each image of a chunk: testtime's way."""
    parts = zip(images.split(meter.chunk), labels.split(meter.chunk), strict=True)
    return torch.cat([meter.products(one, two[None]).inner.sum((0, 1)) for one, two in parts])


def by_func(net: YNet, images: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """The same through `torch.func`."""
    parameters = {name: parameter.detach() for name, parameter in net.encoder.named_parameters()}

    def encode(tensors: dict[str, Tensor], pixels: Tensor) -> Tensor:
        return functional_call(net.encoder, tensors, net.normalise(pixels))

    def main_loss(tensors: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(net.classifier(encode(tensors, image[None])), label[None])

    def task_loss(tensors: dict[str, Tensor], image: Tensor) -> Tensor:
        views, targets = TASK.probe(image[None])
        return F.cross_entropy(net.ssl(encode(tensors, views)), targets)

    found = []
    for one, two in zip(images.split(chunk), labels.split(chunk), strict=True):
        main = vmap(grad(main_loss), (None, 0, 0))(parameters, one, two)
        task = vmap(grad(task_loss), (None, 0))(parameters, one)
        found.append(torch.stack([(main[name] * task[name]).flatten(1).sum(1) for name in parameters]).sum(0))
    return torch.cat(found)


def whole(net: YNet, images: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Gradients of chunks, not of images: what the arithmetic alone costs."""
    parameters, found = list(net.encoder.parameters()), []
    for one, two in zip(images.split(chunk), labels.split(chunk), strict=True):
        views, targets = TASK.probe(one)
        main = torch.autograd.grad(F.cross_entropy(net(one), two), parameters)
        task = torch.autograd.grad(F.cross_entropy(net.self_supervise(views), targets), parameters)
        found.append(torch.stack([(a * b).sum() for a, b in zip(main, task, strict=True)]).sum())
    return torch.stack(found)


def run(name: str, net: YNet, shape: tuple[int, int, int], count: int, repeats: int) -> list[dict[str, Any]]:
    """All rows of one network, measured alternately, round after round."""
    images = Draws.of(0, torch.arange(count)).uniform(*shape)
    labels = Draws.of(1, torch.arange(count)).integers(10)
    meter = ImageGradients(net, TASK)
    net = net.eval().requires_grad_(True)
    few = count // 4
    works: dict[str, tuple[Callable[[], Tensor], int]] = {
        "loop of backward passes": (lambda: loop(net, images[:few], labels[:few]), few),
        "torch.func": (lambda: by_func(net, images, labels, 32), count),
        "a replica for each image": (lambda: by_replicas(meter, images, labels), count),
        "gradient of the chunk alone": (lambda: whole(net, images, labels, 32), count),
    }
    print(f"\n{name}, {shape[1]}×{shape[2]}, {count} images")
    results = {title: work() for title, (work, _) in works.items()}  # warm up: compile, allocate
    times: dict[str, list[float]] = {title: [] for title in works}
    for _ in range(repeats):
        for title, (work, done) in works.items():
            begin = time.perf_counter()
            work()
            times[title].append(1000 * (time.perf_counter() - begin) / done)
    reference, rows = next(iter(works)), []
    truth = results[reference].detach()
    for title, own in times.items():
        single = len(results[title]) >= len(truth)
        off = (results[title][: len(truth)].detach() - truth).abs().max() / truth.abs().max() if single else None
        median = statistics.median(own)
        row: dict[str, Any] = {"network": name, "name": title, "ms_per_image": median}
        row["spread"] = (max(own) - min(own)) / median
        row["times_loop_by_round"] = [one / two for one, two in zip(times[reference], own, strict=True)]
        row["times_loop"] = statistics.median(row["times_loop_by_round"])  # of the same minute: noise falls on both
        row["difference"] = None if off is None else float(off)
        rows.append(row)
        rounds = " ".join(f"{one:.2f}" for one in row["times_loop_by_round"])
        error = "" if off is None else f"  difference {float(off):.1e}"
        print(
            f"{title:30s} {median:8.2f} ms an image  {row['times_loop']:5.2f} × the loop ({rounds}){error}", flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer images and runs")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    count, repeats = (32, 3) if options.quick else (128, 21)
    machine = describe_machine(torch.device("cpu")) | {"load_at_start": os.getloadavg()[0]}
    print(", ".join(f"{key} {value}" for key, value in machine["hardware"].items()))
    rows = run("resnet26", resnet26(), (3, 32, 32), count, repeats)
    rows += run("resnet8", resnet26(depth=8, channels=1, size=16), (1, 16, 16), 4 * count, repeats)
    if options.out:
        document = {
            **machine,
            "command": "python benchmarks/gradients.py",
            "images": count,
            "runs": repeats,
            "rows": rows,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
