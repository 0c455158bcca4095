"""What a number was measured with, and whether two configurations are the same."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a number was measured with: versions and hardware, as plain text and numbers."""
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
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # elsewhere the platform module knows
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a folder of sources
        return "unknown"


def find_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Where a configuration read from a file and one of now differ, a phrase for each entry, sorted by name.

    Args:
        there: What the file says.
        here: What is asked for now; compared as JSON would hold it.
    """
    old, new = flatten(there), flatten(json.loads(json.dumps(here)))
    return [
        f"{key}: {old.get(key, 'none')} there, {new.get(key, 'none')} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with names such as `recipe.lr`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
