"""How well does the drift that `Auto` follows predict, without labels, the gain of learning and the accuracy?

    python benchmarks/drift.py --checkpoint cifar10-resnet26-gn-joint --measured results/cifar10/levels.json \\
        --images 1000 --out results/drift-gn-joint.json
    python benchmarks/drift.py --checkpoint NETWORK --measured RUN

Every set of the measured run, which has `fixed` and `online`, is a stream that is answered without learning. Of each:
the drift, the accuracy on the last 500 images, and its estimate. A gain of learning is expected where the drift reaches
the default threshold of `Auto`; the measured gain is that of the run, on all its images.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import testtime as tt
from testtime.evaluation import open_runs
from testtime.networks.task_loss import measure_drift, read_task_loss
from testtime.provenance import describe_machine

WINDOW = 500  # images of an estimate
LIMIT = tt.Calibration().online or math.inf


def read_gains(file: str, net: tt.YNet) -> dict[str, float]:
    """Return by how many points `online` lowers the error on each set of a run with this network."""
    runs = open_runs(file)
    known = [held["fingerprint"] for run in runs for held in run.configuration["networks"].values()]
    if known != [net.fingerprint()] * len(known):
        raise SystemExit(f"{file}: is of another network.")
    counts = {(unit.method, unit.set_name): unit.about["counts"] for run in runs for unit in run.units}
    errors = {key: 100 - 100 * count["is_right"] / count["labelled"] for key, count in counts.items()}
    gains = {
        name: error - errors["online", name]
        for (method, name), error in errors.items()
        if method == "fixed" and ("online", name) in errors
    }
    if not gains:
        raise SystemExit(f"{file}: no set has both `fixed` and `online`.")
    return gains


def measure(net: tt.YNet, gains: dict[str, float], images: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each set: its drift, the gain, the accuracy and its estimate."""
    auto = tt.Auto(net, calibration=tt.Calibration(online=None), **tt.recommend(net))
    for name, gain in gains.items():
        auto.reset()
        records = list(tt.evaluate(auto, tt.data.open(name), shuffle=True, limit=images))
        loss = sum(record.loss_before for record in records) / len(records)
        last = [bool(record.is_right) for record in records[-WINDOW:]]
        row: dict[str, Any] = {"set": name, "images": len(records), "gain": round(gain, 4)}
        row |= {"drift": float(measure_drift(loss, auto.reference)), "accuracy": sum(last) / len(last)}
        yield row | {"estimate": list(auto.estimate_accuracy() or ())}


def read_reference(net: tt.YNet) -> dict[str, Any]:
    """Return what the drift of a network is relative to."""
    known = read_task_loss(net)
    return {} if known is None else {"reference": known.loss, "reference_source": known.source}


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how well the gain and the accuracy were predicted."""
    drift, gain = (np.array([row[key] for row in rows]) for key in ("drift", "gain"))
    value, low, high = np.array([row["estimate"] for row in rows]).T
    accuracy = np.array([row["accuracy"] for row in rows])
    return {
        "sets": len(rows),
        "sets_that_lose": int((gain < 0).sum()),
        "sets_above_the_limit": int((drift >= LIMIT).sum()),
        "correlation": float(np.corrcoef(np.log(drift), gain)[0, 1]) if gain.std() else None,
        "sign_right": float(((drift >= LIMIT) == (gain > 0)).mean()),
        "coverage": float(((low <= accuracy) & (accuracy <= high)).mean()),
        "half_width": float((high - low).mean() / 2),
        "estimate_error": float(np.abs(value - accuracy).mean()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a summary, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a network with a trained branch")
    parser.add_argument("--measured", required=True, help="a run with it, or its summary, with `fixed` and `online`")
    parser.add_argument("--images", type=int, default=1000, help="of each set (default: 1000)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    net = tt.load(given.checkpoint).to(given.device)
    gains, rows = read_gains(given.measured, net), []
    for row in measure(net, gains, given.images):
        rows.append(row)
        print(f"{len(rows)}/{len(gains)} {row['set']:40}", end="\r", flush=True)
    found = summarise(rows)
    print(f"\n{json.dumps(found, indent=1)}")
    if given.out is not None:
        words = sys.argv[1:] if arguments is None else arguments
        about: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/drift.py", *words])}
        about |= {"calibration": asdict(tt.Calibration())} | read_reference(net)
        about |= describe_machine(torch.device(given.device))
        given.out.write_text(json.dumps(about | {"summary": found, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
