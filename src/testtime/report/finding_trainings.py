"""Trainings in the document of results: how long each took, how good it is, where its network ships, its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from testtime.corruptions import CORRUPTIONS
from testtime.networks import YNet, load, shipped
from testtime.report.committed import Findings
from testtime.report.documents import commands, link, table, wrap
from testtime.report.further import RETRAINED, TRAININGS
from testtime.training import Recipe
from testtime.training.pool import hash_tensors

_FOLDER = "photographs"  # what a folder of pictures is called in commands
_WHOLE = 50_000  # training images of CIFAR-10
_SHARED = (  # the GPU with others, which no record says
    *("gn-plain", "gn-alp", "bn-joint", "bn-plain", *RETRAINED),
    *("uda", "imagenette-joint", "imagenette-plain"),
)


def tell_trainings(found: Findings) -> str:
    """Every training: how long, how good, where its network is."""
    nets = {name: load(name) for name in shipped()}
    targets = [record for name, record in found.trainings.items() if name.startswith("uda ")]
    groups = {name: [record] for name, record in found.trainings.items() if not name.startswith("uda ")}
    groups |= {"uda": targets} if targets else {}
    rows = [_tell_training(name, records, nets) for name, records in groups.items()]
    heads = ["network", "method", "epochs", "seed", "arithmetic", "seconds", "last test error in %", "ships as", "file"]
    device = found.training["hardware"]["device"]
    others = [name for name, records in groups.items() if records[0]["hardware"]["device"] != device]
    apart = [f", but for `{name}` ({groups[name][0]['hardware']['processor']})" for name in others]
    words = (
        f"Every training is on one {device}{''.join(apart)}, with a test after each epoch where a test error stands "
        "here. It chose no network: the one kept is that of the last epoch. Trainings that went side by side share "
        "their seconds evenly."
    )
    if any(name in groups for name in _SHARED):
        words += " † These shared the GPU with other trainings, so that their seconds are no measure of speed."
    lines = [
        training_command(name, records, nets)
        for name, records in groups.items()
        if name != "gn-joint" and _family(records[0]) is not None
    ]
    return "\n\n".join([table(heads, rows), wrap(words), *([commands(lines)] if lines else [])])


def _tell_training(name: str, records: Sequence[Mapping[str, Any]], nets: Mapping[str, YNet]) -> list[str]:
    """The row of a training, or of several that differ in their target alone."""
    recipe, network = (records[0]["configuration"][key] for key in ("recipe", "network"))
    shape, start = network["architecture"], _start(records[0], nets)
    errors = [100 * record["epochs"][-1]["test_error"] for record in records if "test_error" in record["epochs"][-1]]
    ends = [f"{end:.2f}" for end in ((min(errors), max(errors)) if errors else ())]
    seconds = sum(record["seconds"] / record["epochs"][-1].get("together", 1) for record in records)
    place = next((name for name, net in nets.items() if _is_same(net.card.record, records[0])), None)
    several = f", one for each of {len(records)} sets" if len(records) > 1 else ""
    return [
        f"{shape['name'].replace('resnet', 'ResNet-')}, {shape['norm'].capitalize()} Normalization",
        f"{recipe['method']}{several}{f', from `{start}`' if start else ''}",
        str(recipe["epochs"]),
        str(recipe["seed"]),
        tell_arithmetic(recipe),
        f"{seconds:,.0f}{' †' if name in _SHARED else ''}",
        " to ".join(ends) if len(records) > 1 else "".join(ends[:1]),
        f"`{place}`" if place else "",
        link(TRAININGS[name]),
    ]


def _is_same(known: Mapping[str, Any] | None, record: Mapping[str, Any]) -> bool:
    """Whether a network's own record is that of a training."""
    if not known:
        return False
    return known["configuration"] == record["configuration"] and known["epochs"][-1] == record["epochs"][-1]


def _start(record: Mapping[str, Any], nets: Mapping[str, YNet]) -> str | None:
    """The shipped network that a training began with, if it was one."""
    mark = record["configuration"]["network"].get("start")
    return next((name for name, net in nets.items() if hash_tensors(net.state_dict().values()) == mark), None)


def _family(record: Mapping[str, Any]) -> str | None:
    """The data to name on the command line; None for what has no name there."""
    family = record["configuration"]["data"]["name"].split("/")[0].partition("[")[0]  # `cifar10[10240]` is a part of it
    return {"folder": _FOLDER}.get(family, family if family in ("cifar10", "imagenet") else None)


def training_command(name: str, records: Sequence[Mapping[str, Any]], nets: Mapping[str, YNet] | None = None) -> str:
    """The command that repeats a training, or several that differ in their target alone.

    Args:
        name: Of its folder.
        records: Their records.
        nets: Networks that it may have begun with.
    """
    held = records[0]["configuration"]
    recipe, shape, family = held["recipe"], held["network"]["architecture"], _family(records[0])
    crops = family != "cifar10"
    usual = Recipe.imagenet() if crops else Recipe.cifar(shape["norm"])
    words = [f"testtime train --data {family} --method {recipe['method']}"]
    words += [f"--network {shape['name']}"] if family == _FOLDER else []
    words += [f"--norm {shape['norm']}"] if shape["norm"] != "group" else []
    words += [f"--size {shape['size']}"] if crops and shape["size"] != 224 else []
    scale = held["network"].get("augment", {}).get("scale")
    words += [f"--crop-area {scale[0]:g}"] if scale else []
    words += [_targets([record["configuration"]["target"]["name"] for record in records])] if "target" in held else []
    start = _start(records[0], nets or {})
    words += [f"--start {start}"] if start else []
    options = ("epochs", "batch", "lr", "weight_decay", "rotations")
    changed = [key for key in options if recipe[key] != getattr(usual, key)]
    words += [f"--{key.replace('_', '-')} {recipe[key]}" for key in changed]
    words += [f"--limit {held['data']['count']}"] if not crops and held["data"]["count"] < _WHOLE else []
    words += [f"--seed {recipe['seed']}"]
    words += [f"--precision {precision}"] if (precision := trained_precision(recipe)) != usual.precision else []
    words += [f"--out runs/{name}"]
    return " ".join(words)


def trained_precision(recipe: Mapping[str, Any]) -> str:
    """The arithmetic of a recorded recipe; the oldest records say only whether it was bfloat16."""
    return recipe["precision"] if "precision" in recipe else "bf16" if recipe["bf16"] else "fp32"


def tell_arithmetic(recipe: Mapping[str, Any]) -> str:
    """What to call the arithmetic of a recorded recipe."""
    return {"fp32": "float32", "tf32": "TF32", "bf16": "bfloat16"}[trained_precision(recipe)]


def _targets(names: Sequence[str]) -> str:
    """The option for some target sets, all corruptions of a level as a pattern."""
    if len(names) == 1:
        return f"--target {names[0]}"
    shown = list(names)
    for level in range(1, 6):
        whole = [f"cifar10-c/{name}/{level}" for name in CORRUPTIONS]
        if set(whole) <= set(shown):
            shown = [*(name for name in shown if name not in whole), f"cifar10-c/*/{level}"]
    return f"--targets '{','.join(shown)}'"
