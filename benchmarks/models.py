"""How fast the models that people bring adapt online, and in how much memory, against the naive loop of engine.py.

    python benchmarks/models.py --quick                             # nothing to install, about a minute
    python benchmarks/models.py --out results/models-cpu.json       # with timm, torchvision and transformers
    python benchmarks/models.py --out results/models-cpu.json --resume   # the models that are not in the file yet
    python benchmarks/models.py --device cuda                       # also 16 streams at once
    python benchmarks/models.py --device cuda --large               # at 224×224, see large_models.py

Every model has random weights and is split by `testtime.split` at about two thirds of its depth. Scales of Batch
Normalization that start at zero, as the last of each residual block in timm's ResNets, are set to 0.5 for both sides
(`scales_filled` counts them): next to zero, gradients become denormal numbers, which processors compute slowly. As
they are made, these models are slower than in the table, `Online` more so than the naive loop. The learning rate is so
low that no update is undone; `undone` is the share that is, since that takes time too.

An image is answered after a step on 32 augmented, rotated copies of it, by `Online` and by the naive loop. They do not
do the same otherwise:

    naive    makes each copy as a Pillow picture; Batch Normalization uses the statistics of the batch; answers with one
             forward pass of the image; copies the network at the start of every round
    Online   makes all copies as one tensor; Batch Normalization uses the model's statistics; measures the loss on the
             image in four rotations before and after the step, the guard copies the parameters and tests their values;
             on a CPU, models without grouped convolutions or C++ kernels learn from two halves of the copies in two
             threads, an image after its step and the next one before it are observed at once, and so are the classes
             before and after the step if the classifier stays as it is
    bare     Online with `measure_loss=False`: classifies the image before and after the step, once each

All take turns, eight images each, on two threads; the speed is the median over the rounds of the naive time divided by
ours. They compute in their default precision: on a GPU, TF32 in all layers for us, in convolutions alone for torch.

Peak memory is measured in a process for each, as the growth of the resident set, or of what torch takes from the GPU,
from when the network is there, in calls of one image; `copies` is how many more copies of the network's parameters
`Online` takes than the naive loop, `copies_of_several` the same in calls of two images, which are undone as a whole if
they fail. Models that cannot be imported, or fail, are named as skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import large_models
import testtime as tt
from engine import naive, take_time
from testtime.augment import CropFlip
from testtime.networks import resnet26
from testtime.provenance import describe_machine
from testtime.tasks import Rotation

Row = dict[str, Any]

COPIES, THREADS, SIZE, STREAMS, LR = 32, 2, 64, 16, 1e-6


def small_vit() -> nn.Module:
    """A vision transformer of torch's own layers."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 192, 8, stride=8)
            self.position = nn.Parameter(torch.randn(1, 64, 192) * 0.02)

        def forward(self, images: Tensor) -> Tensor:
            return self.patch(images).flatten(2).transpose(1, 2) + self.position  # (N, 64, 192)

    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(192, 3, 768, **options) for _ in range(6)]
    pool = nn.Sequential(nn.Unflatten(1, (64, 1)), nn.AvgPool3d((64, 1, 1)), nn.Flatten())
    return nn.Sequential(Tokens(), *blocks, nn.LayerNorm(192), pool, nn.Linear(192, 100))


def small_convnet() -> nn.Module:
    """Separable convolutions with Batch Normalization."""

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        norms = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        return nn.Sequential(depthwise, norms[0], nn.ReLU(), pointwise, norms[1], nn.ReLU())

    stem = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    sizes = [(32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [block(*size) for size in sizes]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))


def from_timm(name: str, **options: Any) -> nn.Module:
    return importlib.import_module("timm").create_model(name, pretrained=False, **options)


def from_torchvision(name: str, **options: Any) -> nn.Module:
    return importlib.import_module("torchvision").models.get_model(name, weights=None, **options)


def from_transformers(name: str, **options: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    configuration = getattr(library, f"{name}Config")(**options)
    return getattr(library, f"{name}ForImageClassification")(configuration)


def load_large(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a model of large_models.py."""
    library, model = name.split()
    return {"torchvision": from_torchvision, "transformers": from_transformers}[library](model, **arguments)


OWN: dict[str, Callable[[], nn.Module]] = {
    "testtime resnet26": resnet26,
    "plain torch ViT": small_vit,
    "plain torch ConvNet": small_convnet,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"torchvision {name}": lambda name=name: from_torchvision(name)
        for name in (
            *("resnet18", "resnet50", "mobilenet_v3_small", "regnet_y_400mf"),
            *("efficientnet_b0", "convnext_tiny", "swin_t"),
        )
    },
    "torchvision vit_b_16": lambda: from_torchvision("vit_b_16", image_size=SIZE),
    **{
        f"timm {name}": lambda name=name: from_timm(name)
        for name in ("resnet26", "resnet50", "convnextv2_atto", "mobilenetv4_conv_small", "efficientvit_b0")
    },
    **{
        f"timm {name}": lambda name=name: from_timm(name, img_size=SIZE)
        for name in (
            *("vit_tiny_patch16_224", "deit_tiny_patch16_224"),
            *("efficientvit_m0", "swin_tiny_patch4_window7_224"),
        )
    },
    "transformers ResNet": lambda: from_transformers("ResNet"),
    "transformers ConvNext": lambda: from_transformers("ConvNext"),
    "transformers ViT": lambda: from_transformers("ViT", image_size=SIZE),
    "transformers Dinov2": lambda: from_transformers("Dinov2", image_size=SIZE, patch_size=16),
}


def make_network(name: str, device: str) -> tuple[tt.YNet, Tensor]:
    """Return a model as a network, and images for it on the CPU, `(16, 3, H, W)`."""
    torch.manual_seed(0)
    model = (OWN | OTHERS)[name]()
    fill_zero_scales(model)
    net = model if isinstance(model, tt.YNet) else tt.split(model, size=SIZE, mean=(0.5,), std=(0.5,))
    size = net.card.size or SIZE
    return net.to(device).eval(), torch.randint(0, 256, (STREAMS, 3, size, size), dtype=torch.uint8)


@torch.no_grad()
def fill_zero_scales(model: nn.Module) -> int:
    """Set the scales of Batch Normalization that are all zero to 0.5; returns how many layers that were."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    zero = [norm.weight for norm in norms if norm.affine and not norm.weight.any()]
    for scale in zero:
        scale.fill_(0.5)
    return len(zero)


def make_naive(net: tt.YNet) -> Callable[[Tensor], Any]:
    return lambda images: naive(net, images, COPIES, 1, online=True, lr=LR)


def make_online(net: tt.YNet) -> Callable[[Tensor], Any]:
    return adapt(tt.Online, net)


def make_bare(net: tt.YNet) -> Callable[[Tensor], Any]:
    return adapt(tt.Online, net, measure_loss=False)


def make_streams(net: tt.YNet) -> Callable[[Tensor], Any]:
    return adapt(tt.Streams, net, STREAMS)


def adapt(kind: Callable[..., tt.Adapter], *arguments: Any, **options: Any) -> Callable[[Tensor], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the branch is not trained
        return kind(*arguments, copies=COPIES, lr=LR, task=Rotation(), augment=CropFlip(), **options).predict


CONTESTANTS = {"naive": make_naive, "online": make_online, "bare": make_bare}
MEMORY = {"naive": ("naive", 1), "online": ("online", 1), "several": ("online", 2)}
"""What memory is measured of: contestant, and images in a call."""


def compare(name: str, options: argparse.Namespace) -> Row:
    """Measure all in turns, for at least five rounds."""
    net, pool = make_network(name, options.device)
    work = {kind: (make(net), pool[: options.images]) for kind, make in CONTESTANTS.items()}
    if options.device == "cuda":
        work["streams"] = make_streams(net), pool
    times: dict[str, list[float]] = {kind: [] for kind in work}
    for answer, images in work.values():
        answer(images)  # warm up: compile, capture
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds or len(times["online"]) < 5:
        for kind, (answer, images) in work.items():
            times[kind].append(take_time(lambda do=answer, given=images: do(given), options.device) / len(images))
    row: Row = {"model": name, "cut": net.cut, "size": pool.shape[-1]}
    row["scales_filled"] = fill_zero_scales((OWN | OTHERS)[name]())
    row |= {"rounds": len(times["online"]), "images": options.images}
    row["parameters"] = sum(parameter.numel() for parameter in net.parameters())
    row |= {f"{kind}_ms": round(1000 * statistics.median(times[kind]), 1) for kind in work}
    row |= summarise_speed(times["naive"], times["online"])
    row |= {f"bare_{key}": value for key, value in summarise_speed(times["naive"], times["bare"]).items()}
    row["undone"] = float(work["online"][0](pool[: options.images]).rolled_back.float().mean())
    if "streams" in times:
        row |= {f"streams_{key}": value for key, value in summarise_speed(times["naive"], times["streams"]).items()}
    return row


def summarise_speed(naive_times: list[float], times: list[float]) -> Row:
    """Return median and range of the speed, as a multiple of the naive loop's in the same round."""
    ratios = sorted(a / b for a, b in zip(naive_times, times, strict=True))
    return {"speed": round(statistics.median(ratios), 3), "range": [round(ratios[0], 3), round(ratios[-1], 3)]}


def measure_memory(name: str, kind: str, device: str) -> int | None:
    """Return by how many bytes this process grows at most, on its device; None if the system does not say."""
    small = resnet26(depth=8, size=16).to(device).eval()
    make, images = MEMORY[kind]
    CONTESTANTS[make](small)(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))  # loads code, which does not count
    net, pool = make_network(name, device)
    known = reset_peak()
    before = torch.cuda.memory_reserved() if device == "cuda" else read_status("VmRSS")
    if before is None or not (known or device == "cuda"):
        return None
    work = CONTESTANTS[make](net)
    for given in (pool[:1], pool[:images], pool[:images]):
        work(given)
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else read_status("VmHWM")
    return None if peak is None else max(0, peak - before)


def read_status(field: str) -> int | None:
    """Return a size of this process in bytes, from Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def reset_peak() -> bool:
    """Forget the largest size of this process so far; returns whether the system can do so."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def compare_memory(name: str, parameters: int, device: str) -> Row:
    """Measure the peak memory of both, in a process each."""
    peaks = {}
    for kind in MEMORY:
        command = [sys.executable, __file__, "--device", device, "--memory", name, kind]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[kind] = json.loads(done.stdout.splitlines()[-1])
    if None in peaks.values():
        return {}
    row: Row = {f"{kind}_mib": round(peak / 2**20) for kind, peak in peaks.items()}
    row["copies"] = round((peaks["online"] - peaks["naive"]) / (4 * parameters), 2)
    return row | {"copies_of_several": round((peaks["several"] - peaks["naive"]) / (4 * parameters), 2)}


def format_row(row: Row) -> str:
    memory = f"{row['naive_mib']:6d} → {row['online_mib']:5d} MiB {row['copies']:+6.2f}" if "copies" in row else ""
    times = f"{row['naive_ms']:7.1f} → {row['online_ms']:7.1f} ms"
    streams = f" {STREAMS} streams {row['streams_speed']:6.2f} ×" if "streams_speed" in row else ""
    speeds = f"{row['speed']:5.2f} ×, bare {row['bare_speed']:5.2f} ×"
    return f"{row['model']:38s} {row['parameters'] / 1e6:6.1f} M  {times}  {speeds}{streams} {memory}"


def hash_code() -> str:
    """Return a hash of the package's code and of this file, which change between versions, too."""
    files = [*sorted(Path(tt.__file__).parent.rglob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def describe(device: str) -> Row:
    """Return the head of the result file."""
    machine = describe_machine(torch.device(device))
    processor = f"{machine['hardware']['processor']}, {torch.get_num_threads()} threads"
    versions = machine["versions"]
    for library in ("timm", "torchvision", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return {
        "command": shlex.join(["python", "benchmarks/models.py", *sys.argv[1:]]),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else processor,
        "versions": versions,
        "code": hash_code(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "rows": [],
        "skipped": {},
    }


def summarise(rows: list[Row]) -> Row:
    """Return the figures over all models."""
    speeds = [row["speed"] for row in rows]
    made: Row = {"geometric_mean": round(statistics.geometric_mean(speeds), 3), "slowest": min(speeds)}
    bare = [row["bare_speed"] for row in rows]
    made |= {"bare_geometric_mean": round(statistics.geometric_mean(bare), 3), "bare_slowest": min(bare)}
    copies = [row["copies"] for row in rows if "copies" in row]
    return made | ({"most_copies": max(copies)} if copies else {})


def read_finished(path: Path | None, head: Row) -> list[Row]:
    """Return the rows of an interrupted run of the same code and versions on the same hardware."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    same = all(found.get(key) == head[key] for key in ("hardware", "versions", "code"))
    return found["rows"] if same else []


def run(options: argparse.Namespace) -> None:
    document = describe(options.device)
    if options.resume:
        document["rows"] = read_finished(options.out, document)
        document |= summarise(document["rows"]) if document["rows"] else {}
    finished = {row["model"] for row in document["rows"]}
    print(f"{document['hardware']}; " + ", ".join(f"{name} {text}" for name, text in document["versions"].items()))
    print(f"{COPIES} copies; parameters, time per image of the naive loop → Online, speeds, peak memory, copies")
    for name in options.only or (OWN if options.quick else OTHERS):
        if name in finished:
            continue
        try:
            row = compare(name, options)
            row |= compare_memory(name, row["parameters"], options.device)
        except (ImportError, RuntimeError, ValueError) as error:
            document["skipped"][name] = str(error)
            print(f"{name:38s} skipped: {error}", flush=True)
        else:
            document["rows"].append(row)
            document |= summarise(document["rows"])
            print(format_row(row), flush=True)
        if options.out:  # after every model: what was measured outlives whatever comes then
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    if document["rows"]:
        for name, title in (("", "Online"), ("bare_", "bare")):
            mean, slowest = document[f"{name}geometric_mean"], document[f"{name}slowest"]
            print(f"{title}: geometric mean {mean:.2f}, slowest {slowest:.2f}")


def run_large(options: argparse.Namespace) -> None:
    """Measure the models of large_models.py."""
    document = describe(options.device)
    print(f"{document['hardware']}; " + ", ".join(f"{name} {text}" for name, text in document["versions"].items()))

    def store() -> None:
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    large_models.run(options, load_large, document, store)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="three small models, shorter measurements")
    names = dict.fromkeys([*OWN, *OTHERS, *large_models.MODELS])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(names), help="these models")
    parser.add_argument("--large", action="store_true", help="models at 224×224, against plain training too")
    parser.add_argument("--tiny", action="store_true", help="with --large: small models instead, on any device")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "tf32", "bf16"), help="of --large")
    parser.add_argument("--seconds", type=float, help="seconds to measure each model")
    parser.add_argument("--images", type=int, default=8, help="images per round, up to 16")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out that the same code measured")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large and options.device != "cuda" and not options.tiny:
        parser.error("`--large` needs `--device cuda`, or `--tiny`.")
    if options.large and options.only and not set(options.only) <= large_models.MODELS.keys():
        parser.error(f"`--only` must be among {', '.join(large_models.MODELS)}.")
    if not 1 <= options.images <= STREAMS:
        parser.error(f"`--images` must be in [1, {STREAMS}], got {options.images}.")
    if options.resume and not options.out:
        parser.error("`--resume` needs `--out`.")
    options.seconds = options.seconds or (4.0 if options.quick else 20.0)
    torch.set_num_threads(THREADS)
    if options.memory:
        name, kind = options.memory
        print(json.dumps(measure_memory(name, kind, options.device)))
    elif options.large:
        run_large(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
