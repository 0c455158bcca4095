"""How often `predict` says that an image is unlike the training images: on CIFAR-10, and on photographs.

    python benchmarks/familiar.py --photographs imagenette/val --out results/cifar10/familiar.json

The thresholds are those in the network's card: 1% of 2,000 training images have less energy, and 1% a higher loss of
the self-supervised task; nothing was chosen on the images below. `--photographs` has a folder for each class, e.g.
Imagenette's; those named by `--known` show a class that the network knows. Needs CIFAR-10 under `--data-root` or
$TESTTIME_DATA. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import testtime as tt
from testtime import data
from testtime.evaluation.predict_files import find_familiar, load_image, prepare_adapter
from testtime.provenance import describe_machine
from testtime.randomness import Draws
from testtime.training import prepare

NAMES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def measure(net: tt.YNet, images: Iterable[Tensor]) -> dict[str, Any]:
    """Count the images of chunks `(N, C, H, W)` that are marked as unlike the training images."""
    assert net.statistics is not None
    adapter, counted, marked, sure = prepare_adapter(net, steps=0), 0, 0, 0
    for chunk in images:
        prediction = adapter.predict(chunk)
        familiar = find_familiar(adapter, prediction, net.statistics.about)
        assert familiar is not None
        counted, marked = counted + len(chunk), marked + int((~familiar).sum())
        sure += int((familiar & (prediction.logits.softmax(1).amax(1) > 0.9)).sum())
    return {"images": counted, "marked": marked, "unmarked_above_90_percent": sure}


def read_cifar(options: argparse.Namespace) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield training and test images, chosen at random."""
    found = {"training": prepare("cifar10", root=options.data_root).source}
    found["test"] = data.open("cifar10", options.data_root)
    for name, images in found.items():
        order = Draws.of(options.seed, torch.arange(len(images))).purpose(name).keys.argsort()
        yield name, list(images.images(order[: options.limit].sort().values).split(100))


def read_photographs(net: tt.YNet, folder: Path) -> Iterator[Tensor]:
    """Yield the photographs of a folder as `predict` shows them to the network."""
    files = sorted(folder.iterdir())
    for start in range(0, len(files), 100):
        yield torch.stack([load_image(net.card, file) for file in files[start : start + 100]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="cifar10-resnet26-gn-joint", help="a network's name or file")
    parser.add_argument("--photographs", type=Path, required=True, help="a folder of folders")
    parser.add_argument("--known", nargs="*", default=["n02102040", "n03417042"])
    parser.add_argument("--limit", type=int, default=3000, help="images of CIFAR-10, each of training and test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    net, rows = tt.load(options.checkpoint), []
    for name, images in read_cifar(options):
        rows.append({"set": f"CIFAR-10, {name}", "known": True, **measure(net, images)})
        print(rows[-1], flush=True)
    for folder in sorted(path for path in options.photographs.iterdir() if path.is_dir()):
        row = {"set": NAMES.get(folder.name, folder.name), "known": folder.name in options.known}
        rows.append(row | measure(net, read_photographs(net, folder)))
        print(rows[-1], flush=True)
    assert net.statistics is not None
    about = {name: net.statistics.about[name] for name in ("images", "set", "energy", "task_loss")}
    found = {"command": shlex.join(["python", *sys.argv]), "seed": options.seed, "network": options.checkpoint}
    found |= {"statistics": about, "rows": rows, **describe_machine(torch.device("cpu"))}
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
