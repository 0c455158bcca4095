"""Why learning may harm under motion blur: by level, by direction of the blur, by class.

    python benchmarks/motion_blur.py --checkpoint runs/photographs-joint/network.safetensors --data-root photographs \\
        --device cuda --out results/imagenette/motion-blur.json

Photographs are blurred at 224×224 as in ImageNet-C and scaled to the size of the network. ImageNet-C draws a direction
within 45° of the horizontal, which turns with the image: a blur along the rows then says that the image is upright or
upside down, whatever it shows. `any direction` takes this hint away; `right` and `down` have one direction for all.
Every variant is a stream of its own through the same photographs in the same order, as TTT-Online sees it. The loss is
that of the task before each step, mean over the last third of the stream.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import testtime as tt
from testtime import corruptions
from testtime.corruptions.blur import MOTION, motion_blur
from testtime.data import imagenet
from testtime.provenance import describe_machine
from testtime.randomness import Draws

CHUNK = 64  # photographs read and blurred at once
SIZE = imagenet.CORRUPTED_SIZE
DIRECTIONS = {"right": (0.0, 0.0), "down": (90.0, 90.0), "any direction": (-180.0, 180.0)}
"""Ranges of the directions at level 5, in degrees."""
VARIANTS = ("original", *(f"level {level}" for level in range(1, 6)), *DIRECTIONS)


def blur(images: Tensor, samples: Tensor, variant: str, seed: int) -> Tensor:
    """Return a variant of photographs, uint8 `(N, C, 224, 224)`; `samples` has their numbers `(N,)`."""
    if variant == "original":
        return images
    if variant not in DIRECTIONS:
        return corruptions.corrupt(
            images, "motion_blur", int(variant[-1]), seed=seed, samples=samples, scale="imagenet"
        )
    low, high = DIRECTIONS[variant]
    angles = low + (high - low) * Draws.of(seed, samples).purpose("direction").uniform()
    radius, sigma = MOTION["imagenet"][4]
    blurred = motion_blur(images.float(), radius, sigma, angles.to(images.device))
    return blurred.round().clamp(0, 255).byte()


def read(options: argparse.Namespace, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield sample numbers `(N,)`, labels `(N,)` and all variants of the photographs `(N, V, C, H, W)`, shuffled."""
    photographs = imagenet.load(options.data_root, "val", SIZE)
    assert photographs.labels is not None
    order = Draws.of(options.seed, torch.arange(len(photographs))).purpose("order").keys.argsort()[: options.limit]
    for numbers in order.split(CHUNK):
        images, samples = photographs.images(numbers).to(options.device), numbers.to(options.device)
        made = [blur(images, samples, variant, options.seed).float() for variant in VARIANTS]
        scaled = [F.interpolate(one, size=(size, size), mode="bilinear", antialias=True) for one in made]
        yield numbers, photographs.labels[numbers], torch.stack(scaled, 1).round().clamp(0, 255).byte()


def measure(net: tt.YNet, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run TTT-Online on all variants; a row for each: errors before and after, by class, and the task's loss."""
    size, classes = net.card.size or SIZE, len(net.card.classes)
    streams = tt.Streams(net, len(VARIANTS), copies=options.copies, precision=options.precision, seed=options.seed)
    fixed = tt.Fixed(net, precision=options.precision)
    answers: list[Tensor] = []  # (V, 2): classes before learning anything, and after
    losses: list[Tensor] = []
    truth: list[Tensor] = []
    for numbers, labels, images in read(options, size):
        before = fixed.predict(images.flatten(0, 1)).classes.view(images.shape[:2]).cpu()
        for number, image, plain in zip(numbers.tolist(), images, before, strict=True):
            found = streams.predict(image, torch.full((len(VARIANTS),), number))
            answers.append(torch.stack([plain, found.classes.cpu()], 1))
            losses.append(found.loss_before.cpu())
        truth.append(labels)
        print(f"{len(answers):,} photographs", end="\r", flush=True)
    given, loss, labels = torch.stack(answers), torch.stack(losses), torch.cat(truth)
    rows = []
    for place, variant in enumerate(VARIANTS):
        right = given[:, place] == labels[:, None]  # (N, 2)
        shares = [right[labels == label].float().mean(0) for label in range(classes)]
        counts = [torch.bincount(given[:, place, side], minlength=classes).tolist() for side in (0, 1)]
        row = {"set": variant, "images": len(labels), "loss": float(loss[-(len(loss) // 3) :, place].mean())}
        for side, name in enumerate(("fixed", "online")):
            row[name] = float(right[:, side].float().mean())
            row[f"{name}_by_class"] = [float(share[side]) for share in shares]
            row[f"{name}_answers"] = counts[side]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a network's name or file")
    parser.add_argument("--data-root", help="the folder of the photographs")
    parser.add_argument("--limit", type=int, help="photographs")
    parser.add_argument("--copies", type=int, default=64)
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    net = tt.load(options.checkpoint).to(options.device)
    rows = measure(net, options)
    print(f"\n{'accuracy in %':16s} {'fixed':>7s} {'online':>7s} {'loss':>7s}")
    for row in rows:
        print(f"{row['set']:16s} {100 * row['fixed']:7.1f} {100 * row['online']:7.1f} {row['loss']:7.3f}")
    if options.out is not None:
        about = {"command": shlex.join(["python", *sys.argv]), "seed": options.seed, "classes": net.card.classes}
        found = about | {"rows": rows, **describe_machine(torch.device(options.device))}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
