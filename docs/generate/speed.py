"""Tables of what the benchmarks measured: the engine, training, the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .documents import table

_SHOWN = 64  # of the rows with many at once
_NETWORKS = {
    "resnet8": "ResNet-8 (digits)",
    "resnet26": "ResNet-26",
    "resnet18": "ResNet-18 at 224×224",
}
_COPIES = {"resnet26": "ResNet-26, 32×32, 32 copies", "resnet18": "ResNet-18, 224×224, 64 copies"}

_RATIOS = ("online_over_naive", "streams_over_training", "norm_streams_over_streams")

Row = Mapping[str, Any]


def format_engine(engine: Mapping[str, Any], network: str) -> str:
    """Steps a second of a network; of the rows with many at once 64, the most and the fastest."""
    own = [row for row in engine["rows"] if row.get("network", "resnet26") == network]
    memory = any(row.get("peak_mib") for row in own)
    counts = {row["name"]: int(row["name"].split()[0]) for row in own if row["name"][0].isdecimal()}
    most, fastest = max(counts.values(), default=0), max(own, key=lambda row: row["steps_per_s"])["name"]
    rows = []
    for row in own:
        if most > _SHOWN and counts.get(row["name"], most) not in (_SHOWN, most, counts.get(fastest)):
            continue
        cells = [f"{row['steps_per_s']:,.1f}", f"{row['images_per_s']:,.1f}", f"{row['times_naive']:,.2f}"]
        peak = "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}"
        rows.append([row["name"], *cells, *([peak] if memory else [])])
    return table([_COPIES[network], "steps/s", "images/s", "× naive loop", *(["peak MiB"] if memory else [])], rows)


def format_joint_training(held: Mapping[str, Any]) -> str:
    """Images a second of joint training by arithmetic, and of an ordinary loop."""
    rows = [row for row in held["rows"] if "times_ordinary" in row]
    counts = sorted({row["seeds"] for row in rows if "seeds" in row})
    loop = next(row["name"] for row in rows if "seeds" not in row).rpartition(", ")[0]
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        times = f" ({row['times_ordinary']:.1f} times)" if "seeds" in row else ""
        cells.setdefault(row["precision"], {})[row.get("seeds", 0)] = f"{row['images_per_s']:,.0f}{times}"
    heads = ["joint training, images/s", loop, *("one seed" if one == 1 else f"{one} seeds together" for one in counts)]
    return table(heads, [[name, *(own.get(count, "") for count in (0, *counts))] for name, own in cells.items()])


def format_heap(held: Mapping[str, Any]) -> str:
    """Milliseconds and memory of computations on a CPU, with freed memory returned to the system, and reused."""
    rows = [
        [row["case"], *(f"{row[kind][key]:,.0f}" for key in ("ms", "mib") for kind in ("returned", "reused"))]
        for row in held["rows"]
    ]
    for cells, row in zip(rows, held["rows"], strict=True):
        cells.insert(3, f"{row['times']:.2f}")
    return table(["", "ms", "ms, reused", "times", "peak MiB", "peak MiB, reused"], rows)


def format_models(held: Mapping[str, Any]) -> str:
    """Milliseconds an image and memory of the models that people bring, against a naive loop."""
    rows = []
    for row in held["rows"]:
        cells = [f"{row['parameters'] / 1e6:.1f}", *(f"{row[f'{name}_ms']:,.0f}" for name in ("naive", "online"))]
        cells += [f"{row['speed']:.2f}", f"{row['bare_ms']:,.0f}", f"{row['bare_speed']:.2f}"]
        rows.append([row["model"], *cells, *(f"{row[name]:,.0f}" for name in ("naive_mib", "online_mib"))])
    means = [f"{held[name]:.2f}" for name in ("geometric_mean", "bare_geometric_mean")]
    heads = ["model", "parameters, M", "loop, ms", "`Online`, ms", "times", "without loss, ms", "times"]
    last = ["geometric mean", "", "", "", means[0], "", means[1], "", ""]
    return table([*heads, "loop, MiB", "`Online`, MiB"], [*rows, last])


def format_large_models(held: Mapping[str, Any]) -> str:
    """Milliseconds a step of large models on a GPU, and the ratios that matter."""
    rows = []
    for row in held["rows"]:
        if "naive_ms" in row:
            cells = [f"{row[f'{name}_ms']:.1f}" for name in ("naive", "online", "streams", "norm_streams", "training")]
            rows.append([row["model"], *cells, *(f"{row[name]:.2f}" for name in _RATIOS)])
    times = ("`Online` / loop", "streams / training", "norms / streams")
    heads = ["model", "loop, ms", "`Online`", "16 streams", "16 streams of norms", "training", *times]
    return table(heads, rows)


def format_methods(*files: Mapping[str, Any]) -> str:
    """Milliseconds an image of each method, ours and those of a plain loop, on one machine after another."""
    held = [{row["method"]: row for row in file["rows"]} for file in files]
    rows = []
    for name in dict.fromkeys(name for one in held for name in one):
        cells = []
        for one in held:
            row = one.get(name)
            words = ("ms_per_image", "ms_per_image_loop", "speed")
            cells += ["", "", ""] if row is None else [f"{row[word]:,.2f}" for word in words]
        rows.append([f"`{name}`", *cells])
    heads = ["CPU, ms" if file["machine"]["hardware"]["device"] == "cpu" else "GPU, ms" for file in files]
    return table(["method", *(cell for head in heads for cell in (head, "loop", "times"))], rows)


def format_gpu_kernels(held: Mapping[str, Any]) -> str:
    """Steps a second with the CUDA C++ kernels, and the gain over Triton alone, by arithmetic."""
    found = {(_work(row), row["precision"]): row for row in held["rows"]}
    precisions = list(dict.fromkeys(precision for _, precision in found))
    rows = []
    for work in dict.fromkeys(work for work, _ in found):
        cells = [found[work, precision] for precision in precisions]
        rows.append([work, *(text for row in cells for text in (_steps(row), f"{row['gain']['Triton alone']:.2f}"))])
    return table(["", *(head for precision in precisions for head in (f"{precision}, steps/s", "gain"))], rows)


def format_cpu_kernels(held: Mapping[str, Any]) -> str:
    """Steps a second with the C++ kernels, the gains over what would do without, and the time to a first answer."""
    without = ("plain torch", "torch.compile", "C++ without strided.h")
    rows = [[_work(row), _steps(row), *(f"{row['gain'][name]:.2f}" for name in without)] for row in held["rows"]]
    for kind, title in (("cold", "empty"), ("warm", "warm")):
        times = [f"{held['first_use_s'][name][kind]:.1f} s" for name in ("C++", "plain torch", "torch.compile")]
        rows.append([f"first answer, {title} caches", *times, ""])
    heads = ["float32", "steps/s", "gain over plain torch", "gain over `torch.compile`", "gain of `strided.h`"]
    return table(heads, rows)


def _work(row: Row) -> str:
    count, what = row["work"].split(" ", 1)
    if what.startswith("gradients"):
        return f"{_NETWORKS[row['network']]}, {what}"
    kind = {"online": "stream", "streams": "stream", "episodes": "episode"}[what]
    many = f"one {kind}" if count == "1" else f"{int(count):,} {kind}s"
    return f"{_NETWORKS[row['network']]}, {many}"


def _steps(row: Row) -> str:
    ours: Sequence[float] = list(row["steps_per_s"].values())
    return f"{ours[0]:,.1f}" if ours[0] < 100 else f"{ours[0]:,.0f}"
