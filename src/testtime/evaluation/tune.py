"""Tuning: run a grid of settings on held-out training images, and choose the one with the lowest error.

The run is an ordinary run folder, resumed and reported like any other; `choice.json` in it has the rule, the table and
the chosen settings. Test sets are refused, see `Plan.selection`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from testtime.adaptation.methods import Mode, find_method
from testtime.data.held_out import COUNTS, find_training_data
from testtime.evaluation.method_specs import JOINT, MethodSpec, override
from testtime.evaluation.plan import Plan, find_sets
from testtime.evaluation.protocols import Protocol
from testtime.evaluation.study import split_words
from testtime.evaluation.units import Run, Unit
from testtime.networks.sources import open_network
from testtime.storage import write_atomic

_FIXED = "fixed"
_MOST = 1_000  # combinations
_SETTINGS = ("lr", "steps", "copies", "threshold", "update")  # others are constants


def make_grid(method: str, mode: Mode | None, values: Mapping[str, str | None], **same: Any) -> list[MethodSpec]:
    """Return a method for each combination of settings, named by them.

    Args:
        method: A name from `METHODS`.
        mode: `episodic` or `online`; None for the method's default.
        values: For `lr`, `steps`, `copies`, `threshold`, `update` and constants of the method's objective, values
            separated by commas, or None.
        **same: Settings that all of them share.

    Raises:
        ValueError: A value is invalid, or there are none or too many combinations.
    """
    given = {name: split_words(text) for name, text in values.items() if text is not None}
    count = math.prod(map(len, given.values()))
    if not given or not 1 <= count <= _MOST:
        raise ValueError(
            f"Pass 1 to {_MOST:,} combinations of settings to choose from, e.g. --lr 0.001,0.002; "
            f"got {count if given else 0:,}."
        )
    base = MethodSpec(method, mode or find_method(method).mode, settings=same, method=method)
    grid: list[MethodSpec] = []
    for words in itertools.product(*given.values()):
        texts = dict(zip(given, words, strict=True))
        own: dict[str, Any] = {"update": texts.pop("update")} if "update" in texts else {}
        constants = {name: _read_number(name, texts.pop(name)) for name in [*texts] if name not in _SETTINGS}
        if constants:
            own["constants"] = constants
        (spec,) = override([replace(base, settings={**same, **own})], {name: [text] for name, text in texts.items()})
        shown = {**spec.settings, **constants}
        grid.append(replace(spec, name=" ".join(f"{name}={shown[name]}" for name in given)))
    return grid


def _read_number(name: str, text: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {text!r}.")
    return int(value) if value == int(value) else value


def make_tuning_plan(
    checkpoint: str | Path,
    grid: Sequence[MethodSpec],
    *,
    data: Sequence[str] | None = None,
    levels: str = "5",
    seeds: Sequence[int] | None = None,
    limit: int | None = None,
    batch: int | None = None,
    data_root: str | Path | None = None,
) -> Plan:
    """Make the plan of a tuning run: every method of a grid, and the unadapted network, on held-out sets.

    Args:
        checkpoint: The network: a file, the name of a bundled one, or a model, see `networks.sources`.
        grid: The methods, see `make_grid`.
        data: Held-out sets; None for those of the network's own training data, original and corrupted.
        levels: Levels of the corrupted sets.
        seeds: Seeds; 0 by default.
        limit: Maximum number of images per set.
        batch: Images per call of a method, which matters to those that learn from batches; None chooses by image size.
        data_root: Root folder of the data sets.

    Raises:
        ValueError: A set is not held out, or the network's training data has no held-out set.
        FileError: The network is missing or damaged.
    """
    if not data:
        source = find_training_data(open_network(str(checkpoint)).card.record)
        if source not in COUNTS:
            raise ValueError(f"{checkpoint} does not record training data with a held-out set: pass --data.")
        data = [f"{source}-held-out-c"]
    same = {name: value for name, value in grid[0].settings.items() if name == "precision"}
    return Plan(
        {JOINT: str(checkpoint)},
        find_sets(data, levels),
        (MethodSpec(_FIXED, "fixed", settings=same), *grid),
        tuple(seeds or (0,)),
        shuffle=True,
        limit=limit,
        data_root=None if data_root is None else str(data_root),
        title="Settings on held-out images",
        protocol=Protocol(batch=batch),
        selection=True,
    )


def choose(plan: Plan, run: Run) -> dict[str, Any]:
    """Choose the settings with the lowest mean error of a finished tuning run.

    Args:
        plan: Its plan.
        run: The run.

    Returns:
        JSON-serializable: the rule, the sets and their numbers of images, the seeds, the method, the images per call
        if given, the errors of all settings in ascending order, and the chosen settings.
    """
    table: list[dict[str, Any]] = []
    for spec in plan.methods:
        units = [unit for unit in run.units if unit.method == spec.name]
        groups = {
            "error": units,
            "corrupted": [unit for unit in units if unit.corruption is not None],
            "original": [unit for unit in units if unit.corruption is None],
        }
        errors = {name: _mean_error(group) for name, group in groups.items()}
        table.append({"name": spec.name, "settings": dict(spec.settings), **errors})
    table.sort(key=lambda row: row["error"])  # stable: of equal ones, the first
    chosen = next(row for row in table if row["name"] != _FIXED)
    return {
        "rule": "lowest mean error over the sets and seeds; of equal ones, the first",
        "sets": {unit.set_name: unit.about["counts"]["images"] for unit in run.units},
        "seeds": list(plan.seeds),
        "method": plan.methods[-1].method,
        "mode": plan.methods[-1].mode,
        "batch": plan.protocol.batch,
        "table": table,
        "chosen": {"name": chosen["name"], "settings": chosen["settings"]},
    }


def write_choice(folder: str | Path, choice: Mapping[str, Any]) -> Path:
    """Write a choice to `choice.json` in the run's folder atomically; returns the file."""
    path = Path(folder) / "choice.json"
    write_atomic(path, json.dumps(choice, indent=1, ensure_ascii=False) + "\n")
    return path


def format_choice(choice: Mapping[str, Any]) -> list[str]:
    """Format a choice as lines: the table, the rule, the sets and the settings."""
    width = max(len(row["name"]) for row in choice["table"])
    columns = ("error", "corrupted", "original")
    lines = [f"{'':{width}}" + "".join(f"  {column:>9}" for column in columns)]
    for row in choice["table"]:
        cells = ["-" if row[column] is None else f"{row[column]:.2%}" for column in columns]
        lines.append(f"{row['name']:{width}}" + "".join(f"  {cell:>9}" for cell in cells))
    lines.append(f"rule: {choice['rule']}")
    lines.append("sets: " + ", ".join(f"{name} ({count:,} images)" for name, count in choice["sets"].items()))
    better = " (the unadapted network has no higher error)" if choice["table"][0]["name"] == _FIXED else ""
    return [*lines, f"chosen: {choice['chosen']['name']}{better}"]


def _mean_error(units: Sequence[Unit]) -> float | None:
    counts = [unit.about["counts"] for unit in units]
    errors = [1 - Fraction(count["is_right"], count["labelled"]) for count in counts]  # exact, so that ties are ties
    return float(sum(errors) / len(errors)) if errors else None
