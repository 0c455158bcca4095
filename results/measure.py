"""Make the result files of this folder again: the networks and every measurement of docs/results.md.

    python results/measure.py --list                        # the steps, and which results exist
    python results/measure.py selection-joint joint levels  # some steps, in this order
    python results/measure.py --jobs 4 --needed auto-joint  # a step with those that it needs, up to four concurrently
    python results/measure.py --all                         # hours on one H200

A step is a command, run from the root of the repository: `train-` steps train a network, `fit-` steps a branch for one,
`tune-` steps choose settings, `bundle-` steps add them to a network, the others evaluate. Its run folder is
`runs/STEP`; an interrupted step is resumed. Its result is then copied here: the record of a training, the choice, the
summary of an evaluation. Needs CIFAR-10, and CIFAR-10-C made with the frost photographs, under $TESTTIME_DATA, see
docs/results.md (without CIFAR-10-C, frost is procedural). To what the step `auto` finds, benchmarks/auto.py fits a
calibration. For the steps on photographs the eight classes of ImageNet in `photographs/`, see
docs/results/photographs.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from steps import add_needed, command, find_needed, list_steps
from testtime.evaluation import Run, open_run
from testtime.provenance import describe_machine
from testtime.report.comparison import compare_runs

ROOT = Path(__file__).resolve().parents[1]
RESULTS, RUNS = ROOT / "results", ROOT / "runs"


def main() -> None:
    """Run the steps named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--all", action="store_true", help="every step")
    parser.add_argument("--needed", action="store_true", help="also the steps that the named ones need")
    parser.add_argument("--jobs", type=int, default=1, help="how many run concurrently, logs in runs/ (default: 1)")
    parser.add_argument("--list", action="store_true", help="list the steps and leave")
    options = parser.parse_args()
    known = list_steps()
    if options.list or not (options.steps or options.all):
        for name in known:
            print(f"{name:36} {command(name)}")
        return
    unknown = sorted(set(options.steps) - set(known))
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}; --list shows them")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    names = known if options.all else options.steps
    if options.needed:
        names = add_needed(names)
    if options.jobs == 1:
        for name in names:
            take(name)
    elif failed := run_concurrently(names, options.jobs, start):
        raise SystemExit(f"failed, or not started because of that: {', '.join(failed)}")


def run_concurrently(names: Sequence[str], jobs: int, run: Callable[[str], bool]) -> list[str]:
    """Run steps, each after those among them that it needs.

    Args:
        names: The steps.
        jobs: How many run at the same time.
        run: Runs a step, and returns whether it succeeded.

    Returns:
        The steps that failed, and those that were not started because they need one of them.
    """
    waiting, failed, running = list(names), [], dict[Future[bool], str]()
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            for name in list(waiting):
                needed = set(find_needed(name))
                if needed & set(failed):
                    waiting.remove(name)
                    failed.append(name)
                elif not needed & {*waiting, *running.values()}:
                    waiting.remove(name)
                    running[pool.submit(run, name)] = name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                name = running.pop(future)
                if not future.result():
                    failed.append(name)
    return failed


def start(name: str) -> bool:
    """Run a step in a process of its own; return whether it succeeded."""
    log = RUNS / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    print(f"{name}: started, {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        done = subprocess.run([sys.executable, __file__, name], stdout=file, stderr=file, check=False)
    print(f"{name}: {'failed' if done.returncode else 'finished'}", flush=True)
    return done.returncode == 0


def take(name: str) -> None:
    """Run a step and copy its result; stops the program if it fails."""
    print(command(name), flush=True)
    program, *arguments = shlex.split(command(name))
    execute(*(arguments if program == "python" else ("-m", program, *arguments)))
    results = RESULTS / ("imagenette" if "photographs-" in name else "cifar10")
    if name.startswith(("train-", "fit-")):
        folder = RUNS / name.partition("-")[2]
        records = sorted(folder.rglob("record.json"))
        if name == "train-uda":  # a network for each set
            held = {record.parent.relative_to(folder).as_posix(): json.loads(record.read_text()) for record in records}
            return store(held, results / "training-uda.json")
        for record in records:
            place = "-".join(record.parent.relative_to(RUNS).parts)
            copy(record, results / f"training-{place.removeprefix('photographs-')}.json")
    elif name.startswith("tune-"):
        machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        about = {"command": command(name), "machine": machine}
        copy(RUNS / name / "choice.json", results / f"{name}.json", about)
    elif name.startswith("comparison-"):
        target = RESULTS / "comparison" / f"{name.removeprefix('comparison-')}.json"
        target.parent.mkdir(exist_ok=True)
        store(condense(open_run(RUNS / f"eval-{name}")), target)
    elif not name.startswith("bundle-"):
        folder = RUNS / f"eval-{name}"
        execute("-m", "testtime", "report", str(folder), "--format", "json", "--out", str(folder / "report"))
        copy(folder / "report" / "summary.json", results / f"{name.removeprefix('photographs-')}.json")


def execute(*arguments: str) -> None:
    """Run Python with arguments; stops the program if it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def condense(run: Run) -> dict[str, Any]:
    """Return the scores of a run by method, without the single answers, which would be megabytes."""
    (results,) = compare_runs([run]).protocols
    rows = []
    for method, score in results.scores.items():
        row = {"method": method, **asdict(score), "errors": list(score.errors.values())}
        rows.append({key: value for key, value in row.items() if key not in ("rank", "devices")})
    about = {key: run.about[key] for key in ("command", "seeds", "versions", "hardware")}
    return {**about, "networks": run.configuration["networks"], "protocol": results.title, "rows": rows}


def copy(source: Path, target: Path, about: dict[str, Any] | None = None) -> None:
    """Copy a JSON file, after parsing it, with more entries."""
    store((about or {}) | json.loads(source.read_text()), target)


def store(document: dict[str, Any], target: Path) -> None:
    """Write a JSON file, without white space, which would be half of it."""
    target.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    print(target.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
