"""Make a bundled network from a trained one: recommended settings are added, numbers are stored as float16.

python results/bundle.py runs/robust/seed-0/network.safetensors cifar10-resnet26-gn-robust
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import testtime

WEIGHTS = Path(testtime.__file__).parent / "weights"
SETTINGS = {
    "online": {"steps": 1, "lr": 0.001, "copies": 32},
    "episodic": {"steps": 10, "lr": 0.001, "copies": 32},
}
"""The paper's, for networks with a self-supervised branch."""


def main(source: str, name: str) -> None:
    """Write the bundled network `name` from a network file."""
    net = testtime.load(source)
    net.describe(settings=SETTINGS if net.has_branch else {})
    net.save(WEIGHTS / f"{name}.safetensors", dtype=torch.float16)


if __name__ == "__main__":
    main(*sys.argv[1:])
