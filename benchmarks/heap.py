"""What the command line gains by reusing freed memory, see `testtime.heap`.

    python benchmarks/heap.py --quick
    python benchmarks/heap.py --out results/heap-cpu.json

Each computation runs in processes of its own, with and without in turn: the time of a step after a first one, and the
peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import testtime as tt
from testtime.heap import reuse_memory
from testtime.provenance import describe_machine
from testtime.training import Pool, Trainer, Training


def make_training(recipe: tt.Recipe) -> Callable[[], object]:
    """A training step of ResNet-26 on a batch of 128."""
    images = torch.randint(256, (2560, 3, 32, 32), dtype=torch.uint8)
    pool = Pool("images", images, torch.arange(2560) % 10, torch.device("cpu"))
    trainer = Trainer([Training(tt.resnet26(), recipe, pool, None)])
    trainer.set_lr(0.01)
    trainer.model.train()
    steps = trainer.batches(0)
    return lambda: trainer.step(*next(steps))


def make_stream(net: tt.YNet, images: int, size: int, **settings: Any) -> Callable[[], object]:
    """A call of `Online`."""
    adapter, given = tt.Online(net, **settings), torch.rand(images, 3, size, size)
    return lambda: adapter.predict(given)


def make_streams(count: int) -> Callable[[], object]:
    """A call with an image of each of several streams."""
    adapter = tt.Streams(tt.load("cifar10-resnet26-gn-joint"), count)
    given, numbers = torch.rand(count, 3, 32, 32), torch.arange(count)
    return lambda: adapter.predict(given, numbers)


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "joint training, ResNet-26, batch 128": lambda: make_training(tt.Recipe()),
    "robust training, ResNet-26, batch 128": lambda: make_training(tt.Recipe.robust()),
    "one stream, ResNet-26, 16 images": lambda: make_stream(tt.load("cifar10-resnet26-gn-joint"), 16, 32),
    "16 streams, ResNet-26": lambda: make_streams(16),
    "TENT, ResNet-26, 200 images": lambda: make_stream(tt.load("cifar10-resnet26-bn-joint"), 200, 32, method="tent"),
    "one stream, ResNet-18 at 224×224, 1 image": lambda: make_stream(tt.resnet18(), 1, 224),
}


def measure(name: str, steps: int) -> dict[str, float]:
    """Measure a case in this process."""
    torch.manual_seed(0)
    step = CASES[name]()
    step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ms": round(1000 * statistics.median(seconds), 1), "mib": round(peak / 1024)}


def measure_apart(name: str, steps: int, reuse: bool) -> dict[str, float]:
    """Measure a case in a process of its own."""
    call = [sys.executable, __file__, "--case", name, "--steps", f"{steps}", *(["--reuse"] if reuse else [])]
    return json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=8, choices=range(1, 20), metavar="N", help="timed steps of a process (default: 8)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one step of two cases, in one process of each kind")
    parser.add_argument("--case", choices=CASES, help="measure one case in this process")
    parser.add_argument("--reuse", action="store_true", help="reuse freed memory in this process")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    if given.case is not None:
        if given.reuse and not reuse_memory():
            sys.exit("freed memory cannot be reused: another C library, or variables of its allocator are set")
        print(json.dumps(measure(given.case, given.steps)))
        return
    steps, rounds, names = (1, 1, list(CASES)[2:4]) if given.quick else (given.steps, given.rounds, list(CASES))
    rows = []
    for name in names:
        turns = [[measure_apart(name, steps, reuse) for reuse in (False, True)] for _ in range(rounds)]
        before, after = (
            {key: statistics.median(turn[kind][key] for turn in turns) for key in turns[0][0]} for kind in (0, 1)
        )
        rows.append({"case": name, "returned": before, "reused": after, "times": round(before["ms"] / after["ms"], 2)})
        print(f"{name:44} {before['ms']:8.1f} ms, reused {after['ms']:8.1f} ms: {rows[-1]['times']} times", flush=True)
    if given.out is not None:
        words = sys.argv[1:] if arguments is None else arguments
        about = {"command": shlex.join(["python", "benchmarks/heap.py", *words]), "steps": steps, "rounds": rounds}
        given.out.write_text(
            json.dumps(about | describe_machine(torch.device("cpu")) | {"rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
