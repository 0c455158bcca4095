"""The table of trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testtime.networks import YNet, bundled, load
from testtime.training.pool import hash_tensors

from .documents import link, table
from .result_files import CIFAR, EARLIER, PICTURES, format_hardware, read_file

ALONE = "seed-0"
"""The one training that had its GPU to itself."""
TOGETHER = *(f"joint-seed-{seed}" for seed in range(3)), *(f"robust-{seed}" for seed in range(3))
FILES: Mapping[str, Path] = {
    **{
        name: CIFAR / f"training-{name}.json"
        for name in (
            *(*TOGETHER, "robust-x2", "plain", "alp", "bn-joint", "bn-plain", *EARLIER, "tf32-0", "tf32-1"),
            *("uda", "vit-masked", "vit-rotation"),
        )
    },
    **{f"imagenette-{name}": PICTURES / f"training-{name}.json" for name in ("joint", "plain")},
}


def format_trainings() -> str:
    """Every training: settings, time, error and where its network is bundled."""
    nets = {name: load(name) for name in bundled()}
    rows = []
    for name, file in FILES.items():
        held = read_file(file)
        records = list(held.values()) if name == "uda" else [held]
        rows.append([*describe(records, nets, name == ALONE), link(file)])
    heads = ["network", "method", "epochs", "seed", "arithmetic", "hardware", "seconds", "last test error in %"]
    return table([*heads, "bundled as", "file"], rows, words=(0, 1, 4, 5, 8, 9))


def describe(records: Sequence[Mapping[str, Any]], nets: Mapping[str, YNet], alone: bool) -> list[str]:
    """The cells of a training, or of several that differ only in their target."""
    held, last = records[0]["configuration"], records[0]["epochs"][-1]
    recipe, shape = held["recipe"], held["network"]["architecture"]
    seconds = sum(record["seconds"] / record["epochs"][-1].get("together", 1) for record in records)
    start = [
        name for name, net in nets.items() if hash_tensors(net.state_dict().values()) == held["network"].get("start")
    ]
    bundle = [name for name, net in nets.items() if _is_same(net.card.record, records[0])]
    held_out = " ‡" if "held_out" in held.get("data", {}) else ""
    several = f", one for each of {len(records)} sets" if len(records) > 1 else ""
    return [
        _title(shape),
        f"{recipe['method']}{several}{f', from `{start[0]}`' if start else ''}",
        str(recipe["epochs"]),
        str(recipe["seed"]),
        recipe["precision"] if "precision" in recipe else "bf16" if recipe["bf16"] else "fp32",
        format_hardware(records[0]["hardware"]),
        f"{seconds:,.0f}{'' if alone else ' †'}",
        f"{100 * last['test_error']:.2f}{held_out}" if "test_error" in last and len(records) == 1 else "",
        f"`{bundle[0]}`" if bundle else "",
    ]


def _is_same(known: Mapping[str, Any] | None, record: Mapping[str, Any]) -> bool:
    """Whether a network's own record is that of a training."""
    if not known:
        return False
    return known["configuration"] == record["configuration"] and known["epochs"][-1] == record["epochs"][-1]


def _title(shape: Mapping[str, Any]) -> str:
    """The name of an architecture."""
    if shape["name"] == "vit":
        return f"ViT, {'masked patches' if shape['outputs'] is None else 'rotation'}"
    width = f" of width {shape['width']}" if shape.get("width", 1) > 1 else ""
    return f"{shape['name'].replace('resnet', 'ResNet-')}{width}, {shape['norm'].capitalize()} Normalization"
