"""How fast training runs: an ordinary loop and ours; and whether photographs arrive as fast as they are used.

    python benchmarks/train.py --quick                         # two CPU cores, about two minutes
    python benchmarks/train.py --device cuda --precision fp32 tf32 bf16 --out results/train-h200.json
    python benchmarks/train.py --device cuda --only-imagenet --imagenet synthetic --out results/photographs-h200.json

The ordinary loop is how such a training is usually written: a torch DataLoader with worker processes, each image
augmented by itself as a Pillow picture, the network eager, a batch turned four ways, two losses, one backward pass,
torch's own choice of arithmetic (TF32 in convolutions on CUDA), which ours is compared with in fp32 and in tf32, or for
bf16 autocast. Ours is what `testtime train` does in an epoch: the images on the device, `Trainer.batches` and
`Trainer.step`. Both train ResNet-26 jointly on batches of 128 with the same recipe; ours also from two and three seeds
together, where images and epochs are those of all seeds together. Steps are timed in five pieces of `--seconds` in
all, after a warm-up that is not counted (compiling, capturing, starting workers); the median piece counts, an epoch is
50,000 images.

`--imagenet FOLDER` measures ResNet-18 on photographs, `FOLDER/train/CLASS/*` or `FOLDER/CLASS/*`; `synthetic` makes
JPEGs of ImageNet's usual size first. Rows: JPEG decoding into the packed cache, reading random batches from it, reading
them to the device, training steps on images that are on the device, and training fed from the cache. Training is not
starved where the last two are equal. Needs torch, numpy, pillow and safetensors alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from testtime import data
from testtime.adaptation.adapters import Episodic
from testtime.data.folder import PictureSet
from testtime.networks import YNet, resnet18, resnet26
from testtime.provenance import describe_machine
from testtime.training import Pool, Recipe, Trainer, Training

Row = dict[str, Any]
EPOCH = {"cifar10": 50_000, "imagenet": 1_281_167}
PIECES = 5


class Pictures(Dataset[tuple[Tensor, int]]):
    """CIFAR-like images, each augmented by itself as a Pillow picture."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        picture = ImageOps.expand(Image.fromarray(self.images[number]), 4)
        left, top = random.randrange(9), random.randrange(9)
        picture = picture.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            picture = ImageOps.mirror(picture)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255, self.labels[number]


def ordinary_steps(net: YNet, images: Tensor, labels: Tensor, batch: int, workers: int, bf16: bool) -> Iterator[None]:
    """The steps of an ordinary loop, one for each `next`."""
    device = next(net.parameters()).device
    loader = DataLoader(
        Pictures(images, labels),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    net.train()
    while True:
        for batch_of_both in loader:
            views, classes = (tensor.to(device, non_blocking=True) for tensor in batch_of_both)
            turned = torch.cat([torch.rot90(views, turn, (2, 3)) for turn in range(4)])
            turns = torch.arange(4, device=device).repeat_interleave(len(views))
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(net(views), classes) + F.cross_entropy(net.self_supervise(turned), turns)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def our_steps(trainer: Trainer) -> Iterator[None]:
    """The steps of `testtime train` as its loop takes them, one for each `next`, epoch after epoch."""
    trainer.set_lr(trainer.recipe.lr_at(0))
    trainer.model.train()
    epoch = 0
    while True:
        trainer.sums.zero_()
        for indices, number, pixels in trainer.batches(epoch):
            trainer.step(indices, number, pixels)
            yield
        epoch += 1


def repeat(work: Callable[[], Any]) -> Iterator[None]:
    """The same work for each `next`."""
    while True:
        work()
        yield


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(device: torch.device, steps: Iterator[None], seconds: float, warm: int, batch: int) -> Row:
    """Time steps of `batch` images for some seconds in pieces, after `warm` steps that are not counted."""
    begin = time.perf_counter()
    for _ in range(warm):
        next(steps)
    synchronise(device)
    warming = time.perf_counter() - begin
    piece, trial = 1, 0.0
    while trial < seconds / PIECES / 8:  # doubled until it takes a fair part of its time
        piece *= 2
        trial = time_steps(device, steps, piece)
    piece = max(1, round(piece * seconds / PIECES / trial))
    times = sorted(time_steps(device, steps, piece) for _ in range(PIECES))
    median = times[PIECES // 2]
    return {
        "images_per_s": round(piece * batch / median, 1),
        "batch": batch,
        "steps": piece * PIECES,
        "spread": round((times[-1] - times[0]) / median, 4),
        "warm_up_s": round(warming, 2),
    }


def time_steps(device: torch.device, steps: Iterator[None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        next(steps)
    synchronise(device)
    return time.perf_counter() - begin


def show(row: Row) -> Row:
    """Print a row and return it."""
    rate = f"{row['images_per_s']:10,.0f} images/s"
    epochs = f"{row['epochs_per_min']:8.3f} epochs/min" if "epochs_per_min" in row else ""
    ratio = f"{row['times_ordinary']:6.2f} × ordinary" if "times_ordinary" in row else ""
    share = f"{row['share_of_steps']:6.1%} of the steps alone" if "share_of_steps" in row else ""
    print(f"{row['name']:58s} {rate} {epochs} {ratio}{share}", flush=True)
    return row


def read_cifar(kind: str) -> tuple[Tensor, Tensor, str]:
    """CIFAR-10's training images and labels, or random ones of the same size, and what they are."""
    if kind == "cifar10":
        try:
            found = data.open("cifar10", split="train")
            assert found.labels is not None
            return found.images(slice(None)), found.labels, "CIFAR-10 training images"
        except data.DataError as error:
            print(f"{error}; random images instead")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (EPOCH["cifar10"], 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (len(images),), generator=generator)
    return images, labels, "random images of CIFAR-10's size and number"


def compare_loops(options: argparse.Namespace, device: torch.device) -> tuple[list[Row], str]:
    """The ordinary loop's rows and ours, on CIFAR-10 or images like it."""
    images, labels, what = read_cifar(options.data)
    pool = Pool("images", images, labels, device)
    print(f"\nresnet26, 32×32, joint, batch {options.batch}: {what}")
    rows: list[Row] = []
    warm = 20 if device.type == "cuda" else 1
    ordinary: dict[bool, float] = {}  # images a second, without and with autocast
    for precision in options.precision:
        about: Row = {"network": "resnet26", "size": 32, "precision": precision}
        bf16 = precision == "bf16"
        if bf16 not in ordinary:
            steps = ordinary_steps(resnet26().to(device), images, labels, options.batch, options.workers, bf16)
            row = measure(device, steps, options.seconds, warm, options.batch)
            name = f"ordinary loop, {options.workers} workers, {precision}"
            ordinary[bf16] = row["images_per_s"]
            rows.append(show({"name": name} | about | row | epochs_of(row, "cifar10") | {"times_ordinary": 1.0}))
            del steps  # and its workers
        recipe = Recipe.cifar(batch=options.batch, precision=precision)
        for seeds in options.seeds:
            trainer = Trainer(
                [Training(resnet26(seed=seed).to(device), replace(recipe, seed=seed), pool) for seed in range(seeds)]
            )
            row = measure(device, our_steps(trainer), options.seconds, warm, seeds * options.batch)
            trainer.finish()
            ratio = {"seeds": seeds, "times_ordinary": round(row["images_per_s"] / ordinary[bf16], 2)}
            name = f"testtime, {seeds} seeds side by side, {precision}" if seeds > 1 else f"testtime, {precision}"
            rows.append(show({"name": name} | about | row | epochs_of(row, "cifar10") | ratio))
    return rows, what


def epochs_of(row: Row, kind: str) -> Row:
    return {"epochs_per_min": round(row["images_per_s"] * 60 / EPOCH[kind], 4)}


def make_photographs(folder: Path, count: int) -> None:
    """JPEGs of the size, in pixels and bytes, that ImageNet's usually have: 500×375, about 110 KB; a few, repeated."""
    rng = np.random.default_rng(0)
    files: list[bytes] = []
    for _ in range(min(count, 256)):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        pixels = (np.asarray(coarse) + rng.normal(0, 20, (375, 500, 1))).clip(0, 255).astype(np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "JPEG", quality=90)
        files.append(content.getvalue())
    for number in range(count):
        path = folder / f"n{number % 8:08d}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[number % len(files)])


def open_photographs(folder: Path, side: int, count: int) -> PictureSet:
    """Some of a folder's photographs, as `testtime train` would pack them."""
    place = folder / "train" if (folder / "train").is_dir() else folder
    found = data.open("folder", place, size=side, resize=side)
    assert isinstance(found, PictureSet)
    assert found.labels is not None
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].sort().values
    files = [found.files[number] for number in chosen.tolist()]
    return PictureSet(found.name, place, files, found.labels[chosen], found.classes, side, side)


def photographs(
    options: argparse.Namespace, device: torch.device, pictures: PictureSet, size: int, cache: Path
) -> list[Row]:
    """From files to steps: what each stage gives, for ResNet-18 on crops that are a bit smaller than the pictures."""
    batch, precision = options.photograph_batch, "bf16" if device.type == "cuda" else "fp32"
    seconds = options.seconds / 2  # there are many rows
    about: Row = {"network": "resnet18", "size": size, "precision": precision}
    mean_bytes = round(sum((pictures.folder / name).stat().st_size for name in pictures.files) / len(pictures))
    side = f"{pictures.size}×{pictures.size}"
    print(f"\nresnet18, crops of {size} from {side}: {len(pictures):,} files of {mean_bytes:,} bytes, batch {batch}")
    rows: list[Row] = []

    def add(name: str, row: Row) -> None:
        rows.append(show({"name": name} | about | row))

    begin = time.perf_counter()
    packed = data.pack(pictures, cache)
    rate = round(len(pictures) / (time.perf_counter() - begin), 1)
    add("decode JPEGs into the packed cache", {"images_per_s": rate, "file_bytes": mean_bytes})

    pool = Pool("images", packed, None, device, resident=0)
    rng = torch.Generator().manual_seed(0)

    def random_batch() -> Tensor:
        return torch.randint(len(packed), (batch,), generator=rng)

    reading = repeat(lambda: packed.images(random_batch()))
    add("read random batches from the cache", measure(device, reading, seconds, 2, batch))
    reading = repeat(lambda: pool.take(random_batch()))
    add("read random batches to the device", measure(device, reading, seconds, 2, batch))

    recipe = Recipe.imagenet(batch=batch, precision=precision)
    warm = 5 if device.type == "cuda" else 1
    alone = None
    for name, resident in (("training steps, images on the device", None), ("training, fed from the cache", 0)):
        net = resnet18(1000, size=size).to(device)
        net.describe(augment={"name": "resized-crop-flip", "size": size})
        trainer = Trainer([Training(net, recipe, Pool("images", packed, None, device, resident=resident))])
        row = measure(device, our_steps(trainer), seconds, warm, trainer.trainings[0].batch)
        trainer.finish()
        alone = alone or row["images_per_s"]
        add(name, row | epochs_of(row, "imagenet") | {"share_of_steps": round(row["images_per_s"] / alone, 4)})
    adapter = Episodic(resnet18(1000, size=size).to(device).eval(), copies=64, threshold=0.0)
    images = packed.images(slice(0, 64))[..., :size, :size].to(device)
    row = measure(device, repeat(lambda: adapter.predict(images)), seconds, 1, len(images))
    add("look at images that the threshold passes over", row | {"precision": "fp32"})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps")
    parser.add_argument("--seconds", type=float, help="how long to measure a row (default: 3; on a CPU 20; quick 2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3), help="how many seeds together")
    parser.add_argument("--batch", type=int, help="images in a step (default: 128; quick on a CPU 16)")
    parser.add_argument("--workers", type=int, help="the ordinary loop's worker processes (default: up to 8)")
    parser.add_argument("--data", choices=("cifar10", "synthetic"), default="cifar10")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "tf32", "bf16"), default=("fp32",))
    parser.add_argument("--imagenet", metavar="FOLDER", help="photographs, or synthetic")
    parser.add_argument("--photographs", type=int, help="photographs to take (default: 4096; on a CPU 64)")
    parser.add_argument("--sizes", type=int, nargs="+", default=(224, 128), help="sides of the crops")
    parser.add_argument("--only-imagenet", action="store_true", help="leave the comparison of loops out")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.seconds = options.seconds or (2.0 if options.quick else 3.0 if cuda else 20.0)
    options.batch = options.batch or (16 if options.quick and not cuda else 128)
    options.photograph_batch = 256 if cuda else 8
    options.photographs = options.photographs or (4096 if cuda else 64)
    options.workers = min(8, os.cpu_count() or 1) if options.workers is None else options.workers
    return options


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    machine = describe_machine(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    where = f"{machine['hardware']['device']}; {machine['hardware']['processor']}, {cores} cores"
    print(f"{where}; torch {machine['versions']['torch']}")
    rows: list[Row] = []
    what = None
    if not options.only_imagenet:
        rows, what = compare_loops(options, device)
    if options.imagenet:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(options.imagenet)
            if options.imagenet == "synthetic":
                folder = Path(scratch, "photographs")
                make_photographs(folder, options.photographs)
            for size in options.sizes:
                pictures = open_photographs(folder, round(size * 8 / 7), options.photographs)
                rows += photographs(options, device, pictures, size, Path(scratch, "packed", str(size)))
    if options.out:
        kind = "synthetic JPEGs of 500×375" if options.imagenet == "synthetic" else options.imagenet and folder.name
        document = {
            "hardware": where,
            "versions": machine["versions"],
            "command": shlex.join(["python", "benchmarks/train.py", *sys.argv[1:]]),
            "data": what,
            "photographs": kind,
            "seed": 0,
            "rows": rows,
        }
        options.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
