"""Units over the workers of Ray: on this machine, or on a cluster.

The driver cuts what is missing into jobs (a whole online unit, since its images depend on each other; a range of
samples of any other), hands them out, puts the pieces together and writes the units; workers open networks and sets
themselves, by name, so every machine needs them at the same place. A job whose worker dies is done again by another
one; no other job is lost with it. The records are those of a run in one process.
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

from testtime.evaluation.plan import Plan
from testtime.evaluation.records import Columns
from testtime.evaluation.schedule import Meter, make_groups
from testtime.evaluation.units import Unit, join_columns
from testtime.evaluation.worker import Facts, Worker, choose_batch
from testtime.provenance import describe_machine

SHARD = 512
"""Samples in a shard of a unit whose images do not depend on each other."""

RETRIES = 3
_WINDOW = 1000  # jobs handed to Ray at once: enough for any cluster, few enough to look through
_STORE = 256 * 2**20  # records are small: a fraction of the memory that Ray would take

Done = tuple[list[Columns], float, str, dict[str, Any]]
"""What comes of a job: the columns of its units, the seconds it took, the hardware, and remarks on the first unit."""


@dataclass(frozen=True)
class Job:
    """A piece of work for one worker: a part of one unit, or several online units together.

    Attributes:
        units: The units as (method, set, seed).
        start: First place of their order.
        stop: The place after the last one.
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
    """Run units over Ray's workers.

    Args:
        plan: The plan.
        units: What to run of it.
        facts: Of every set.
        device: What a worker computes on; `cuda` takes one GPU each.
        address: "local" starts workers on this machine; else where the cluster is, "auto" for the one around here.
        meter: Reports how far it is.
        write: Called with every finished unit, its columns, seconds and hardware.
        fingerprints: Of the networks by file, for the workers to compare with what they find.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: A job's workers died again and again.
    """
    ray = start_ray(address)
    try:
        gpus = 0 if device.type == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if device.type != "cpu" and gpus == 0:
            raise ValueError("Ray has no GPU to give; choose --device cpu.")
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
                    own = [part for _, part in sorted(parts.pop(unit).items(), key=lambda item: item[0])]
                    total = sum(cost for _, cost in own)
                    joined = join_columns([columns for columns, _ in own])
                    write(unit, joined, total, hardware, shards=len(own), **remarks)
            meter.show(f"unit {meter.place}/{len(meter.units)}, {len(coming) + len(waiting)} jobs to go")
    finally:
        ray.shutdown()


def start_ray(address: str) -> Any:
    """Ray, started or found.

    Raises:
        ModuleNotFoundError: It is not installed.
        ConnectionError: There is no cluster at that address.
    """
    # Both are read when ray is imported: no statistics leave the machine, and no tip about a future default is printed.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Distributed runs need ray: pip install 'testtime[ray]'", name="ray") from None
    if address == "local":
        # The address "local" starts workers even where RAY_ADDRESS names a cluster.
        ray.init(
            "local", include_dashboard=False, object_store_memory=_STORE, log_to_driver=False, logging_level="error"
        )
    else:
        _knock(address)
        ray.init(address, log_to_driver=False, logging_level="error")
    return ray


def _knock(address: str) -> None:
    """Find out at once whether anything answers at `HOST:PORT`; Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", which Ray finds or refuses quickly
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"No Ray cluster answers at {address} ({error}).") from None


def cut(
    plan: Plan, units: Sequence[Unit], facts: Mapping[str, Facts], device: torch.device, workers: int
) -> Iterator[Job]:
    """Cut units into jobs; every worker gets its share of the streams."""
    for group in make_groups(plan, units, facts, device, jobs=workers):
        count = facts[group[0].set_name].count
        if plan.method(group[0].method).mode == "online":
            yield Job(tuple(_key(unit) for unit in group), 0, count)
            continue
        batch = choose_batch(facts[group[0].set_name].shape, device)
        shard = max(1, SHARD // batch) * batch
        for start in range(0, max(count, 1), shard):
            yield Job((_key(group[0]),), start, min(start + shard, count))


def do_job(shared: tuple[str, str, dict[str, str], dict[str, str]], job: Job) -> Done:
    """What a worker does."""
    text, kind, networks, sets = shared
    worker = _make_worker(text, kind)
    units = [Unit.of(*key) for key in job.units]
    for unit in units:
        name = worker.plan.method(unit.method).network
        file = worker.plan.file(name, unit.set_name)
        worker.net(name, unit.set_name)
        if worker.fingerprints[file] != networks[file]:
            raise ValueError(f"{file} is another network on this machine than where the run began.")
        if worker.facts(unit.set_name).fingerprint != sets[unit.set_name]:
            raise ValueError(f"{unit.set_name} is another set on this machine than where the run began.")
    begin = time.perf_counter()
    if len(units) > 1:
        found = worker.run_streams(units)
    else:
        found = [worker.run_unit(units[0], slice(job.start, job.stop))]
    seconds = time.perf_counter() - begin
    return found, seconds, describe_machine(worker.device)["hardware"]["device"], worker.remarks(units[0])


@functools.lru_cache(maxsize=1)
def _make_worker(text: str, kind: str) -> Worker:
    """A worker's networks and sets stay open from job to job."""
    return Worker(Plan.from_json(text), kind)


def _get(ray: Any, reference: Any, job: Job) -> Done:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # what went wrong, without Ray's account of where
    except ray.exceptions.RayError as error:
        title = ", ".join(" ".join(map(str, key)) for key in job.units)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RuntimeError(f"{title}: its workers died {RETRIES + 1} times ({reason})") from None


def _key(unit: Unit) -> tuple[str, str, int]:
    return unit.method, unit.set_name, unit.seed
