"""Made-up runs for the tests of reports: folders such as an evaluation leaves, with known numbers in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from testtime.corruptions import CORRUPTIONS
from testtime.evaluation import Run, Unit, open_run
from testtime.evaluation.units import prepare_folder, write_unit

ABOUT = {
    "versions": {"testtime": "0.1.0", "torch": "2.13.0", "numpy": "2.0", "python": "3.11.0"},
    "hardware": {"device": "cpu", "processor": "Some CPU <fast>", "machine": "Linux x86_64", "threads": 1},
    "command": "testtime eval digits-c/*/5 --out runs/made",
}
METHODS: dict[str, Any] = {name: {"steps": 1, "lr": 0.001} for name in ("plain", "fixed", "episodic", "online")}


def make_columns(
    right: Sequence[bool] | np.ndarray,
    before: Sequence[bool] | np.ndarray | None = None,
    order: np.ndarray | None = None,
    labels: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Records of images 0, 1, … of which some are predicted right, in the order of a stream."""
    is_right = np.asarray(right, bool)
    count = len(is_right)
    was_right = is_right if before is None else np.asarray(before, bool)
    labels = np.arange(count) % 10 if labels is None else labels
    order = np.arange(count) if order is None else order
    columns = {
        "sample": np.arange(count, dtype=np.int32),
        "label": labels.astype(np.int32),
        "prediction": np.where(is_right, labels, (labels + 1) % 10).astype(np.int32),
        "prediction_before": np.where(was_right, labels, (labels + 1) % 10).astype(np.int32),
        "is_right": is_right.astype(np.uint8),
        "was_right": was_right.astype(np.uint8),
        "loss_before": np.full(count, 0.5, np.float32),
        "loss_after": np.full(count, 0.25, np.float32),
        "confidence": np.full(count, 0.75, np.float32),
        "adapted": np.ones(count, np.uint8),
        "rolled_back": np.zeros(count, np.uint8),
    }
    return {name: np.ascontiguousarray(column[order]) for name, column in columns.items()}


def make_run(
    path: Path,
    units: Mapping[tuple[str, str, int], Mapping[str, np.ndarray]],
    configuration: Mapping[str, Any] | None = None,
    seconds: float = 2.0,
) -> Run:
    """A run's folder with the given units, by method, set and seed."""
    plan = configuration or {"methods": METHODS, "network": {"norm": "group"}}
    prepare_folder(path, plan, ABOUT | {"seeds": sorted({seed for _, _, seed in units})})
    for (method, name, seed), columns in units.items():
        write_unit(path, Unit.of(method, name, seed), columns, seconds)
    return open_run(path)


def make_benchmark(
    path: Path,
    count: int = 200,
    family: str = "digits",
    levels: Sequence[int] = (5,),
    methods: Sequence[str] = ("plain", "fixed", "episodic", "online"),
    seeds: Sequence[int] = (0,),
    gradual: bool = True,
    corruptions: Sequence[str] = CORRUPTIONS,
) -> Run:
    """A whole benchmark in which `online` gets better along the stream, like a real one in shape."""
    draw = np.random.default_rng(0)
    errors = {"plain": 0.36, "fixed": 0.34, "episodic": 0.3, "online": 0.2, "uda": 0.24, "alp": 0.3}
    units: dict[tuple[str, str, int], dict[str, np.ndarray]] = {}

    def add(name: str, factor: float, ramp: bool = False) -> None:
        hardness = draw.random(count)
        for seed in seeds:
            order = np.arange(count) if ramp else np.random.default_rng(seed + 1).permutation(count)
            along = np.empty(count)
            along[order] = np.linspace(0, 1, count)
            for method in methods:
                share = errors[method] * factor * (1 + draw.normal() / 20)
                wrong = np.full(count, share) if method != "online" else share * (1.5 - along)
                if ramp:
                    wrong = wrong * (0.4 + along)
                jitter = hardness + draw.normal(size=count) * 0.05
                right = jitter > wrong
                before = hardness > errors["fixed"] * factor
                units[method, name, seed] = make_columns(right, before, order if method == "online" else None)

    add(family, 0.25)
    for level in levels:
        for place, corruption in enumerate(corruptions):
            add(f"{family}-c/{corruption}/{level}", (0.5 + 0.1 * (place % 8)) * (0.4 + 0.12 * level))
    if gradual:
        for noise in ("gaussian_noise", "impulse_noise", "shot_noise"):
            add(f"{family}-gradual/{noise}", 1.2, ramp=True)
    return make_run(path, units)
