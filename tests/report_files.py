"""Made-up results files for the tests of the document of results: summaries and records with known numbers in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from report_runs import ABOUT, make_columns
from testtime.evaluate import stream_order
from testtime.report.committed import LEVELS, PART, ROWS, STANDARD, Findings, read_whole
from testtime.report.further import FILES, TRAININGS, read_parts, read_trainings
from testtime.report.results import collect
from testtime.runs import Unit, open_run, open_runs
from testtime.runs.summary import write_summary
from testtime.runs.units import prepare_folder, write_unit
from testtime.training import Recipe

COUNT = 50  # images of each set: one wrong answer is two percent
SHIFTS = ("gaussian_noise", "fog", "brightness")
LEVEL_5 = ("cifar10", *(f"cifar10-c/{name}/5" for name in SHIFTS))
EVERY = ("cifar10", *(f"cifar10-c/{name}/{level}" for level in range(1, 6) for name in SHIFTS))
USUAL = {"steps": 1, "lr": 0.001, "copies": 32, "threshold": 1.0, "update": "encoder+ssl", "share": "image"}
USUAL |= {"optimizer": "SGD", "guard": 3.0, "precision": "bf16", "task": "Rotation", "augment": "CropFlip"}

Wrong = Mapping[str, Sequence[int]]


def describe(name: str, **settings: Any) -> dict[str, Any]:
    mode = (
        name if name in ("fixed", "episodic", "online") else "fixed" if name in ("plain", "uda", "alp") else "episodic"
    )
    network = {"plain": "baseline", "uda": "uda", "alp": "alp"}.get(name, "joint")
    held = {} if mode == "fixed" else USUAL | ({"steps": 10} if mode == "episodic" else {}) | settings
    return {"mode": mode, "network": network, "settings": held}


def make_file(
    root: Path,
    file: Path,
    wrong: Wrong,
    sets: Sequence[str] = LEVEL_5,
    methods: Mapping[str, Any] | None = None,
    images: int = COUNT,
    norm: str = "group",
    seconds: float | dict[str, float] = 2.0,
    mark: str = "0",
    place: Callable[[str, str], np.ndarray] | None = None,
) -> None:
    """A summary in which each method gets the first so many images of each set wrong.

    `place` may say instead which images of a method and set are wrong.
    """
    described = {name: (methods or {}).get(name) or describe(name) for name in wrong}
    shape = {"name": "resnet26", "depth": 26, "classes": 10, "size": 32, "norm": norm}
    marks = {"uda": {name: f"u{name}" for name in sets}}
    networks = {
        held["network"]: {"fingerprint": marks.get(held["network"], held["network"] + mark), "architecture": shape}
        for held in described.values()
    }
    folder = root / "folders" / file.with_suffix("")
    plan = {"networks": networks, "methods": described, "shuffle": True, "limit": None}
    about = ABOUT | {
        "seeds": [0],
        "command": f"testtime eval --data cifar10-c --levels 5 --shuffle --out runs/{file.stem}",
    }
    prepare_folder(folder, plan, about)
    for method, counts in wrong.items():
        for name, count in zip(sets, counts, strict=True):
            bad = np.arange(count) if place is None else place(method, name)
            right = ~np.isin(np.arange(COUNT), bad)
            order = np.arange(COUNT) if "gradual" in name else stream_order(COUNT, 0).numpy()[:images]
            columns = make_columns(right, order=order)
            columns["adapted"][:] = described[method]["mode"] != "fixed"
            if method.startswith("below"):
                columns["adapted"][len(order) // 5 :] = 0
            time = seconds[method] if isinstance(seconds, dict) else seconds
            write_unit(folder, Unit.of(method, name, 0), columns, time)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    write_summary(root / file, [open_run(folder)])


def make_costs(root: Path, seconds: dict[str, float], methods: Mapping[str, Any]) -> None:
    """The times of methods on one set; each earlier file of this name is replaced."""
    file = FILES["costs"][0]
    shutil.rmtree(root / "folders" / file.with_suffix(""), ignore_errors=True)
    make_file(root, file, {method: [0] for method in seconds}, LEVEL_5[1:2], methods, seconds=seconds)


def make_record(method: str, seed: int = 0, norm: Any = "group", target: str | None = None) -> dict[str, Any]:
    recipe = json.loads(json.dumps(asdict(Recipe.cifar(norm, method=method, seed=seed, precision="bf16"))))
    shape = {"name": "resnet26", "depth": 26, "norm": norm}
    held = {"recipe": recipe, "network": {"architecture": shape}, "data": {"name": "cifar10", "count": 50_000}}
    held |= {"target": {"name": target}} if target else {}
    epochs = [{"epoch": 1, "test_error": 0.5}, {"epoch": recipe["epochs"], "test_error": 0.0812 + seed / 1000}]
    return {"configuration": held, "epochs": epochs, "seconds": 123.4 + seed, "hardware": {"device": "NVIDIA H200"}}


def make_main(root: Path) -> None:
    """The main files: 8% and 40% wrong at every level for `fixed`, less for the others; `online` harms `fog 1`."""
    fixed = [4] + [20, 10, 5] * 5
    online = [4] + [10, 7, 4] + [10, 5, 4] * 4
    online[2] = 12
    make_file(root, LEVELS, {"fixed": fixed, "online": online}, EVERY, seconds={"fixed": 0.5, "online": 1.0})
    make_file(root, STANDARD, {"fixed": [4, 20, 10, 5], "episodic": [4, 18, 8, 5]}, seconds=10.0)
    make_file(root, PART, {"fixed": [20, 10, 5] * 4, "episodic": [19, 9, 5] * 4}, EVERY[1:-3], images=20)


def read(root: Path) -> Findings:
    """What the document is made of, without the studies of gradients."""
    results = read_whole(root)
    return Findings(
        results,
        collect(open_runs(root / PART)),
        read_trainings(root)["gn-joint"] if (root / TRAININGS["gn-joint"]).exists() else {},
        {"sets": {"cifar10": {"images": 10, "seconds": 1.0}}},
        {},
        {},
        {},
        {},
        read_parts(results.runs[:2], root),
        read_trainings(root),
    )


def rows_of(text: str) -> list[list[str]]:
    return [
        [cell.strip(" *\\†") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]


def row(text: str, title: str) -> list[str]:
    return next(cells[1:] for cells in rows_of(text) if cells[0] == title)


def said(text: str) -> str:
    return " ".join(text.split())


def make_everything(root: Path) -> list[Path]:
    """Every file that may be missing."""
    make_file(root, ROWS["baseline"], {"plain": [5] + [22, 11, 6] * 5}, EVERY)
    make_file(root, ROWS["alp"], {"alp": [8] + [11, 30, 9] * 5}, EVERY)
    make_file(root, ROWS["uda"], {"uda": [5, 13, 8, 6]})
    make_file(root, ROWS["best"], {"best": [3, 9, 5, 4]}, methods={"best": describe("best")})
    make_file(root, FILES["best"][1], {"best": [9, 5, 4] * 4}, EVERY[1:-3], {"best": describe("best")})
    mild = ["cifar10", "cifar10-c/fog/1"]
    for part in ("orders", "networks"):
        make_file(root, FILES[part][0], {"fixed": (4, 10), "online": (4, 12)}, mild, mark=part)
    wrong = {"plain": [5, 30, 20, 6], "fixed": [4, 33, 21, 6], "episodic": [4, 25, 15, 6]}
    make_file(root, FILES["batch norm"][0], wrong, norm="batch")
    growing = [f"cifar10-gradual/{name}" for name in ("gaussian_noise", "shot_noise")]
    make_file(root, FILES["gradual"][0], {"fixed": (9, 8), "online": (5, 6)}, growing)
    make_file(root, FILES["gradual"][1], {"uda": (7, 7)}, growing)
    make_file(root, FILES["fast"][0], {"fast": [4, 19, 9, 5]})
    make_file(root, FILES["threshold"][0], {"below-20%": [4, 18, 9, 5]}, images=20)
    make_file(root, FILES["steps"][0], {"steps-1-copies-8": (19, 9, 5)}, LEVEL_5[1:])
    for place, file in enumerate(FILES["seeds"]):
        make_file(root, file, {"fixed": [5, 22, 10, 5], "online": [6, 11, 5, 4]}, mark=f"{place + 1}")
    for place, file in enumerate(FILES["tf32"]):
        make_file(root, file, {"fixed": [5, 20, 10, 5], "online": [6, 11, 5, 4]}, mark=f"tf32-{place}")
    level_3 = [f"cifar10-c/{name}/3" for name in SHIFTS]
    make_file(root, FILES["tuning"][0], {"fixed": (20, 10, 5), "other": (9, 5, 4)}, level_3)
    make_costs(root, {"fixed": 1.0, "online": 2.0}, {})
    sets = ["imagenet", *(f"imagenet-c/{name}/5" for name in SHIFTS)]
    make_file(root, FILES["photographs"][0], {"fixed": [5, 38, 28, 9], "online": [5, 20, 10, 8]}, sets)
    few = {"fixed": [4, 12, 10, 3], "episodic": [2, 9, 10, 2]}
    make_file(root, FILES["standard photographs"][0], few, sets, images=20)
    for name, file in TRAININGS.items():
        record = make_record("uda", target="cifar10") if name == "uda" else make_record("plain")
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(json.dumps({"cifar10": record} if name == "uda" else record))
    (root / TRAININGS["gn-joint"]).write_text(json.dumps(make_record("joint")))
    optional = [*ROWS.values(), *(file for files in FILES.values() for file in files), *TRAININGS.values()]
    return [file for file in dict.fromkeys(optional) if file != TRAININGS["gn-joint"]]
