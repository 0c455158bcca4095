"""Grouping units to run in parallel, and the progress of a run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from testtime import kernels
from testtime.adaptation.methods import find_method
from testtime.evaluation.inputs import Facts
from testtime.evaluation.method_specs import MethodSpec
from testtime.evaluation.plan import Plan
from testtime.evaluation.units import Unit
from testtime.evaluation.worker import Advance
from testtime.progress import Progress

_STREAMS = 128


class Meter:
    """The progress of a run, in views: a training step counts for more than a forward pass.

    Args:
        plan: The plan.
        facts: Facts about each set.
        finished: The finished units.
        progress: Called with the views done, their total, and the state of the current unit.
    """

    def __init__(
        self, plan: Plan, facts: Mapping[str, Facts], finished: Sequence[Unit], progress: Progress | None
    ) -> None:
        self.plan, self.facts, self.progress = plan, facts, progress
        self.units = plan.units()
        self.total = sum(self._views(unit) for unit in self.units)
        self.done = sum(self._views(unit) for unit in finished)
        self.finished = len(finished)
        self._lock = threading.Lock()  # units may run concurrently
        self.show("")

    def _views(self, unit: Unit) -> int:
        return self.plan.method(unit.method).cost * self.facts[unit.set_name].count

    def show(self, text: str) -> None:
        """Report progress with a message."""
        if self.progress is not None:
            self.progress(self.done, self.total, text)

    def start(self, units: Sequence[Unit], seconds: float = 0) -> Advance:
        """Start units that run in parallel; returns a callback for the number of images done and of those wrong.

        Args:
            units: The units.
            seconds: Seconds spent on them before, when resuming from a checkpoint.
        """
        cost = self.plan.method(units[0].method).cost
        total = sum(self.facts[unit.set_name].count for unit in units)
        title = units[0].title if len(units) == 1 else f"{units[0].method} on {len(units)} sets"
        labelled = all(self.facts[unit.set_name].labelled for unit in units)
        begin, done, wrong = time.monotonic() - seconds, 0, 0

        def advance(images: int, mistakes: int) -> None:
            nonlocal done, wrong
            done, wrong = done + images, wrong + mistakes
            rate = done / max(time.monotonic() - begin, 1e-9)
            with self._lock:
                self.done += cost * images
                self.show(
                    f"{self.finished + 1}/{len(self.units)} {title}: {done:,}/{total:,} images, {rate:,.3g}/s"
                    + (f", error {wrong / done:.1%}" if labelled else "")
                )

        return advance


def make_groups(
    plan: Plan,
    units: Sequence[Unit],
    facts: Mapping[str, Facts],
    device: torch.device,
    together: int | None = None,
    jobs: int = 1,
) -> list[list[Unit]]:
    """Group the units to run in parallel: online units with the same method, network, seed, image shape and count.

    Args:
        plan: The plan.
        units: The units to run.
        facts: Facts about each set.
        device: Where they run.
        together: Maximum size of a group; None chooses by the available memory and the number of jobs.
        jobs: Number of groups that run concurrently.
    """
    groups: dict[Any, list[Unit]] = {}
    for number, unit in enumerate(units):
        groups.setdefault(find_group_key(plan, unit, facts) or number, []).append(unit)
    pieces: list[list[Unit]] = []
    for group in groups.values():
        method, known = plan.method(group[0].method), facts[group[0].set_name]
        size = together or 1
        if together is None and len(group) > 1:
            rounds = math.ceil(len(group) / _fitting(method, known.shape, device, jobs) / jobs)
            size = math.ceil(len(group) / (rounds * jobs))
        pieces.extend(group[start : start + size] for start in range(0, len(group), size))
    return pieces


def find_group_key(plan: Plan, unit: Unit, facts: Mapping[str, Facts]) -> tuple[Any, ...] | None:
    """Return the key shared by units that can run in parallel; None for a unit that runs alone."""
    method, known = plan.method(unit.method), facts[unit.set_name]
    # A correction takes a call as one batch; Streams cannot share an update.
    is_one_by_one = find_method(method.method).correction is None and "share" not in method.settings
    shares = method.needs_batch and not (plan.protocol.batch == 1 and is_one_by_one)
    alone = shares or method.decides or method.fraction is not None or plan.protocol.rate is not None
    if method.mode != "online" or alone or known.count == 0:
        return None
    return unit.method, plan.file(method.network, unit.set_name), unit.seed, known.count, known.shape


def _fitting(method: MethodSpec, shape: tuple[int, int, int], device: torch.device, jobs: int) -> int:
    """Return how many parallel streams fit in the memory available to each job."""
    values = method.views * math.prod(shape)
    tuning = kernels.tuning(device)
    memory = tuning.memory // jobs if tuning.memory else kernels.free_memory(device) // 2
    return max(1, min(_STREAMS, memory // (4 * values * tuning.saved_values)))
