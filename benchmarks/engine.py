"""How fast test-time training runs: a naive loop, the eager reference, one stream, many at once.

    python benchmarks/engine.py --quick                       # two CPU cores, about a minute
    python benchmarks/engine.py --device cuda --out results/engine-h200.json

A step is forward, backward and update on the augmented copies of one image; images/s counts whole answers, with what an
adapter does besides learning (observing the image before and after, the guard). The naive loop is how the method is
usually written: each copy augmented by itself as a Pillow picture, the network eager, one image at a time. The eager
reference is the adapter without CUDA graphs and, on a CPU, without custom kernels (`TESTTIME_KERNELS=off`). Plain
training is steps of the same network on large batches, counted as steps of as many images as there are copies: what the
hardware gives when nothing has to be separate.

Streams and episodes that do not fit into the memory at once are computed in groups, and so are streams whose tensors
would be too large for the fast kernels; the row says how many are computed at once. Peak memory is all that torch has
taken from the GPU while a row is measured, recorded graphs included.

On a CPU the rows alternate, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional as F

from testtime.adaptation.adapters import Adapter, Episodic, Online
from testtime.adaptation.learner import Learner
from testtime.adaptation.streams import Streams
from testtime.networks import YNet, resnet18, resnet26
from testtime.provenance import describe_machine
from testtime.tasks import Rotation

Row = dict[str, Any]

# How many episodes and streams run at once on CUDA, by the arithmetic; the last is for ResNet-18 at 224×224.
COUNTS = {"fp32": (4, 16, 64), "tf32": (64, 256), "bf16": (4, 16, 64, 256, 1024)}
LARGE_COUNTS = {"fp32": (), "tf32": (), "bf16": (4, 16, 64, 256)}


def naive_step(
    net: YNet, optimizer: torch.optim.Optimizer, image: Image.Image, copies: int, rng: random.Random
) -> None:
    """One step as it is usually written: each copy a picture, padded, cropped, flipped, turned by itself."""
    side, turns, views = image.size[0], [], []
    for _ in range(copies):
        padded = ImageOps.expand(image, 4)
        left, top = rng.randrange(9), rng.randrange(9)
        view = padded.crop((left, top, left + side, top + side))
        if rng.random() < 0.5:
            view = ImageOps.mirror(view)
        turn = rng.randrange(4)
        pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255
        views.append(torch.rot90(pixels, turn, (1, 2)))
        turns.append(turn)
    device = next(net.parameters()).device
    batch, targets = torch.stack(views).to(device), torch.tensor(turns).to(device)
    net.train()
    optimizer.zero_grad()
    F.cross_entropy(net.self_supervise(batch), targets).backward()
    optimizer.step()


def naive(net: YNet, images: torch.Tensor, copies: int, steps: int, online: bool, lr: float = 0.001) -> None:
    """The usual loop: online continues with what it learned, otherwise every image starts from the trained weights."""
    net, rng = copy.deepcopy(net), random.Random(0)
    trained = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD([*net.encoder.parameters(), *net.ssl.parameters()], lr=lr)
    for image in images.cpu():
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        if not online:
            net.load_state_dict(trained)
        for _ in range(steps):
            naive_step(net, optimizer, picture, copies, rng)
        net.eval()
        with torch.no_grad():
            net(image[None].to(next(net.parameters()).device)).argmax(1).item()


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, device: str, work: Any, count: int, steps: int, budget: float) -> Row:
    """Run `work()`, which answers `count` images in `steps` steps each, for `budget` seconds; the median counts."""
    work()  # warm up: compile, capture, allocate
    synchronise(device)
    if device == "cuda":
        torch.cuda.empty_cache()  # what trials and earlier rows left; recorded graphs hold theirs
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while sum(times) < budget or len(times) < 3:
        times.append(take_time(work, device))
    peak = torch.cuda.max_memory_reserved() / 2**20 if device == "cuda" else None
    return summarise(name, times, count, steps, peak)


def take_time(work: Any, device: str) -> float:
    begin = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - begin


def summarise(name: str, times: list[float], count: int, steps: int, peak: float | None) -> Row:
    median = sorted(times)[len(times) // 2]
    row = {"name": name, "images_per_s": count / median, "steps_per_s": count * steps / median, "runs": len(times)}
    return row | {"spread": (max(times) - min(times)) / median, "peak_mib": peak}


def adapter_row(name: str, adapter: Adapter, images: torch.Tensor, steps: int, device: str, budget: float) -> Row:
    return measure(name, device, lambda: adapter.predict(images), len(images), steps, budget)


def note_groups(row: Row, count: int, at_once: int) -> Row:
    """The row, with how many are computed at once where that is fewer than all."""
    return row if at_once >= count else row | {"name": f"{row['name']}, {at_once} at once"}


def large_batch(
    net: YNet, size: int, batch: int, copies: int, device: str, precision: str, compiled: bool, budget: float
) -> Row:
    """Plain training steps of the rotation branch on one large batch, in units of `copies` images."""
    net = copy.deepcopy(net).train().to(memory_format=torch.channels_last)
    parameters = [*net.encoder.parameters(), *net.ssl.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.001)
    images = torch.rand(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    targets = torch.randint(4, (batch,), device=device)

    def loss_of(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            return F.cross_entropy(net.self_supervise(images), targets)

    function = torch.compile(loss_of) if compiled else loss_of

    def work() -> None:
        optimizer.zero_grad()
        function(images, targets).backward()
        optimizer.step()

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    kind = "compiled" if compiled else "eager"
    return measure(f"plain training, batch {batch}, {kind}, {precision}", device, work, batch // copies, 1, budget)


def make_eager(adapter: Adapter, images: torch.Tensor) -> Adapter:
    """The adapter without graph replay: the readable reference."""
    adapter.predict(images[:1])
    learners = adapter._learners.values() if isinstance(adapter, Episodic) else [adapter._learned]
    for learner in learners:
        assert isinstance(learner, Learner)
        learner.eager = True
    return adapter


class Table:
    """The rows of one network, printed and stored as they come, compared with its naive loop and its plain training."""

    def __init__(self, network: str, store: Callable[[Row], None]) -> None:
        self.network, self.store = network, store
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        # Standard episodes are compared with the naive standard loop, everything else with the naive online one.
        standard = "10 steps" in row["name"] or "standard" in row["name"]
        rates = [one["steps_per_s"] for one in [*self.rows, row] if one["name"].startswith("naive")]
        naive_rate = rates[1 if standard and len(rates) > 1 else 0]
        row = {"network": self.network} | row | {"times_naive": row["steps_per_s"] / naive_rate}
        self.rows.append(row)
        self.store(row)
        memory = f"{row['peak_mib']:9.0f} MiB" if row["peak_mib"] else ""
        plain = max((one["steps_per_s"] for one in self.rows if one["name"].startswith("plain")), default=None)
        limit = "" if plain is None else f"{row['steps_per_s'] / plain:6.2f} × plain training"
        print(
            f"{row['name']:46s} {row['steps_per_s']:10.1f} steps/s {row['images_per_s']:10.1f} images/s "
            f"{row['times_naive']:7.2f} × naive {limit} {memory}",
            flush=True,
        )


def run_cpu(
    label: str, net: YNet, size: int, copies: int, options: argparse.Namespace, store: Callable[[Row], None]
) -> None:
    """All rows of one network on a CPU, measured alternately, round after round."""
    net, table = net.eval(), Table(label, store)
    pool = torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8)
    task: dict[str, Any] = {"copies": copies, "task": Rotation()}
    print(f"\n{label}, {size}×{size}, {copies} copies", flush=True)

    def without_kernels(adapter: Adapter, images: torch.Tensor) -> None:
        with mock.patch.dict(os.environ, {"TESTTIME_KERNELS": "off"}):
            adapter.predict(images)

    confidence = Episodic(net, steps=0, **task).predict(pool[:10]).confidence.sort().values
    stream, episode = Online(net, **task), Episodic(net, parallel=1, **task)
    gated = Episodic(net, parallel=1, threshold=float(confidence[2]), **task)
    plain_stream, plain_episode = Online(net, **task), Episodic(net, parallel=1, **task)
    # name, work, images, steps for each
    rows: list[tuple[str, Any, int, int]] = [
        ("naive loop, online", lambda: naive(net, pool[:8], copies, 1, online=True), 8, 1),
        ("naive loop, standard, 10 steps", lambda: naive(net, pool[:1], copies, 10, online=False), 1, 10),
        ("eager reference, online", lambda: without_kernels(plain_stream, pool[:8]), 8, 1),
        ("eager reference, standard, 10 steps", lambda: without_kernels(plain_episode, pool[:1]), 1, 10),
        ("one online stream", lambda: stream.predict(pool[:8]), 8, 1),
        ("one episode of 10 steps", lambda: episode.predict(pool[:1]), 1, 10),
        ("standard, gate adapts 20% of the images", lambda: gated.predict(pool[:10]), 10, 10),
    ]
    for count in options.counts:
        streams, episodes = Streams(net, count, **task), Episodic(net, parallel=count, **task)
        images = pool[:count]
        rows.append((f"{count} streams", lambda s=streams, i=images: s.predict(i), count, 1))
        rows.append((f"{count} episodes of 10 steps", lambda e=episodes, i=images: e.predict(i), count, 10))
    times: dict[str, list[float]] = {name: [] for name, *_ in rows}
    for _, work, *_ in rows:
        work()  # warm up: compile, allocate
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds * len(rows) or len(times[rows[0][0]]) < 3:
        for name, work, *_ in rows:
            times[name].append(take_time(work, "cpu"))
    plain = large_batch(net, size, 256, copies, "cpu", "fp32", False, options.seconds)
    ours = [summarise(name, times[name], count, steps, None) for name, _, count, steps in rows]
    for row in (*ours[:4], plain, *ours[4:]):  # plain training before what is measured by it
        table.add(row)


def run(
    label: str, net: YNet, size: int, copies: int, options: argparse.Namespace, store: Callable[[Row], None]
) -> None:
    """All rows of one network; `store` is called with each as it comes."""
    if options.device == "cpu":
        return run_cpu(label, net, size, copies, options, store)
    device, budget = options.device, options.seconds
    small = size < 100
    table = Table(label, store)
    net = net.to(device).eval()
    pool = torch.randint(0, 256, (1024 if small else 256, 3, size, size), dtype=torch.uint8)
    task: dict[str, Any] = {"copies": copies, "task": Rotation()}
    print(f"\n{label}, {size}×{size}, {copies} copies")

    def loop(count: int, steps: int) -> None:
        naive(net, pool[:count], copies, steps, online=steps == 1)

    few = 8 if small else 2
    table.add(measure("naive loop, online", device, lambda: loop(few, 1), few, 1, budget))
    table.add(measure("naive loop, standard, 10 steps", device, lambda: loop(1, 10), 1, 10, budget))
    if not options.package_only:
        reference = make_eager(Online(net, **task), pool)
        table.add(adapter_row("eager reference, online", reference, pool[:few], 1, device, budget))
        reference = make_eager(Episodic(net, parallel=1, **task), pool)
        table.add(adapter_row("eager reference, standard, 10 steps", reference, pool[:1], 10, device, budget))
        # Compiling takes longer than everything else here, so only the fastest arithmetic is compiled.
        for precision, compiled in (("tf32", False), ("bf16", False), ("bf16", True)):
            batch = 8192 if small else 512
            table.add(large_batch(net, size, batch, copies, device, precision, compiled, budget))
            torch.cuda.empty_cache()
    for precision, counts in (COUNTS if small else LARGE_COUNTS).items():
        fast = task | {"precision": precision}
        stream = pool[: 64 if small else 8]
        table.add(adapter_row(f"one online stream, {precision}", Online(net, **fast), stream, 1, device, budget))
        for count in (options.counts or counts) if counts else ():
            images = pool[:count]
            streams = Streams(net, count, **fast)
            row = adapter_row(f"{count} streams, {precision}", streams, images, 1, device, budget)
            table.add(note_groups(row, count, streams.together))
            del streams
            episodes = Episodic(net, parallel=count, **fast)
            row = adapter_row(f"{count} episodes of 10 steps, {precision}", episodes, images, 10, device, budget)
            table.add(note_groups(row, count, int(episodes.parallel)))
            del episodes
            if not small:
                name = f"{count} episodes of 10 steps, {precision}, as many at once as `Episodic` chooses"
                table.add(adapter_row(name, Episodic(net, **fast), images, 10, device, budget))
            torch.cuda.empty_cache()
    if small:
        images = pool[:200]
        confidence = Episodic(net, steps=0, **task).predict(images).confidence.sort().values
        threshold = float(confidence[len(images) // 5])
        gated = Episodic(net, parallel=64, threshold=threshold, **task)
        table.add(adapter_row("standard, gate adapts 20% of the images", gated, images, 10, device, budget))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="fewer sizes and shorter measurements")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--small-only", action="store_true", help="ResNet-26 only")
    chosen.add_argument("--large-only", action="store_true", help="ResNet-18 at 224×224 only, on CUDA")
    parser.add_argument("--package-only", action="store_true", help="no eager reference, no plain training; on CUDA")
    parser.add_argument("--counts", type=int, nargs="+", help="how many episodes and streams at once")
    parser.add_argument("--seconds", type=float, help="seconds to measure each row")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    options.seconds = options.seconds or (1.0 if options.quick or options.device == "cuda" else 6.0)
    if options.device == "cpu" and not options.counts:
        options.counts = (4,) if options.quick else (4, 16)
    machine = describe_machine(torch.device(options.device))
    where = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{machine['hardware']['processor']}, {torch.get_num_threads()} threads"
    )
    versions, load = machine["versions"], round(os.getloadavg()[0], 2)
    print(f"{where}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    command = shlex.join(["python", "benchmarks/engine.py", *sys.argv[1:]])
    document: dict[str, Any] = {"command": command, "hardware": where, "versions": versions}
    document |= {"load_average_before": load, "rows": []}

    def store(row: Row) -> None:  # after every row: what was measured outlives whatever comes then
        document["rows"].append(row)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    if not options.large_only:
        run("resnet26", resnet26(), 32, 32, options, store)
    if options.device == "cuda" and not options.small_only:
        run("resnet18", resnet18(1000), 224, 64, options, store)


if __name__ == "__main__":
    main()
