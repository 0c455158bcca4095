"""What a bug report should say: versions, device, threads, kernels, and a measured speed. No paths, no names."""

from __future__ import annotations

import importlib.util
import os
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from testtime import kernels, threads
from testtime.adaptation.adapters import Online
from testtime.networks.checkpoint import bundled, load
from testtime.progress import Progress
from testtime.provenance import describe_machine
from testtime.randomness import Draws

EXTRAS = {
    "cli": ("typer", "rich"),
    "report": ("matplotlib", "jinja2"),
    "serve": ("fastapi", "uvicorn"),
    "models": ("timm", "torchvision", "transformers"),
    "ray": ("ray",),
}
_NETWORK = "cifar10-resnet26-gn-joint"
_SECONDS = 2.0  # of the measurement
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "TESTTIME_KERNELS")


def examine(device: str = "cpu", speed: bool = True, progress: Progress | None = None) -> dict[str, Any]:
    """Examine the installation.

    Args:
        device: The device to examine.
        speed: Whether to measure the speed, which takes a few seconds.
        progress: Called with the steps of the measurement done, an estimate of their total, and "speed".

    Returns:
        JSON-serializable.
    """
    machine = describe_machine(torch.device(device))
    return {
        "versions": machine["versions"],
        "extras": {extra: {name: _find_version(name) for name in names} for extra, names in EXTRAS.items()},
        "hardware": {name: machine["hardware"][name] for name in ("device", "processor", "machine")},
        "cuda": _describe_cuda(),
        "threads": {
            "torch": torch.get_num_threads(),
            "cores": threads.count_cores(),
            "quota": threads.find_quota(),
            "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        },
        "kernels": kernels.describe(torch.device(device)),
        "networks": list(bundled()),
        "speed": measure_speed(device, progress) if speed and _NETWORK in bundled() else None,
    }


def measure_speed(device: str, progress: Progress | None = None) -> dict[str, Any]:
    """Measure steps per second of online learning from single images, for a few seconds."""
    learner = Online(load(_NETWORK).to(device))
    images = (Draws.of(0, torch.arange(4, device="cpu")).uniform(3, 32, 32) * 255).byte()
    learner(images).cpu()  # warm-up; may compile
    begin, steps, seconds = time.perf_counter(), 0, 0.0
    while seconds < _SECONDS:
        learner(images[:2]).cpu()
        steps, seconds = steps + 2, time.perf_counter() - begin
        if progress is not None:
            progress(min(round(1000 * seconds), round(1000 * _SECONDS)), round(1000 * _SECONDS), "")
    settings = learner.settings
    return {
        "steps_per_second": round(steps / seconds, 1),
        "network": _NETWORK,
        "copies": settings.copies,
        "precision": settings.precision,
    }


def format_examination(found: dict[str, Any]) -> list[str]:
    """Format an examination as lines to paste into a bug report."""
    quota, variables = found["threads"]["quota"], found["threads"]["variables"]
    extras = {
        extra: ", ".join(f"{name} {text or 'missing'}" for name, text in names.items())
        for extra, names in found["extras"].items()
    }
    lines = {
        "versions": ", ".join(f"{name} {text}" for name, text in found["versions"].items()),
        **{f"[{extra}]": text for extra, text in extras.items()},
        "hardware": ", ".join(found["hardware"].values()),
        "cuda": found["cuda"],
        "threads": f"{found['threads']['torch']} of torch, {found['threads']['cores']} cores, "
        + ("no CPU quota" if quota is None else f"a CPU quota of {quota:g}"),
        "variables": ", ".join(f"{name}={value}" for name, value in variables.items()) or "none",
        **found["kernels"],
        "networks": ", ".join(found["networks"]) or "none is bundled",
    }
    speed = found["speed"]
    if speed is not None:
        lines["speed"] = (
            f"{speed['steps_per_second']:g} steps/s, online, one image at a time ({speed['network']}, "
            f"{speed['copies']} copies, {speed['precision']})"
        )
    return [f"{name:<12}{text}" for name, text in lines.items()]


def _describe_cuda() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return "no GPU found" if torch.version.cuda else "this build of torch has no CUDA"


def _find_version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
