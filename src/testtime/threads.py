"""CPU threads on busy machines and in containers: how many there are, and how they wait.

OpenMP, with which torch and the CPU kernels compute, starts a thread per core that the process may use, regardless of
a container's CPU quota, and lets waiting threads spin. Where cores are shared, a spinning thread takes the time of the
one that it waits for: a computation of seconds takes minutes. OpenMP reads its settings when it is loaded, so they have
to be made before torch is imported.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/cgroup")
_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them says how threads wait
WAITING = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "0"}
"""How threads wait with GNU's OpenMP, which torch uses on Linux, and with LLVM's.

GNU's spins 300,000 times by default. Not at all is slower on an idle machine: waking a thread takes longer than the
short waits between layers.
"""

SMALL = 4096
"""Pixels of a training step up to which one thread computes it.

A step on so few consists of hundreds of short computations. A second thread saves little of them, and where cores are
busy each waits until both threads run.
"""


def prepare() -> bool:
    """Set the environment variables of OpenMP, unless they are set; without effect once torch is imported.

    Returns:
        Whether it was early enough.
    """
    if "torch" in sys.modules:
        return False
    if not any(name in os.environ for name in _OWN):
        os.environ |= WAITING
    quota = find_quota()
    if quota is not None and quota < count_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(count_cpus()))
    return True


@contextlib.contextmanager
def limit_threads(pixels: int) -> Iterator[None]:
    """Let torch and the CPU kernels compute on one thread if a step has few pixels.

    Args:
        pixels: Pixels of all images and copies of a step.
    """
    import torch

    threads = torch.get_num_threads()
    if pixels > SMALL or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def count_cpus() -> int:
    """Return how many CPUs this process may use: the cores it may run on, or fewer if it has a CPU quota."""
    quota = find_quota()
    return count_cores() if quota is None else max(1, min(count_cores(), math.ceil(quota)))


def count_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_quota(groups: Path = _GROUPS, process: Path = _PROCESS) -> float | None:
    """Return the CPU quota of this process's control groups (version 1 or 2) in CPUs; None if there is none.

    Args:
        groups: Where control groups are mounted.
        process: The file that names the groups of this process.
    """
    found = [quota for folder in _list_groups(groups, process) if (quota := _read_quota(folder)) is not None]
    return min(found, default=None)


def _list_groups(groups: Path, process: Path) -> list[Path]:
    """Return the folders of the groups that limit this process; a container sees its own group as the root."""
    folders = [groups, groups / "cpu", groups / "cpu,cpuacct"]
    for line in _read(process).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = groups if not controllers else groups / controllers
        for part in path.strip("/").split("/"):
            inner = inner / part
            folders.append(inner)
    return folders


def _read_quota(folder: Path) -> float | None:
    limit, _, period = _read(folder / "cpu.max").partition(" ")  # version 2: "50000 100000" or "max 100000"
    if not limit:
        limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")  # version 1: -1
    try:
        share = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):  # not Linux, or not a container
        return ""
