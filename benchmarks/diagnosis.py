"""How far the verdicts of a diagnosis, made without labels, agree with what online learning then gains.

    python benchmarks/diagnosis.py --quick                            # three shifts, under half a minute
    python benchmarks/diagnosis.py --out results/diagnosis-digits.json

The bundled digits network on clean digits and on the fifteen corruptions (ImageNet's parameters) of one level. The gain
is that of the README's settings over the shuffled test digits. The rules of the verdict were settled on levels 2, 4 and
5 and on a dozen sets of CIFAR-10-C; level 3, the default here, was run once they stood.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import testtime as tt
from testtime.data.corrupted import Corrupted
from testtime.diagnosis.measure import diagnose, find_reference
from testtime.diagnosis.result import Reference
from testtime.provenance import describe_machine

NETWORK = "digits-resnet8-gn-joint"
LEARN: dict[str, Any] = {
    "steps": 2,
    "lr": 0.02,
    "copies": 1,
    "task": tt.Rotation("all"),
    "augment": tt.CropFlip(padding=0, flip=False),
}


def measure(name: str, level: int, limit: int, reference: Reference | None) -> dict[str, Any]:
    """The verdict on one set, and the errors without and with online learning."""
    net, clean = tt.load(NETWORK), tt.data.open("digits")
    test_set = clean if name == "digits" else Corrupted(clean, name, level, scale="imagenet")
    begin = time.perf_counter()
    found = diagnose(net, test_set, reference=reference)
    seconds = time.perf_counter() - begin
    errors = [
        100 * tt.error(tt.evaluate(adapter, test_set, shuffle=True, limit=limit))
        for adapter in (tt.Fixed(net), tt.Online(net, **LEARN))
    ]
    cosine = None if found.agreement is None else found.agreement.cosine
    row = {"set": test_set.name, "verdict": found.verdict.kind, "stand_in_cosine": cosine}
    row["balance_cosine"] = None if found.balance is None else found.balance.cosine
    row["true_cosine"] = None if found.true_agreement is None else found.true_agreement.cosine
    return row | {"fixed": errors[0], "online": errors[1], "gain": errors[0] - errors[1], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="clean digits and three shifts, fewer images")
    parser.add_argument("--level", type=int, default=3, help="level of the corruptions (3)")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    names = ["digits", *(("contrast", "impulse_noise", "motion_blur") if options.quick else tt.corruptions.CORRUPTIONS)]
    limit = 150 if options.quick else 500
    reference = find_reference(tt.load(NETWORK))
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(os.cpu_count() or 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for row in pool.map(lambda name: measure(name, options.level, limit, reference), names):
            rows.append(row)
            print(f"{row['set']:32s} {row['fixed']:5.1f}% → {row['online']:5.1f}%  {row['verdict']}", flush=True)
    print()
    summary = {}
    for kind in dict.fromkeys(row["verdict"] for row in rows):
        gains = [row["gain"] for row in rows if row["verdict"] == kind]
        summary[kind] = {"sets": len(gains), "mean": sum(gains) / len(gains), "least": min(gains), "most": max(gains)}
        row = summary[kind]
        ends = f"{row['least']:+.1f} to {row['most']:+.1f}"
        print(f"{kind:15s} {row['sets']:3d} sets, gain {row['mean']:+.1f} ({ends})")
    if options.out:
        machine = describe_machine(torch.device("cpu"))
        about = {"command": "benchmarks/diagnosis.py", "network": NETWORK, "level": options.level, "images": limit}
        options.out.write_text(json.dumps({**machine, **about, "summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
