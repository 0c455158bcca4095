"""Make a network to distribute from a trained one: recommended settings are added, numbers are stored as float16.

    python results/bundle.py runs/robust/seed-0/network.safetensors cifar10-resnet26-gn-robust
    python results/bundle.py runs/vit-masked/network.safetensors cifar10-vit-masked \\
        --choices results/cifar10/tune-vit-masked.json results/cifar10/tune-vit-masked-episodic.json

The target is the name of a bundled network, or a file. Settings are the paper's, or those that `testtime tune` chose.
What it does on images that it has not seen is taken from a network of the same recipe that was trained with
`--hold-out`, if given by --unseen: this one has learned its training images by heart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch

import testtime

WEIGHTS = Path(testtime.__file__).parent / "weights"
SETTINGS = {
    "online": {"steps": 1, "lr": 0.001, "copies": 32},
    "episodic": {"steps": 10, "lr": 0.001, "copies": 32},
}
"""The paper's, for networks with a self-supervised branch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a network file")
    parser.add_argument("target", help="name of a bundled network, or a file")
    parser.add_argument("--choices", nargs="*", default=[], type=Path, help="files of `testtime tune`")
    parser.add_argument("--unseen", help="a network file: what it does on images that it has not seen")
    options = parser.parse_args(arguments)
    settings = {mode: dict(own) for mode, own in SETTINGS.items()}
    for file in options.choices:
        choice = json.loads(file.read_text())
        key = choice["mode"] if choice["method"] == "ttt" else choice["method"]
        chosen = {name: value for name, value in choice["chosen"]["settings"].items() if name != "precision"}
        settings[key] = settings.get(key, {}) | chosen
    net = testtime.load(options.source)
    net.describe(settings=settings if net.has_branch else {})
    if options.unseen is not None:
        other = testtime.load(options.unseen).statistics
        if net.statistics is None or other is None or "unseen" not in other.about:
            parser.error("--unseen needs statistics in both networks, in its own of images that were held out")
        about = net.statistics.about | {"unseen": other.about["unseen"]}
        net.statistics = dataclasses.replace(net.statistics, about=about)
    is_file = options.target.endswith(".safetensors")
    net.save(options.target if is_file else WEIGHTS / f"{options.target}.safetensors", dtype=torch.float16)


if __name__ == "__main__":
    main()
