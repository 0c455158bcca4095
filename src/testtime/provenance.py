"""What a number was measured with: versions and hardware."""

from __future__ import annotations

import contextlib
import platform
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
