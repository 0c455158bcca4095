"""Would a low-rank update (LoRA, Hu et al. 2022) of a vision transformer earn its place among the settings `update`?

    python benchmarks/low_rank.py --quick                                  # an untrained network, seconds: no result
    python benchmarks/low_rank.py --device cuda --out results/low-rank-vit.json

Every linear layer of the encoder's blocks gets a second path through `rank` numbers, which adds nothing until it has
learned. Streams of `online` that move these paths alone are compared with streams that move the norms, or the whole
encoder and the task's branch, at several learning rates: errors on held-out training images and the four extra
corruptions at level 5, each set a stream, and what a stream has to store. Of each kind, the rate with the lowest mean
error over the sets is the one to look at.
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
from torch import Tensor, nn

import testtime as tt
from testtime.adaptation.selection import select_parameters
from testtime.corruptions import EXTRA
from testtime.provenance import describe_machine

LEVEL = 5


class LowRank(nn.Module):
    """A linear layer with a second path of low rank, which is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


def add_paths(net: tt.YNet, rank: int) -> None:
    """Add a path of low rank to every linear layer of the encoder's blocks."""
    torch.manual_seed(0)
    for block in net.encoder.get_submodule("blocks").children():
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LowRank(layer, rank))


def is_path(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is of a path of low rank."""
    return name.endswith((".down", ".up"))


def measure(
    net: tt.YNet, update: Any, lr: float | None, sets: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return errors in percent and bytes of a stream for one kind of update; without a rate nothing is learned."""
    adapter, moved = tt.Fixed(net, precision=options.precision), 0
    if lr is not None:
        adapter = tt.Online(net, **tt.recommend(net) | {"update": update, "lr": lr, "precision": options.precision})
        moved = sum(net.get_parameter(name).numel() for name in select_parameters(net, update))
    errors, begin = {}, time.perf_counter()
    for name in sets:
        adapter.reset()
        records = list(tt.evaluate(adapter, tt.data.open(name), shuffle=True, limit=options.images))
        errors[name] = round(100 * tt.error(records), 2)
    shifted = [error for name, error in errors.items() if "/" in name]
    row = {"lr": lr, "bytes": 4 * moved, "errors": errors, "corrupted": round(sum(shifted) / len(shifted), 2)}
    return row | {"original": errors[sets[0]], "seconds": round(time.perf_counter() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="cifar10-vit-masked", help="a vision transformer that held images out")
    parser.add_argument("--data", default="cifar10-held-out", help="the held-out images it never saw")
    parser.add_argument("--images", type=int, default=1000, help="of each set (default: 1000)")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="*", default=[0.1], help="of encoder and branch (default: 0.1)")
    parser.add_argument("--lr-low-rank", type=float, nargs="*", default=[0.1, 1.0])
    parser.add_argument("--lr-norm", type=float, nargs="*", default=[0.1, 1.0])
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="an untrained network, a few digits: to see that it runs")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    if options.quick:
        net = tt.vit(size=16, channels=1, width=24, depth=2).describe(task="rotation")
        options.data, options.images = "digits-held-out", 4
    else:
        net = tt.load(options.checkpoint)
    net = net.to(options.device).eval()
    sets = [options.data, *(f"{options.data}-c/{name}/{LEVEL}" for name in EXTRA)]
    command = shlex.join(["python", "benchmarks/low_rank.py", *sys.argv[1:]])
    about = {"command": command, "images": options.images, "rank": options.rank}
    about |= describe_machine(torch.device(options.device))
    kinds: dict[str, list[Any]] = {
        "none": [None],
        "encoder+ssl": options.lr,
        "norm": options.lr_norm,
        "low rank": options.lr_low_rank,
    }
    rows: list[dict[str, Any]] = []
    for kind, rates in kinds.items():
        update: Any = kind
        if kind == "low rank":
            add_paths(net, options.rank)
            net, update = net.to(options.device), is_path
        for lr in rates:
            rows.append({"update": kind} | measure(net, update, lr, sets, options))
            row = rows[-1]
            print(
                f"{kind:12} lr {lr or 0:<7g} corrupted {row['corrupted']:.2f}%  original {row['original']:.2f}%  "
                f"{row['bytes'] / 1024:,.0f} KiB a stream, {row['seconds']} s",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
