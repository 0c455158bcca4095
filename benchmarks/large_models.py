"""Models at 224×224 on a GPU: one stream and 16, against the naive loop and plain training in the same precision.

    python benchmarks/models.py --device cuda --large --precision bf16 --out results/models-h200.json
    python benchmarks/models.py --large --tiny --seconds 1              # the same rows of small models, on a CPU

A step is forward, backward and update on 32 augmented, rotated copies of an image; a whole answer of an adapter also
observes the image before and after. The naive loop is that of engine.py, under autocast for bf16. Plain training is
steps of encoder and branch on one batch with as many images as 16 streams have copies, counted as 16 steps. `norm` rows
move only normalisation layers, of which alone there is a copy per stream. Contestants take turns in pairs, so that the
memory holds two of them; a speed is the median over rounds of the ratio of two times of one round.

The last row is the memory of 1,000 such streams of a ResNet-50: what stays allocated after an image of each, beside the
network, and the peak, computed 16 at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import testtime as tt
from engine import naive, take_time
from testtime.augment import CropFlip
from testtime.tasks import Rotation

Row = dict[str, Any]
Work = Callable[[], Any]

COPIES, STREAMS, MANY, LR = 32, 16, 1000, 1e-6
MODELS = {
    "torchvision resnet50": {},
    "torchvision vit_b_16": {},
    "torchvision convnext_tiny": {},
    "transformers ViT": {},
    "transformers Dinov2": {"hidden_size": 384, "num_attention_heads": 6, "patch_size": 14},  # Dinov2-small
}
"""Name → arguments at 224×224."""


@contextlib.contextmanager
def same_arithmetic(precision: str, device: str) -> Any:
    """The precision of an adapter for code that is not ours."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        yield


def make_naive(net: tt.YNet, images: Tensor, copies: int, precision: str, device: str) -> Work:
    def work() -> None:
        with same_arithmetic(precision, device):
            naive(net, images, copies, 1, online=True, lr=LR)

    return work


def make_training(net: tt.YNet, size: int, batch: int, precision: str, device: str) -> Work:
    net.train()
    if device == "cuda":
        net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD([*net.encoder.parameters(), *net.get_submodule("ssl").parameters()], lr=0.001)
    images, targets = torch.rand(batch, 3, size, size, device=device), torch.randint(4, (batch,), device=device)

    def work() -> None:
        optimizer.zero_grad()
        with same_arithmetic(precision, device):
            loss = F.cross_entropy(net.self_supervise(images).float(), targets)
        loss.backward()
        optimizer.step()

    return work


def make_adapter(kind: Callable[..., tt.Adapter], *arguments: Any, **settings: Any) -> tt.Adapter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the branch is not trained
        return kind(*arguments, lr=LR, task=Rotation(), augment=CropFlip(), **settings)


def make_work(kind: str, net: tt.YNet, pool: Tensor, options: argparse.Namespace) -> tuple[Work, int]:
    """Return a contestant, and the number of steps it takes per call."""
    copies, device, precision = options.copies, options.device, options.precision
    shared: dict[str, Any] = {"copies": copies, "precision": precision}
    few = pool[: options.images]
    if kind == "naive":
        return make_naive(net, few, copies, precision, device), len(few)
    if kind == "training":
        return make_training(copy.deepcopy(net), pool.shape[-1], copies * len(pool), precision, device), len(pool)
    if kind == "online":
        online = make_adapter(tt.Online, net, **shared)
        return lambda: online.predict(few), len(few)
    own = {"update": "norm"} if kind == "norm_streams" else {}
    streams = make_adapter(tt.Streams, net, len(pool), **own, **shared)
    return lambda: streams.predict(pool), len(pool)


PAIRS = {
    "online_over_naive": ("naive", "online"),
    "streams_over_training": ("training", "streams"),
    "norm_streams_over_streams": ("streams", "norm_streams"),
}
"""Name of a speed → contestants: the time of the first divided by that of the second."""


def time_pair(kinds: tuple[str, str], net: tt.YNet, pool: Tensor, options: argparse.Namespace) -> list[list[float]]:
    """Return the times per step of two contestants in turns, for at least five rounds."""
    work = [make_work(kind, net, pool, options) for kind in kinds]
    times: list[list[float]] = [[] for _ in work]
    for do, _ in work:
        do()  # warm up: capture, allocate
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds or len(times[0]) < 5:
        for taken, (do, steps) in zip(times, work, strict=True):
            taken.append(take_time(do, options.device) / steps)
    return times


def compare(name: str, net: tt.YNet, pool: Tensor, options: argparse.Namespace) -> Row:
    """Measure the contestants, pair by pair."""
    row: Row = {"model": name, "cut": net.cut, "size": pool.shape[-1], "precision": options.precision}
    row |= {"copies": options.copies, "streams": len(pool)}
    row["parameters"] = sum(parameter.numel() for parameter in net.parameters())
    for label, kinds in PAIRS.items():
        times = time_pair(kinds, net, pool, options)
        free_memory(options.device)
        for kind, taken in zip(kinds, times, strict=True):
            row.setdefault(f"{kind}_ms", round(1000 * statistics.median(taken), 3))
        ratios = sorted(a / b for a, b in zip(*times, strict=True))
        row |= {label: round(statistics.median(ratios), 3), f"{label}_rounds": len(ratios)}
        row[f"{label}_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    row["streams_over_naive"] = round(row["naive_ms"] / row["streams_ms"], 3)
    return row


def free_memory(device: str) -> None:
    """Give the memory of what is no longer used back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure_many(net: tt.YNet, size: int, precision: str) -> Row:
    """Return the GPU memory of many streams that move only normalisation layers, in MiB."""
    free_memory("cuda")
    before = torch.cuda.memory_allocated()
    settings: dict[str, Any] = {"update": "norm", "copies": COPIES, "precision": precision, "together": STREAMS}
    streams = make_adapter(tt.Streams, net, MANY, **settings)
    torch.cuda.reset_peak_memory_stats()
    streams.predict(torch.randint(0, 256, (MANY, 3, size, size), dtype=torch.uint8))
    gc.collect()
    torch.cuda.synchronize()
    row: Row = {"model": f"{MANY} streams of norms", "precision": precision, "together": STREAMS}
    row["network_mib"] = round(sum(parameter.numel() * 4 for parameter in net.parameters()) / 2**20)
    row["allocated_mib"] = round((torch.cuda.memory_allocated() - before) / 2**20)
    return row | {"peak_mib": round((torch.cuda.max_memory_allocated() - before) / 2**20)}


def make_tiny() -> dict[str, nn.Module]:
    """Small models that need no library, to run every line on a CPU."""
    vit = tt.vit(size=16, width=24, depth=4, heads=2)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
    head = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return {"testtime vit": vit, "plain torch ConvNet": nn.Sequential(*convolutions, *head)}


def list_networks(
    options: argparse.Namespace, load: Callable[[str, dict[str, Any]], nn.Module]
) -> list[tuple[str, Callable[[], tt.YNet]]]:
    """Return the models to measure; `load` builds those of other libraries."""

    def split(model: nn.Module) -> tt.YNet:
        return model if isinstance(model, tt.YNet) else tt.split(model, size=options.size, mean=(0.5,), std=(0.5,))

    if options.tiny:
        return [(name, lambda model=model: split(model)) for name, model in make_tiny().items()]
    wanted = options.only or list(MODELS)
    return [(name, lambda name=name: split(load(name, MODELS[name]))) for name in wanted]


def format_row(row: Row) -> str:
    if "allocated_mib" in row:
        return f"{row['model']}: {row['allocated_mib']} MiB, peak {row['peak_mib']}; network {row['network_mib']}"
    times = " ".join(f"{kind} {row[f'{kind}_ms']:.2f}" for kind in ("naive", "online", "streams", "training"))
    return (
        f"{row['model']:28s} ms per step: {times}; one stream {row['online_over_naive']:.2f} × naive, "
        f"{row['streams']} streams {row['streams_over_training']:.2f} × training, "
        f"norms {row['norm_streams_over_streams']:.2f} × all"
    )


def run(
    options: argparse.Namespace, load: Callable[[str, dict[str, Any]], nn.Module], document: Row, store: Work
) -> None:
    """Measure all models; `store` is called after each with the document complete up to there."""
    options.size, options.copies = (16, 2) if options.tiny else (224, COPIES)
    for name, make in list_networks(options, load):
        try:
            torch.manual_seed(0)
            net = make().to(options.device).eval()
            pool = torch.randint(0, 256, (STREAMS, 3, options.size, options.size), dtype=torch.uint8)
            rows = [compare(name, net, pool, options)]
            if name == "torchvision resnet50" and options.device == "cuda":
                rows.append(measure_many(net, options.size, options.precision))
        except (ImportError, RuntimeError, ValueError) as error:
            document["skipped"][name] = str(error)
            print(f"{name:28s} skipped: {error}", flush=True)
        else:
            document["rows"] += rows
            print("\n".join(map(format_row, rows)), flush=True)
        finally:
            net = None
            free_memory(options.device)
        store()
