"""Running a plan: runs the missing units and writes each as soon as it is finished.

`run_plan` locks the folder and schedules the units; the work itself is in worker.py. Online units of one method and
network run in parallel as `Streams`, as many as fit in memory or at most `together`; on a CPU, units can be distributed
over several threads (`jobs`). The records equal those of sequential runs, up to rounding for parallel streams.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from testtime.data.sets import TestSet
from testtime.evaluation.inputs import Facts
from testtime.evaluation.plan import Plan
from testtime.evaluation.records import Columns
from testtime.evaluation.schedule import Meter, find_group_key, make_groups
from testtime.evaluation.stream_checkpoints import StreamCheckpoints
from testtime.evaluation.timing import CALLS, find_every, measure, read_speeds, write_speeds
from testtime.evaluation.units import Run, Unit, open_run, prepare_folder, write_unit
from testtime.evaluation.worker import StaleError, Worker, choose_batch
from testtime.progress import Progress
from testtime.provenance import describe_machine
from testtime.storage import hold_folder

log = logging.getLogger(__name__)


def run_plan(
    plan: Plan,
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    command: str = "",
    together: int | None = None,
    jobs: int = 1,
    ray: str | None = None,
    sets: Mapping[str, TestSet] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run the units of a plan that its folder does not contain yet.

    Args:
        plan: The plan.
        out: The run's folder.
        device: Where to compute.
        command: The command line to record.
        together: Maximum number of online units to run as parallel streams; None for as many as fit in memory, divided
            evenly among the `jobs`.
        jobs: Number of units, or groups of streams, to run concurrently on a CPU, each in a thread.
        ray: "local" starts Ray workers on this machine, an address connects to a cluster; None runs in this process.
        sets: Test sets of the plan that cannot be opened by name; not supported with Ray.
        progress: Called with the views done, their total, and the state of the current unit.

    Returns:
        The finished run.

    Raises:
        ValueError: The folder contains a run with another configuration, or sets and networks do not match.
        CheckpointError: A network is missing or damaged.
        DataError: A set is missing or damaged.
        OSError: A unit cannot be written. Finished units remain, as on Ctrl-C.
    """
    for name, value in (("together", together), ("jobs", jobs)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if ray is not None and (sets or jobs > 1):
        raise ValueError("`sets` and `jobs` are not supported with Ray.")
    worker = Worker(plan, device, sets)
    if jobs > 1 and worker.device.type != "cpu":
        raise ValueError(f"`jobs` must be 1 on {worker.device.type}, got {jobs}.")
    networks = {name: worker.describe_network(name) for name in plan.networks}
    facts = {name: worker.facts(name, progress) for name in plan.streams}
    machine = describe_machine(worker.device)
    hardware, versions = machine["hardware"]["device"], machine["versions"]
    with hold_folder(out):
        prepare_folder(out, _describe(worker, facts, networks), _make_record(plan, facts, command) | machine)
        plan = worker.plan = _time_methods(worker, out, progress)
        units, images = plan.units(), {name: one.count for name, one in facts.items()}
        finished = set(open_run(out, images).units)
        # Ray workers do not resume from the checkpoints of this process.
        where = hardware if ray is None else "ray"
        saved = StreamCheckpoints(out, device=where, testtime=versions["testtime"], torch=versions["torch"])
        online = [unit for unit in units if plan.method(unit.method).mode == "online"]
        group_keys = {unit: find_group_key(plan, unit, facts) or unit for unit in online}
        begun = saved.groups(group_keys, finished)
        finished -= {unit for group in begun for unit in group}
        missing = [unit for unit in units if unit not in finished]
        log.info("%s: %d of %d units to run", out, len(missing), len(units))
        meter = Meter(plan, facts, [unit for unit in units if unit in finished], progress)

        def write(unit: Unit, columns: Columns, seconds: float, hardware: str = hardware, **more: Any) -> None:
            write_unit(out, unit, columns, seconds, device=hardware, testtime=versions["testtime"], **more)
            meter.finished += 1

        if ray is None:
            taken = {unit for group in begun for unit in group}
            fresh = [unit for unit in missing if unit not in taken]
            groups = begun + make_groups(plan, fresh, facts, worker.device, together, jobs)
            if jobs == 1:
                _run_here(worker, groups, meter, saved, write)
            else:
                _run_on_threads(functools.partial(Worker, plan, device, sets), groups, meter, saved, write, jobs)
        else:
            from testtime.evaluation.ray import run_on_ray

            run_on_ray(plan, missing, facts, worker.device, ray, meter, write, worker.fingerprints)
        saved.remove()
    return open_run(out, images)


def _time_methods(worker: Worker, out: str | Path, progress: Progress | None) -> Plan:
    """Return the plan; with a `rate`, with the `every` of its methods, measured unless known, see timing.py."""
    plan, rate = worker.plan, worker.plan.protocol.rate
    if rate is None:
        return plan
    speeds = read_speeds(out)
    test_set = worker.open(plan.streams[0])
    batch = choose_batch(test_set.shape, worker.device, plan)
    order = worker.order(test_set, plan.seeds[0])[: CALLS * batch]
    batches = [(numbers, test_set.images(numbers)) for numbers in order.split(batch)]
    for number, method in enumerate(plan.methods):
        if method.mode != "fixed" and method.name not in {**speeds, **plan.every}:
            if progress is not None:
                progress(number, len(plan.methods), f"timing {method.name}")
            unit = Unit.of(method.name, plan.streams[0], plan.seeds[0])
            speeds[method.name] = measure(worker.adapter(unit, test_set.shape), batches)
            write_speeds(out, speeds)
    every = {one.name: find_every(speeds.get(one.name, 0), batch, rate) for one in plan.methods}
    return replace(plan, every=every | dict(plan.every))


def _make_record(plan: Plan, facts: Mapping[str, Facts], command: str) -> dict[str, Any]:
    """Return what a run records about itself besides its configuration."""
    files = {"networks": dict(plan.networks), "folders": {one.name: one.folder for one in plan.sets if one.folder}}
    skipped = {name: list(one.skipped) for name, one in facts.items() if one.skipped}
    return {"title": plan.title, "command": command, "seeds": list(plan.seeds), "files": files, "skipped": skipped}


def _run_here(
    worker: Worker,
    groups: Sequence[list[Unit]],
    meter: Meter,
    saved: StreamCheckpoints,
    write: Callable[..., None],
) -> None:
    """Run groups of units sequentially in this process."""
    for group in groups:
        found, seconds = _run_group(worker, group, meter, saved)
        for unit, columns in zip(group, found, strict=True):
            write(unit, columns, seconds / len(group), together=len(group), **worker.remarks(unit))
        saved.clear(group)


def _run_group(
    worker: Worker, group: list[Unit], meter: Meter, saved: StreamCheckpoints, stopped: threading.Event | None = None
) -> tuple[list[Columns], float]:
    """Run a unit, or several in parallel, from the last checkpoint; returns their columns and the seconds taken."""
    online = worker.plan.method(group[0].method).mode == "online"
    begun = saved.load(group) if online else None
    before = begun.seconds if begun else 0.0
    advance, start = meter.start(group, before), time.perf_counter()

    def advance_or_stop(images: int, mistakes: int) -> None:
        if stopped is not None and stopped.is_set():
            raise InterruptedError
        advance(images, mistakes)

    save = functools.partial(saved.save, group) if online else None
    try:
        if len(group) > 1:
            found = worker.run_streams(group, advance_or_stop, begun, save)
        else:
            found = [worker.run_unit(group[0], advance=advance_or_stop, begun=begun, save=save)]
    except StaleError as error:
        saved.discard(group, error)
        return _run_group(worker, group, meter, saved, stopped)
    return found, before + time.perf_counter() - start


def _run_on_threads(
    make_worker: Callable[[], Worker],
    groups: Sequence[list[Unit]],
    meter: Meter,
    saved: StreamCheckpoints,
    write: Callable[..., None],
    jobs: int,
) -> None:
    """Run groups of units concurrently, each thread with its own worker."""
    own, stopped = threading.local(), threading.Event()

    def begin() -> None:
        # On small networks intra-op threads save less than they cost the other jobs.
        torch.set_num_threads(1)
        own.worker = make_worker()

    def work(group: list[Unit]) -> tuple[list[Columns], float, list[dict[str, Any]]]:
        worker: Worker = own.worker
        found, seconds = _run_group(worker, group, meter, saved, stopped)
        return found, seconds, [worker.remarks(unit) for unit in group]

    def cost(group: list[Unit]) -> int:
        return sum(meter.plan.method(unit.method).cost * meter.facts[unit.set_name].count for unit in group)

    with ThreadPoolExecutor(jobs, "job", begin) as pool:
        # The longest first, to balance the threads.
        running = {pool.submit(work, group): group for group in sorted(groups, key=cost, reverse=True)}
        try:
            for done in as_completed(running):
                found, seconds, remarks = done.result()
                group = running[done]
                for unit, columns, remark in zip(group, found, remarks, strict=True):
                    write(unit, columns, seconds / len(group), together=len(group), **remark)
                saved.clear(group)
        except BaseException:  # including Ctrl-C: running groups stop at their next batch
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def _describe(worker: Worker, facts: Mapping[str, Facts], networks: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that determines a run's results; runs that differ here cannot share a folder."""
    plan = worker.plan
    first = plan.sets[0].name  # a method's description does not depend on the set
    return {
        "networks": dict(networks),
        "methods": {method.name: method.describe(worker.net(method.network, first)) for method in plan.methods},
        "sets": {name: one.fingerprint for name, one in facts.items()},
        "seeds": list(plan.seeds),
        "shuffle": plan.shuffle,
        "limit": plan.limit,
        **_describe_protocol(plan, facts),
    }


def _describe_protocol(plan: Plan, facts: Mapping[str, Facts]) -> dict[str, Any]:
    """Return what a run records about its protocol; nothing if it is the default."""
    if plan.protocol.is_default:
        return {}
    found: dict[str, Any] = {"protocol": {**plan.protocol.describe(), "hash": plan.protocol.hash()}}
    if plan.every:
        found["every"] = dict(plan.every)
    layouts = {name: one.layout.describe() for name, one in facts.items() if one.layout is not None}
    return found | ({"streams": layouts} if layouts else {})
