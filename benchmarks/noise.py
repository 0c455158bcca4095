"""Why online learning costs a little where nothing has shifted: what the images teach, or that they come one by one?

    python benchmarks/noise.py --quick                              # a few of the built-in digits, seconds: no result
    python benchmarks/noise.py --out results/cifar10/noise.json     # two CPU cores, 40 minutes for a set

Two streams take as many steps at the same learning rate on as many copies, 32 of every image of a set. In the one each
step gets 32 copies of one image, which is TTT-Online. In the other each step gets a copy of each of 32 images, and the
whole set goes by 32 times; so its steps point where the images pull together, and what is peculiar to single ones
averages out. Every so many steps the network as it is then answers for the whole set. Needs CIFAR-10, and for corrupted
sets CIFAR-10-C, under `--data-root` or $TESTTIME_DATA.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import testtime as tt
from testtime import data
from testtime.networks import CheckpointError
from testtime.provenance import describe_machine
from testtime.randomness import Draws

COPIES = 32


def orders(images: int, seed: int, device: torch.device) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Which images each step takes, `(steps, images of a step)`, and the adapter's settings, by stream."""
    passes = Draws.of(seed, torch.arange(COPIES, device=device)).uniform(images).argsort(1)
    return {
        "copies of one image": (passes[0][:, None], {"copies": COPIES}),
        "copies of many images": (passes.flatten().view(-1, COPIES), {"copies": 1, "share": "batch"}),
    }


@torch.inference_mode()
def test(net: tt.YNet, images: Tensor, labels: Tensor) -> float:
    """The error in percent."""
    batches = zip(images.split(500), labels.split(500), strict=True)
    wrong = [(net(part).argmax(1) != right).float() for part, right in batches]
    return round(100 * float(torch.cat(wrong).mean()), 2)


def compare(net: tt.YNet, name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Both streams on one set, a row each."""
    found = data.open(name, options.data_root)
    assert found.labels is not None
    count = min(len(found), options.limit or len(found))
    images, labels = found.images(slice(0, count)).to(device), found.labels[:count].to(device)
    before, rows = test(net, images, labels), []
    print(f"\n{name}, {count:,} images: {before:.2f}% without learning", flush=True)
    for stream, (order, settings) in orders(count, options.seed, device).items():
        adapter, errors, begin = tt.Online(net, seed=options.seed, **settings), {}, time.perf_counter()
        for step, chosen in enumerate(order, 1):
            adapter.predict(images[chosen])
            if step % options.every == 0 or step == len(order):
                errors[step] = test(adapter.network(), images, labels)
                print(f"{stream}: {step:,} of {len(order):,} steps, {errors[step]:.2f}%", flush=True)
        mean = sum(errors.values()) / len(errors)
        row = {"set": name, "stream": stream, "images": count, "steps": len(order), "error_before": before}
        row |= {"errors": errors, "difference": round(mean - before, 2), "seconds": round(time.perf_counter() - begin)}
        rows.append(row)
        print(f"{stream}: {mean - before:+.2f} points in the mean of these, {row['seconds']} s", flush=True)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="cifar10-resnet26-gn-joint", help="a network's name or file")
    parser.add_argument("--quick", action="store_true", help="32 built-in digits, to see that it runs")
    parser.add_argument("--sets", nargs="+", default=["cifar10"])
    parser.add_argument("--every", type=int, default=2000, help="steps between two tests")
    parser.add_argument("--limit", type=int, help="take this many images of a set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--data-root", type=Path, help="where the data is (default: $TESTTIME_DATA)")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    if options.quick:
        options.checkpoint, options.sets, options.limit = "digits-resnet8-gn-joint", ["digits"], 32
    return options


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    try:
        net = tt.load(options.checkpoint).to(device).eval()
    except CheckpointError as error:
        sys.exit(str(error))
    command = shlex.join(["python", *sys.argv])
    about = {"command": command, "network": net.fingerprint(), "seed": options.seed, **describe_machine(device)}
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        try:
            rows += compare(net, name, options, device)
        except data.DataError as error:
            sys.exit(str(error))
        if options.out:  # what is there outlives a kill
            options.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
