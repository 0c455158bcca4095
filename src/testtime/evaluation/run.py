"""Doing what a plan says: run the units that are missing, keep each as soon as it is finished.

`run_plan` keeps the folder and chooses how the units are run; the work itself is in `workshop.py`. The online units of
a method that start from the same network advance side by side as `Streams`, as many as the memory holds or as asked
(`together`); on a CPU several threads can share the units (`jobs`). The records are those of units run one by one, but
for rounding where streams go together.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from testtime.data.sets import TestSet
from testtime.evaluate import Columns, Progress
from testtime.machine import describe_machine
from testtime.runs.methods import Method
from testtime.runs.plan import Plan
from testtime.runs.underway import Shelf
from testtime.runs.units import Run, Unit, open_run, prepare_folder, write_unit
from testtime.runs.workshop import Advance, Facts, StaleError, Workshop
from testtime.storage import hold_folder

log = logging.getLogger(__name__)

_STREAMS = 128
_MEMORY = 4 * 2**30  # for streams that advance together on a CPU


class Meter:
    """How far a run is, in views the network has seen: a step of learning counts for more than a look.

    Args:
        plan: The plan.
        facts: Of every set.
        finished: Units that are there already.
        progress: Told how many of how many views are done, and how the unit at work goes.
    """

    def __init__(
        self, plan: Plan, facts: Mapping[str, Facts], finished: Sequence[Unit], progress: Progress | None
    ) -> None:
        self.plan, self.facts, self.progress = plan, facts, progress
        self.units = plan.units()
        self.total = sum(self._views(unit) for unit in self.units)
        self.done = sum(self._views(unit) for unit in finished)
        self.place = len(finished)
        self._lock = threading.Lock()  # units may run side by side
        self.show("")

    def _views(self, unit: Unit) -> int:
        return self.plan.method(unit.method).cost * self.facts[unit.set_name].count

    def show(self, text: str) -> None:
        """Report, with a word on how it goes."""
        if self.progress is not None:
            self.progress(self.done, self.total, text)

    def start(self, units: Sequence[Unit], seconds: float = 0) -> Advance:
        """Begin some units that advance together: a function to be told how many images are done and wrong.

        Args:
            units: The units.
            seconds: How long they took before, for images that will be told at once.
        """
        cost = self.plan.method(units[0].method).cost
        total = sum(self.facts[unit.set_name].count for unit in units)
        title = units[0].title if len(units) == 1 else f"{units[0].method} on {len(units)} sets, seed {units[0].seed}"
        labelled = all(self.facts[unit.set_name].labelled for unit in units)
        begin, done, wrong = time.monotonic() - seconds, 0, 0

        def advance(images: int, mistakes: int) -> None:
            nonlocal done, wrong
            done, wrong = done + images, wrong + mistakes
            rate = done / max(time.monotonic() - begin, 1e-9)
            with self._lock:
                self.done += cost * images
                self.show(
                    f"unit {self.place + 1}/{len(self.units)} {title}: {done:,}/{total:,} images, {rate:,.3g}/s, "
                    f"{(total - done) / rate:,.0f} s left" + (f", error {wrong / done:.1%}" if labelled else "")
                )

        return advance


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
    """Run every unit of a plan that its folder does not hold yet.

    Args:
        plan: What to run.
        out: The run's folder.
        device: Where to compute.
        command: The command line, for the record.
        together: How many online units advance side by side, at most; None takes as many as fit into the memory, and
            gives each of the `jobs` its part.
        jobs: How many units, or groups of streams, run side by side on a CPU, each on a thread of its own.
        ray: "local" starts workers of Ray on this machine, an address finds those of a cluster; None stays in this
            process.
        sets: Test sets of the plan that have no name to be opened by; not over Ray, whose workers do not have them.
        progress: Told how far the run is.

    Returns:
        The finished run.

    Raises:
        ValueError: The folder holds a run of another configuration, or sets and networks do not fit.
        CheckpointError: A network is not there or damaged.
        DataError: A set is not there or damaged.
        OSError: A unit cannot be written. What was finished before stays, as it does on Ctrl-C.
    """
    for name, value in (("together", together), ("jobs", jobs)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if ray is not None and (sets or jobs > 1):
        raise ValueError("Ray's workers open their sets by name and are as many as Ray says: no `sets`, no `jobs`.")
    shop = Workshop(plan, device, sets)
    if jobs > 1 and shop.device.type != "cpu":
        raise ValueError(f"`jobs` are for a CPU; on {shop.device.type} units share the device already.")
    networks = {name: shop.describe_network(name) for name in plan.networks}
    facts = {source.name: shop.facts(source.name, progress) for source in plan.sources}
    configuration = describe(shop, facts, networks)
    machine = describe_machine(shop.device)
    files = {"networks": dict(plan.networks), "folders": {s.name: s.folder for s in plan.sources if s.folder}}
    about = {"title": plan.title, "command": command, "seeds": list(plan.seeds), "files": files, **machine}
    about["skipped"] = {name: list(one.skipped) for name, one in facts.items() if one.skipped}
    with hold_folder(out):
        prepare_folder(out, configuration, about)
        units, images = plan.units(), {name: one.count for name, one in facts.items()}
        known = set(open_run(out, images).units)
        # Over Ray nothing that is underway here goes on.
        place = machine["hardware"]["device"] if ray is None else "ray"
        shelf = Shelf(out, device=place, testtime=machine["versions"]["testtime"], torch=machine["versions"]["torch"])
        company = {unit: key for unit in units if (key := find_company(plan, unit, facts)) is not None}
        underway = shelf.groups(company, known)
        known -= {unit for group in underway for unit in group}
        missing = [unit for unit in units if unit not in known]
        log.info("%s: %d of %d units are to be run", out, len(missing), len(units))
        meter = Meter(plan, facts, [unit for unit in units if unit in known], progress)

        def keep(unit: Unit, columns: Columns, seconds: float, hardware: str, **more: Any) -> None:
            write_unit(out, unit, columns, seconds, device=hardware, testtime=machine["versions"]["testtime"], **more)
            meter.place += 1

        if ray is None:
            begun = {unit for group in underway for unit in group}
            fresh = [unit for unit in missing if unit not in begun]
            groups = underway + make_groups(plan, fresh, facts, shop.device, together, jobs)
            here = functools.partial(keep, hardware=machine["hardware"]["device"])
            if jobs == 1:
                _run_here(shop, groups, meter, shelf, here)
            else:
                _run_on_threads(functools.partial(Workshop, plan, device, sets), groups, meter, shelf, here, jobs)
        else:
            from testtime.runs.cluster import run_on_ray

            run_on_ray(plan, missing, facts, shop.device, ray, meter, keep, shop.fingerprints)
        shelf.remove()
    return open_run(out, images)


def _run_here(
    shop: Workshop, groups: Sequence[list[Unit]], meter: Meter, shelf: Shelf, keep: Callable[..., None]
) -> None:
    """Run groups of units one after the other in this process."""
    for group in groups:
        found, seconds = _run_group(shop, group, meter, shelf)
        for unit, columns in zip(group, found, strict=True):
            keep(unit, columns, seconds / len(group), together=len(group), **shop.remarks(unit))
        shelf.clear(group)


def _run_group(
    shop: Workshop, group: list[Unit], meter: Meter, shelf: Shelf, stopped: threading.Event | None = None
) -> tuple[list[Columns], float]:
    """Run a unit, or several side by side from where they were last kept: their columns, and the seconds it took."""
    begun = shelf.take(group) if len(group) > 1 else None
    before = begun.seconds if begun else 0.0
    advance, start = meter.start(group, before), time.perf_counter()

    def go_on(images: int, mistakes: int) -> None:
        if stopped is not None and stopped.is_set():
            raise InterruptedError
        advance(images, mistakes)

    if len(group) == 1:
        return [shop.run_unit(group[0], advance=go_on)], time.perf_counter() - start
    try:
        found = shop.run_streams(group, go_on, begun, functools.partial(shelf.keep, group))
    except StaleError as error:
        shelf.refuse(group, error)
        return _run_group(shop, group, meter, shelf, stopped)
    return found, before + time.perf_counter() - start


def _run_on_threads(
    make_shop: Callable[[], Workshop],
    groups: Sequence[list[Unit]],
    meter: Meter,
    shelf: Shelf,
    keep: Callable[..., None],
    jobs: int,
) -> None:
    """Run groups of units side by side, a thread and a workshop each."""
    own, stopped = threading.local(), threading.Event()

    def begin() -> None:
        # A second thread saves little on small networks, and beside other jobs its waiting costs more.
        torch.set_num_threads(1)
        own.shop = make_shop()

    def work(group: list[Unit]) -> tuple[list[Columns], float, list[dict[str, Any]]]:
        shop: Workshop = own.shop
        found, seconds = _run_group(shop, group, meter, shelf, stopped)
        return found, seconds, [shop.remarks(unit) for unit in group]

    def cost(group: list[Unit]) -> int:
        return sum(meter.plan.method(unit.method).cost * meter.facts[unit.set_name].count for unit in group)

    with ThreadPoolExecutor(jobs, "job", begin) as pool:
        # The longest first, so that no thread is left with a long one at the end.
        running = {pool.submit(work, group): group for group in sorted(groups, key=cost, reverse=True)}
        try:
            for done in as_completed(running):
                found, seconds, remarks = done.result()
                group = running[done]
                for unit, columns, remark in zip(group, found, remarks, strict=True):
                    keep(unit, columns, seconds / len(group), together=len(group), **remark)
                shelf.clear(group)
        except BaseException:  # Ctrl-C as well: nothing new is begun, and what runs stops at its next batch
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def make_groups(
    plan: Plan,
    units: Sequence[Unit],
    facts: Mapping[str, Facts],
    device: torch.device,
    together: int | None = None,
    jobs: int = 1,
) -> list[list[Unit]]:
    """The units in groups that run together: online ones of a method, network, seed, and shape and number of images.

    Args:
        plan: The plan.
        units: The units to run.
        facts: Of every set.
        device: Where they run.
        together: At most so many in a group; None chooses by the memory, and so that every job has its part.
        jobs: How many groups run at the same time.
    """
    groups: dict[Any, list[Unit]] = {}
    for number, unit in enumerate(units):
        groups.setdefault(find_company(plan, unit, facts) or number, []).append(unit)
    pieces: list[list[Unit]] = []
    for group in groups.values():
        method, known = plan.method(group[0].method), facts[group[0].set_name]
        size = together or 1
        if together is None and len(group) > 1:
            rounds = math.ceil(len(group) / _fitting(method, known.shape, device, jobs) / jobs)
            size = math.ceil(len(group) / (rounds * jobs))
        pieces.extend(group[start : start + size] for start in range(0, len(group), size))
    return pieces


def find_company(plan: Plan, unit: Unit, facts: Mapping[str, Facts]) -> tuple[Any, ...] | None:
    """What units have in common that can advance together; None for one that runs alone."""
    method, known = plan.method(unit.method), facts[unit.set_name]
    if method.mode != "online" or known.count == 0 or method.share is not None:
        return None
    return unit.method, plan.file(method.network, unit.set_name), unit.seed, known.count, known.shape


def _fitting(method: Method, shape: tuple[int, int, int], device: torch.device, jobs: int) -> int:
    """How many streams can advance together in the memory, or in that of one of several jobs."""
    numbers = method.views * math.prod(shape)
    # What a step keeps of a view for the way back is some hundreds of times the view itself; for a ResNet-26 on a CPU
    # 240 times, 120 with compiled kernels.
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2 // (4 * numbers * 400)
    else:
        room = _MEMORY // jobs // (4 * numbers * 250)
    return max(1, min(_STREAMS, room))


def describe(shop: Workshop, facts: Mapping[str, Facts], networks: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's results; two runs that differ here do not share a folder."""
    plan = shop.plan
    first = plan.sources[0].name  # what is said of a method does not depend on the set
    return {
        "networks": dict(networks),
        "methods": {method.name: method.describe(shop.net(method.network, first)) for method in plan.methods},
        "sets": {name: one.fingerprint for name, one in facts.items()},
        "seeds": list(plan.seeds),
        "shuffle": plan.shuffle,
        "limit": plan.limit,
    }
