"""Does `Auto` choose well? Its calibration is fitted to runs on held-out images, and tested with other networks.

    testtime train --data digits --hold-out 300 --out runs/selection
    testtime eval -c runs/selection/network.safetensors --data digits-held-out-c --methods fixed,episodic,online \\
        --shuffle --out runs/held-out
    python benchmarks/auto.py --fit runs/selection/network.safetensors runs/held-out \\
        --checkpoint digits-resnet8-gn-joint --data digits-c --out results/auto-digits.json

Several networks may be fitted to, and others tested: --fit and --checkpoint can be repeated; without --checkpoint,
nothing is tested. Every set is a stream of its own, and original, mild and hard sets count alike. The gain of learning
online is predicted by a line over the logarithm of the drift, which is fitted to the same runs; the accuracy is
estimated after the last image, for up to 500 of them.
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
from testtime.data.families import expand
from testtime.evaluation import Trace, fit_calibration, open_run, read_traces
from testtime.evaluation.calibration import measure_accuracy
from testtime.networks.task_loss import measure_drift
from testtime.provenance import describe_machine

WINDOW = 500  # images of an estimate
MODES = ("fixed", "online", "auto")
GROUPS = {"original": (0,), "levels 1 and 2": (1, 2), "levels 3 to 5": (3, 4, 5)}


def find_level(name: str) -> int:
    """Return the level of a set; 0: the original one."""
    return int(name.rsplit("/", 1)[1]) if "/" in name else 0


def read(file: str, run: str) -> list[Trace]:
    """Read the streams of a run with a network; without `episodic`, episodes count as no learning."""
    try:
        opened = open_run(run)
        episodic = "episodic" if any(unit.method == "episodic" for unit in opened.units) else "fixed"
        return read_traces(opened, tt.load(file), ("fixed", episodic, "online"))
    except ValueError as error:
        raise SystemExit(f"{file}, {run}: {error}") from None


def fit(pairs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the calibration, the line of the gain over the logarithm of the drift, and accuracies by `average`."""
    traces = [trace for file, run in pairs for trace in read(file, run)]
    groups = [next(title for title, own in GROUPS.items() if find_level(trace.name) in own) for trace in traces]
    drift = np.log([trace.drift.mean() for trace in traces])
    gain = [trace.right[2].mean() - trace.right[0].mean() for trace in traces]
    slope, intercept = np.polyfit(drift, gain, 1)
    calibration = fit_calibration(traces, weights=[1 / groups.count(title) for title in groups])
    rows = [
        {"level": find_level(trace.name), "auto": measure_accuracy(calibration, trace)}
        | {mode: float(trace.right[row].mean()) for row, mode in ((0, "fixed"), (2, "online"))}
        for trace in traces
    ]
    return {"calibration": calibration, "gain": (float(slope), float(intercept)), "accuracy": average(rows)}


def average(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean accuracies of `MODES` by group, and over the groups."""
    found = {}
    for title, levels in GROUPS.items():
        own = [row for row in rows if row["level"] in levels]
        if own:
            found[title] = {mode: sum(row[mode] for row in own) / len(own) for mode in MODES}
    return found | {"mean": {mode: sum(group[mode] for group in found.values()) / len(found) for mode in MODES}}


def measure(
    net: tt.YNet, sets: Sequence[str], given: argparse.Namespace, calibration: tt.Calibration
) -> Iterator[dict]:
    """Yield a row for each set: drift, accuracies, and the estimate of that of `Auto`."""
    settings: dict[str, Any] = {**tt.recommend(net), "precision": given.precision}
    auto = tt.Auto(net, calibration=calibration, **settings)
    adapters = {
        "fixed": tt.Fixed(net, precision=given.precision),
        "online": tt.Online(net, **settings),
        "auto": auto,
    }
    for name in sets:
        test_set = tt.data.open(name)
        row: dict[str, Any] = {"set": name, "level": find_level(name)}
        limit = given.limit if row["level"] else given.limit_original or given.limit
        right: list[bool] = []
        for mode, adapter in adapters.items():
            adapter.reset()
            records = list(tt.evaluate(adapter, test_set, shuffle=True, limit=limit))
            right = [bool(record.is_right) for record in records]
            row |= {"images": len(right), mode: sum(right) / len(right)}
            if mode == "fixed":
                losses = [record.loss_before for record in records]
                row["drift"] = float(measure_drift(sum(losses) / len(losses), auto.reference))
        estimate, last = auto.estimate_accuracy(), right[-WINDOW:]  # `auto` is the last
        assert estimate is not None
        row |= {"learned": auto.adapted / len(right), "estimate": list(estimate), "last": sum(last) / len(last)}
        yield row


def summarise(rows: Sequence[dict[str, Any]], line: tuple[float, float]) -> dict[str, Any]:
    """Return the means by group and over the groups, and how well gain and accuracy were predicted."""
    found: dict[str, Any] = {**average(rows)}
    predicted = [line[0] * math.log(row["drift"]) + line[1] for row in rows]
    measured = [row["online"] - row["fixed"] for row in rows]
    decided = [(one, other) for one, other in zip(predicted, measured, strict=True) if other]
    found["sign_right"] = sum((one > 0) == (other > 0) for one, other in decided) / max(len(decided), 1)
    found["sets_with_a_gain_or_loss"] = len(decided)
    known = np.std(predicted) > 0 and np.std(measured) > 0
    found["correlation"] = float(np.corrcoef(predicted, measured)[0, 1]) if known else None
    found["coverage"] = sum(row["estimate"][1] <= row["last"] <= row["estimate"][2] for row in rows) / len(rows)
    found["estimate_error"] = sum(abs(row["estimate"][0] - row["last"]) for row in rows) / len(rows)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, measure, print a summary, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", nargs=2, action="append", required=True, metavar=("NETWORK", "RUN"))
    parser.add_argument("--checkpoint", action="append", default=[], help="a network to test with")
    parser.add_argument("--data", default="digits-c", help="its original set is tested, too (default: digits-c)")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--limit", type=int, help="images of each set")
    parser.add_argument("--limit-original", type=int, help="images of the original set, which is a third of the mean")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    fitted = fit(given.fit)
    calibration = fitted["calibration"]
    print(f"online from a drift of {calibration.online}, episodic from {calibration.episodic}")
    results = {}
    for file in given.checkpoint:
        net = tt.load(file).to(given.device)
        sets = expand([given.data.removesuffix("-c"), *(f"{given.data}/*/{level}" for level in given.levels)])
        rows = []
        for row in measure(net, sets, given, calibration):
            rows.append(row)
            print(f"{len(rows)}/{len(sets)} {row['set']:40}", end="\r", flush=True)
        found = summarise(rows, fitted["gain"])
        results[file] = {"summary": found, "rows": rows}
        print(f"\n{file}")
        for title in (*GROUPS, "mean"):
            if title in found:
                print(f"  {title:16}", "  ".join(f"{mode} {100 * value:.2f}%" for mode, value in found[title].items()))
        print(
            f"  sign of the gain right on {found['sign_right']:.0%} of {found['sets_with_a_gain_or_loss']} sets, "
            f"correlation {'unknown' if found['correlation'] is None else format(found['correlation'], '.2f')}; "
            f"accuracy within its interval on {found['coverage']:.0%}"
        )
    if given.out is not None:
        words = sys.argv[1:] if arguments is None else arguments
        about: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/auto.py", *words])}
        about |= fitted | {"calibration": asdict(calibration), **describe_machine(torch.device(given.device))}
        given.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
