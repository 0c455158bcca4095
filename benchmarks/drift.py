"""How well does the drift that `Auto` follows predict, without labels, the gain of learning and the accuracy?

    python benchmarks/drift.py --checkpoint cifar10-resnet26-gn-joint --measured results/cifar10/levels.json \\
        --images 1000 --out results/drift-gn-joint.json
    python benchmarks/drift.py --checkpoint NETWORK --measured RUN

Every set of the measured run, which has `fixed` and `online`, is a stream that is answered without learning. Of each:
the drift, the accuracy on the last 500 images, its estimate, and from which share of the images `Auto` would learn. A
gain of learning is expected where this is more than half; the measured gain is that of the run, on all its images.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import testtime as tt
from auto import GROUPS, find_level
from testtime.adaptation.auto import follow_drift
from testtime.evaluation import open_runs
from testtime.networks.task_loss import measure_drift, read_task_loss
from testtime.provenance import describe_machine

WINDOW = 500  # images of an estimate
ONLINE = 2  # the mode


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


def measure(
    net: tt.YNet, gains: dict[str, float], images: int, calibration: tt.Calibration
) -> Iterator[dict[str, Any]]:
    """Yield a row for each set: its drift, what would be learned, the gain, the accuracy and its estimate."""
    auto = tt.Auto(net, calibration=replace(calibration, online=None, episodic=None), **tt.recommend(net))
    for name, gain in gains.items():
        auto.reset()
        records = list(tt.evaluate(auto, tt.data.open(name), shuffle=True, limit=images))
        drifts = measure_drift(torch.tensor([one.loss_before for one in records], dtype=torch.float64), auto.reference)
        last = [bool(record.is_right) for record in records[-WINDOW:]]
        row: dict[str, Any] = {"set": name, "images": len(records), "gain": round(gain, 4)}
        modes = calibration.decide(drifts, follow_drift(drifts, 1.0, calibration.momentum))
        row |= {"drift": float(drifts.mean()), "learned": float((modes == ONLINE).double().mean())}
        yield row | {"accuracy": sum(last) / len(last), "estimate": list(auto.estimate_accuracy() or ())}


def read_reference(net: tt.YNet) -> dict[str, Any]:
    """Return what the drift of a network is relative to."""
    known = read_task_loss(net)
    return {} if known is None else {"reference": known.loss, "reference_source": known.source}


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how well gain and accuracy were predicted.

    `gains` are means in which the original set, levels 1 and 2, and levels 3 to 5 count alike: of learning always, and
    of learning from the share of each set from which `Auto` would learn.
    """
    drift, gain, learned = np.array([(row["drift"], row["gain"], row["learned"]) for row in rows]).T
    value, low, high = np.array([row["estimate"] for row in rows]).T
    accuracy = np.array([row["accuracy"] for row in rows])
    groups = [[place for place, row in enumerate(rows) if find_level(row["set"]) in own] for own in GROUPS.values()]
    return {
        "sets": len(rows),
        "sets_that_lose": int((gain < 0).sum()),
        "sets_learned": int((learned > 0.5).sum()),
        "correlation": float(np.corrcoef(np.log(drift), gain)[0, 1]) if gain.std() else None,
        "sign_right": float(((learned > 0.5) == (gain > 0)).mean()),
        "gains": [float(np.mean([one[own].mean() for own in groups if own])) for one in (gain, gain * learned)],
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
    gains, rows, calibration = read_gains(given.measured, net), [], tt.Calibration()
    for row in measure(net, gains, given.images, calibration):
        rows.append(row)
        print(f"{len(rows)}/{len(gains)} {row['set']:40}", end="\r", flush=True)
    found = summarise(rows)
    print(f"\n{json.dumps(found, indent=1)}")
    if given.out is not None:
        words = sys.argv[1:] if arguments is None else arguments
        about: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/drift.py", *words])}
        about |= {"calibration": asdict(calibration)} | read_reference(net)
        about |= describe_machine(torch.device(given.device))
        given.out.write_text(json.dumps(about | {"summary": found, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
