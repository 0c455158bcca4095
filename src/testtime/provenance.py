"""Versions and hardware of a measurement, and the differences between two configurations."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed

from testtime.checks import is_shallow, is_table
from testtime.storage import parse_json


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware as JSON-compatible values."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return {
        "versions": {name: _version(name) for name in ("testtime", "torch", "numpy")}
        | {"python": platform.python_version()},
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processor": _processor(),
            "machine": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
            "processes": distributed.get_world_size() if grouped else 1,
        },
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # only on Linux
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def find_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two configurations, one phrase per entry, sorted by name.

    Args:
        there: The configuration read from a file.
        here: The current configuration; converted to JSON types before the comparison.
    """
    old, new = flatten(there), flatten(json.loads(json.dumps(here)))
    return [
        f"{key}: {old.get(key, 'none')} there, {new.get(key, 'none')} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def format_difference(there: str, here: str) -> str:
    """Describe the difference between two texts; of JSON objects, only the entries that differ."""
    with contextlib.suppress(ValueError):
        old, new = parse_json(there), parse_json(here)
        if is_table(old) and is_table(new) and is_shallow(old) and (different := find_differences(old, new)):
            return "; ".join(text[:200] for text in different)
    return f"{there}, here {here}"


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries into one with dotted keys like `recipe.lr`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
