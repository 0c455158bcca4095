"""Which custom kernels earn their place: each kind measured against what would do its work without it.

    python benchmarks/kernels.py --quick                                       # two CPU cores, a few minutes
    python benchmarks/kernels.py --out results/kernels-cpu.json
    python benchmarks/kernels.py --device cuda --out results/kernels-h200.json

On CUDA the contestants are the kernels in CUDA C++ (compiled by NVRTC) together with those in Triton, and Triton alone.
On a CPU they are the kernels in C++, with and without those for strided convolutions, plain torch
(`TESTTIME_KERNELS=off`), and `torch.compile` of plain torch with warm caches; what the first use of each costs, with
empty caches and with filled ones, is measured in processes of their own.

Contestants alternate, round after round, so that whatever else the machine does falls on all of them. A gain is the
median over rounds of the ratio of two times taken in one round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from testtime import kernels
from testtime.adaptation.adapters import Episodic, Online
from testtime.adaptation.streams import Streams
from testtime.diagnosis.gradients import ImageGradients
from testtime.networks import YNet, resnet18, resnet26
from testtime.precision import Precision
from testtime.provenance import describe_machine
from testtime.tasks import Rotation

Row = dict[str, Any]
# name → how to build it, side of its images, copies
NETWORKS: dict[str, tuple[Callable[[], YNet], int, int]] = {
    "resnet26": (resnet26, 32, 32),
    "resnet8": (lambda: resnet26(depth=8, channels=1, size=16), 16, 32),
    "resnet18": (lambda: resnet18(1000), 224, 64),
}
Switch = Callable[[], contextlib.AbstractContextManager[Any]]


def never(*_: Any) -> bool:  # not a mock: torch.compile traces through it
    return False


def with_all() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def plain_torch() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {"TESTTIME_KERNELS": "off"})


def without_strided() -> contextlib.AbstractContextManager[Any]:
    rows = kernels.TABLE["convolve", "cpu"]
    fewer = tuple(row for row in rows if row.code != "cpu:convolve_strided")
    return mock.patch.dict(kernels.TABLE, {("convolve", "cpu"): fewer})


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Plain torch, its layers compiled part by part as replicas are made."""
    from testtime.networks import replicas

    def compile_part(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            part = make(*arguments)
            if not isinstance(part, replicas.MappedPart):
                part.forward = torch.compile(part.forward, dynamic=False)
            return part

        return made

    names = ("replicate", "share")
    torch._dynamo.config.recompile_limit = 64  # every size of a batch is compiled by itself
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(kernels.TABLE, clear=True))  # and no variable for torch.compile to trace
        for name in names:
            stack.enter_context(mock.patch.object(replicas, name, compile_part(getattr(replicas, name))))
        yield


def triton_alone() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("testtime.kernels.cuda.nvrtc._works", never)


CONTESTANTS: dict[str, dict[str, Switch]] = {
    "cpu": {
        "C++": with_all,
        "C++ without strided.h": without_strided,
        "plain torch": plain_torch,
        "torch.compile": compiled,
    },
    "cuda": {"CUDA C++ and Triton": with_all, "Triton alone": triton_alone},
}


def make_work(kind: str, net: YNet, count: int, size: int, settings: dict[str, Any]) -> tuple[Callable[[], Any], int]:
    """Something to do with images, and how many steps it takes."""
    channels = net.channels or 3
    device = next(net.parameters()).device
    images = torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8)
    if kind == "gradients of single images":
        labels = torch.zeros(1, count, dtype=torch.int64)
        meter = ImageGradients(net, Rotation("all"))
        parts = list(zip(images.split(meter.chunk), labels.split(meter.chunk, 1), strict=True))
        return lambda: [meter.products(*part) for part in parts], count
    if kind == "online":
        many = images.repeat(64 if size < 100 and device.type == "cuda" else 8 if size < 100 else 1, 1, 1, 1)
        adapter, steps = Online(net, **settings), len(many)
        return lambda: adapter.predict(many), steps
    adapter = Streams(net, count, **settings) if kind == "streams" else Episodic(net, parallel=count, **settings)
    return lambda: adapter.predict(images), count * adapter.settings.steps


def measure(name: str, kind: str, count: int, options: argparse.Namespace, precision: Precision) -> Row:
    """The contestants on one kind of work, alternating."""
    make, size, copies = NETWORKS[name]
    net = make().to(options.device).eval()
    if name == "resnet18" and options.device == "cpu":
        copies = 16  # of more, a step takes a minute
    settings: dict[str, Any] = {"copies": copies, "task": Rotation(), "precision": precision}
    works: dict[str, Callable[[], Any]] = {}
    steps = 0
    for who, switch in CONTESTANTS[options.device].items():
        works[who], steps = make_work(kind, net, count, size, settings)
        with switch():
            for _ in range(2):  # compile, record
                works[who]()
    times: dict[str, list[float]] = {who: [] for who in works}
    first, *others = works
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds or len(times[first]) < 5:
        for who, switch in CONTESTANTS[options.device].items():
            with switch():
                synchronise(options.device)
                start = time.perf_counter()
                works[who]()
                synchronise(options.device)
                times[who].append(time.perf_counter() - start)
    row: Row = {"network": name, "work": f"{count} {kind}", "precision": precision, "rounds": len(times[first])}
    row["steps_per_s"] = {who: steps / median(times[who]) for who in times}
    row["gain"] = {who: median(b / a for a, b in zip(times[first], times[who], strict=True)) for who in others}
    gains = ", ".join(f"{gain:.2f} × {who}" for who, gain in row["gain"].items())
    print(f"{name:9s} {row['work']:30s} {precision:5s} {row['steps_per_s'][first]:9.1f} steps/s  {gains}", flush=True)
    return row


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def first_use(who: str) -> None:
    """In a process of its own: seconds until a first answer, importing excluded."""
    with CONTESTANTS["cpu"][who]():
        begin = time.perf_counter()
        Online(resnet26().eval(), copies=32).predict(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
        print(time.perf_counter() - begin)


def measure_first_use() -> dict[str, dict[str, float]]:
    """Seconds of a first answer with empty caches and with filled ones."""
    found: dict[str, dict[str, float]] = {}
    for who in ("C++", "plain torch", "torch.compile"):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            command = [sys.executable, __file__, "--first-use", who]

            def seconds(command: list[str] = command, caches: dict[str, str] = caches) -> float:
                done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=True)
                return float(done.stdout.split()[-1])

            found[who] = {"cold": seconds(), "warm": median(seconds() for _ in range(3))}
        print(
            f"first answer, {who}: {found[who]['cold']:.1f} s with empty caches, {found[who]['warm']:.1f} s after",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="fewer rows and shorter measurements")
    parser.add_argument("--seconds", type=float, help="seconds to measure each row")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--first-use", choices=CONTESTANTS["cpu"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_use:
        return first_use(options.first_use)
    options.seconds = options.seconds or (3.0 if options.quick or options.device == "cuda" else 30.0)
    command = shlex.join(["python", "benchmarks/kernels.py", *sys.argv[1:]])
    machine = describe_machine(torch.device(options.device))
    document: dict[str, Any] = {"command": command, **machine, "rows": []}

    def store(row: Row) -> None:
        document["rows"].append(row)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    if options.device == "cpu":
        document["first_use_s"] = measure_first_use()
        work = [("resnet26", "online", 1), ("resnet26", "episodes", 1)]
        if not options.quick:
            work += [("resnet26", "streams", 4), ("resnet26", "streams", 16), ("resnet8", "online", 1)]
            work += [(name, "gradients of single images", 64) for name in ("resnet26", "resnet8")]
            work += [("resnet18", "online", 1)]
    else:
        kinds = [("online", 1), ("streams", 64), ("episodes", 64), ("streams", 1024), ("episodes", 1024)]
        work = [("resnet26", *kind) for kind in kinds]
        work += [("resnet18", *kind) for kind in (("online", 1), ("streams", 16), ("episodes", 16))]
    for name, kind, count in work:
        for precision in ("fp32",) if options.device == "cpu" else ("bf16", "tf32"):
            store(measure(name, kind, count, options, precision))
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
