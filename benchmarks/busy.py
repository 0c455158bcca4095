"""The README's first snippet on an idle machine, and beside one busy process per core.

    python benchmarks/busy.py --out results/busy-cpu.json

Each round runs the snippet in a process of its own, first alone, then beside busy ones, so that slow changes of the
machine meet both. The time is that of the whole process, import included. Run it on a machine that does nothing else:
the load before each run is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from testtime.provenance import describe_machine
from testtime.threads import count_cores

README = Path(__file__).resolve().parents[1] / "README.md"


def read_snippet() -> str:
    """Return the first Python block of the README."""
    found = re.search(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        sys.exit(f"{README} has no Python block")
    return found[1]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that do nothing but compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(snippet: str) -> dict[str, float]:
    """Run code in a process of its own; returns its seconds, and the load before."""
    load, begin = round(os.getloadavg()[0], 2), time.perf_counter()
    subprocess.run([sys.executable, "-c", snippet], check=True, stdout=subprocess.DEVNULL)
    return {"seconds": round(time.perf_counter() - begin, 2), "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=3.0, help="seconds of rest before each run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    snippet, rows = read_snippet(), []
    run(snippet)  # kernels are built, files are in memory
    for number in range(options.rounds):
        time.sleep(options.rest)
        idle = run(snippet)
        time.sleep(options.rest)
        with busy(count_cores()):
            loaded = run(snippet)
        rows.append({"idle": idle, "busy": loaded})
        print(f"round {number + 1}: idle {idle['seconds']:.1f} s, busy {loaded['seconds']:.1f} s", flush=True)
    median = {kind: statistics.median(row[kind]["seconds"] for row in rows) for kind in ("idle", "busy")}
    ratio = round(median["busy"] / median["idle"], 2)
    found: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "cores": count_cores(), "median": median}
    found |= {"ratio": ratio, "rows": rows, **describe_machine(torch.device("cpu"))}
    print(f"busy / idle: {ratio} times")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
