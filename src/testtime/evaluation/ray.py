"""Running units on Ray workers, on this machine or on a cluster.

The driver splits the missing units into jobs (a whole online unit, since its images depend on each other; a range of
samples of any other), joins the results and writes the units. Workers open networks and sets by path, so every machine
needs them at the same path. A job whose worker dies is retried. The records equal those of a run in one process.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from testtime.evaluation.columns import join_columns
from testtime.evaluation.inputs import Facts
from testtime.evaluation.plan import Plan
from testtime.evaluation.records import Columns
from testtime.evaluation.schedule import Meter, make_groups
from testtime.evaluation.units import Unit
from testtime.evaluation.worker import Worker, choose_batch
from testtime.provenance import describe_machine

SHARD = 512
"""Samples per shard of a unit whose images are independent."""

RETRIES = 3
_WINDOW = 1000  # jobs submitted at once; `ray.wait` scans all of them
_STORE = 256 * 2**20  # bytes; records are small

Done = tuple[list[Columns], float, str, dict[str, Any]]
"""The result of a job: the columns of its units, seconds, the hardware, and remarks on the first unit."""


@dataclass(frozen=True)
class Job:
    """The work of one task: a part of one unit, or several online units together.

    Attributes:
        units: The units as (method, set, seed).
        start: First position in their order.
        stop: Position after the last one.
    """

    units: tuple[tuple[str, str, int], ...]
    start: int
    stop: int


def run_on_ray(
    plan: Plan,
    units: Sequence[Unit],
    facts: Mapping[str, Facts],
    device: torch.device,
    address: str,
    meter: Meter,
    write: Callable[..., None],
    fingerprints: Mapping[str, str],
) -> None:
    """Run units on Ray workers.

    Args:
        plan: The plan.
        units: The units to run.
        facts: Facts about each set.
        device: Device of the workers; with `cuda` each takes one GPU.
        address: "local" starts workers on this machine; otherwise the address of a cluster, "auto" to detect it.
        meter: Reports progress.
        write: Called with each finished unit, its columns, seconds and hardware.
        fingerprints: Fingerprints of the networks by file, which the workers check.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: The workers of a job died repeatedly.
    """
    ray = start_ray(address)
    try:
        gpus = 0 if device.type == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if device.type != "cpu" and gpus == 0:
            raise ValueError("Ray has no GPU available; use --device cpu.")
        work = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=RETRIES)(do_job)
        text, kind = plan.to_json(), device.type
        shared = ray.put((text, kind, dict(fingerprints), {name: one.fingerprint for name, one in facts.items()}))
        workers = gpus or max(1, int(ray.cluster_resources().get("CPU", 1)))
        jobs = list(cut(plan, units, facts, device, workers))
        left = Counter(key for job in jobs for key in job.units)
        parts: dict[Unit, dict[int, tuple[Columns, float]]] = {unit: {} for unit in units}
        by_key = {_key(unit): unit for unit in units}
        coming, waiting = deque(jobs), {}
        while coming or waiting:
            while coming and len(waiting) < _WINDOW:
                job = coming.popleft()
                waiting[work.remote(shared, job)] = job
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(ready)
            found, seconds, hardware, remarks = _get(ray, ready, job)
            for key, columns in zip(job.units, found, strict=True):
                unit = by_key[key]
                parts[unit][job.start] = columns, seconds / len(found)
                left[key] -= 1
                meter.done += plan.method(unit.method).cost * len(columns["sample"])
                if left[key] == 0:
                    pieces = [part for _, part in sorted(parts.pop(unit).items(), key=lambda item: item[0])]
                    total = sum(cost for _, cost in pieces)
                    joined = join_columns([columns for columns, _ in pieces])
                    write(unit, joined, total, hardware, shards=len(pieces), **remarks)
            meter.show(f"unit {meter.finished}/{len(meter.units)}, {len(coming) + len(waiting)} jobs left")
    finally:
        ray.shutdown()


def start_ray(address: str) -> Any:
    """Start Ray or connect to it, and return the module.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: No cluster answers at the address.
    """
    # Read when ray is imported: no usage statistics, no warning about a future default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Distributed runs need ray: pip install 'testtime[ray]'", name="ray") from None
    if address == "local":
        # "local" starts workers even if RAY_ADDRESS is set.
        ray.init(
            "local", include_dashboard=False, object_store_memory=_STORE, log_to_driver=False, logging_level="error"
        )
    else:
        check_address(address)
        ray.init(address, log_to_driver=False, logging_level="error")
    return ray


def check_address(address: str) -> None:
    """Check that something answers at `HOST:PORT`; Ray itself retries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", which fails fast
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"No Ray cluster answers at {address} ({error}).") from None


def cut(
    plan: Plan, units: Sequence[Unit], facts: Mapping[str, Facts], device: torch.device, workers: int
) -> Iterator[Job]:
    """Split units into jobs, the streams evenly over the workers."""
    for group in make_groups(plan, units, facts, device, jobs=workers):
        count = facts[group[0].set_name].count
        method = plan.method(group[0].method)
        if method.mode == "online":
            yield Job(tuple(_key(unit) for unit in group), 0, count)
            continue
        batch = choose_batch(facts[group[0].set_name].shape, device, plan, method)
        shard = max(1, SHARD // batch) * batch
        for start in range(0, max(count, 1), shard):
            yield Job((_key(group[0]),), start, min(start + shard, count))


def do_job(shared: tuple[str, str, dict[str, str], dict[str, str]], job: Job) -> Done:
    """Run a job on a worker."""
    text, kind, networks, sets = shared
    worker = _make_worker(text, kind)
    units = [Unit.of(*key) for key in job.units]
    for unit in units:
        name = worker.plan.method(unit.method).network
        file = worker.plan.file(name, unit.set_name)
        worker.net(name, unit.set_name)
        if worker.fingerprints[file] != networks[file]:
            raise ValueError(f"{file} differs between this machine and the driver.")
        if worker.facts(unit.set_name).fingerprint != sets[unit.set_name]:
            raise ValueError(f"{unit.set_name} differs between this machine and the driver.")
    begin = time.perf_counter()
    if len(units) > 1:
        found = worker.run_streams(units)
    else:
        found = [worker.run_unit(units[0], slice(job.start, job.stop))]
    seconds = time.perf_counter() - begin
    return found, seconds, describe_machine(worker.device)["hardware"]["device"], worker.remarks(units[0])


@functools.lru_cache(maxsize=1)
def _make_worker(text: str, kind: str) -> Worker:
    """Return the worker of this process; its networks and sets stay open across jobs."""
    return Worker(Plan.from_json(text), kind)


def _get(ray: Any, reference: Any, job: Job) -> Done:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # without Ray's traceback
    except ray.exceptions.RayError as error:
        title = ", ".join(" ".join(map(str, key)) for key in job.units)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RuntimeError(f"{title}: its workers died {RETRIES + 1} times ({reason})") from None


def _key(unit: Unit) -> tuple[str, str, int]:
    return unit.method, unit.set_name, unit.seed
