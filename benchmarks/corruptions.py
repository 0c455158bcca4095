"""How fast the fifteen corruptions are: images per second on CIFAR-10's 10,000 test images.

    python benchmarks/corruptions.py --out results/corruptions-cpu.json
    python benchmarks/corruptions.py --device cuda --all-severities --out results/corruptions-h200.json

Needs torch, numpy and pillow alone. The images come from the folder that TESTTIME_DATA names (CIFAR-10's binary
version, `cifar-10-batches-bin/test_batch.bin`); without it, synthetic images of the same size take their place, and the
output says so. Frost is cut from the procedural textures. Each figure is the best of `--repeats` timed passes after a
warm-up on 256 images; on a GPU, images start and end there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import PIL
import torch

from testtime.corruptions import CORRUPTIONS, SEVERITIES, corrupt

# The published generator at one severity on the 10,000 images, two cores; the others took under 7 s each.
PUBLISHED = {"glass_blur": 124.0, "frost": 37.0, "zoom_blur": 32.0, "snow": 14.0, "motion_blur": 9.0}
PUBLISHED_TOTAL = 245.0


def read_images(count: int) -> tuple[torch.Tensor, str]:
    """The first images of CIFAR-10's test set or synthetic ones, uint8 `(N, 3, 32, 32)`, and what they are."""
    root = os.environ.get("TESTTIME_DATA")
    path = Path(root, "cifar-10-batches-bin", "test_batch.bin") if root else None
    if path is not None and path.is_file():
        records = np.fromfile(path, np.uint8, count=count * 3073).reshape(-1, 3073)
        return torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()), "CIFAR-10 test images"
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear", align_corners=False)
    return (smooth * 255).to(torch.uint8), "synthetic images of CIFAR-10's size (TESTTIME_DATA has no CIFAR-10)"


def seconds(images: torch.Tensor, name: str, severity: int, repeats: int) -> float:
    """The best time of several passes over all images."""
    corrupt(images[:256], name, severity)
    best = float("inf")
    for _ in range(repeats):
        if images.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        corrupt(images, name, severity)
        if images.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def hardware(device: str) -> str:
    """The machine in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    described = f"{model}, {cores} cores, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}; {described}" if device == "cuda" else described


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="Speed of the fifteen corruptions.")
    parser.add_argument("--quick", action="store_true", help="500 images")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--severity", type=int, choices=SEVERITIES, default=5)
    parser.add_argument("--all-severities", action="store_true", help="all five: 75 sets")
    parser.add_argument("--repeats", type=int, default=1, help="timed passes; the best counts")
    parser.add_argument("--out", type=Path, help="JSON to write")
    settings = parser.parse_args()
    if settings.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here")

    images, what = read_images(500 if settings.quick else 10_000)
    images = images.to(settings.device)
    severities = SEVERITIES if settings.all_severities else (settings.severity,)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["pillow"] = PIL.__version__
    machine = hardware(settings.device)
    print(f"{len(images)} {what}, severity {', '.join(map(str, severities))}, on {machine}")
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    print(f"load before the start {load}: other work on the same cores slows this down many times")
    print(", ".join(f"{key} {value}" for key, value in versions.items()))
    print(f"\n{'corruption':<20}{'seconds':>10}{'images/s':>12}{'published s':>14}")

    rows = []
    for name in CORRUPTIONS:
        times = [seconds(images, name, severity, settings.repeats) for severity in severities]
        spent = sum(times)
        rate = len(images) * len(severities) / spent
        published = PUBLISHED.get(name)
        rows.append(
            {
                "corruption": name,
                "seconds": round(spent, 3),
                "images_per_second": round(rate),
                "seconds_by_severity": {str(s): round(t, 3) for s, t in zip(severities, times, strict=True)},
                "published_seconds_one_severity": published,
            }
        )
        print(f"{name:<20}{spent:>10.2f}{rate:>12,.0f}{f'{published:.0f}' if published else '< 7':>14}", flush=True)
    total = sum(row["seconds"] for row in rows)
    print(f"{'total':<20}{total:>10.2f}{'':>12}{PUBLISHED_TOTAL:>14.0f}")
    print("published: that generator at one severity on the 10,000 test images, on two cores")

    if settings.out:
        result = {
            "what": "seconds to corrupt a set of images, by corruption",
            "images": what,
            "n": len(images),
            "severities": list(severities),
            "seed": 0,
            "repeats": settings.repeats,
            "device": settings.device,
            "hardware": machine,
            "load_average_before": load,
            "versions": versions,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "total_seconds": round(total, 3),
            "published_total_seconds_one_severity": PUBLISHED_TOTAL,
            "corruptions": rows,
        }
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
