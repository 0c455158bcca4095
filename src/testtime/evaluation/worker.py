"""The worker of a run: runs units on the networks and streams of a plan.

It does not access the run's folder, so that every process of a cluster and every thread can have its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from testtime import kernels
from testtime.adaptation.adapters import Adapter
from testtime.adaptation.prediction import Prediction
from testtime.data.sets import TestSet
from testtime.evaluation.columns import join_columns, make_columns
from testtime.evaluation.inputs import Inputs
from testtime.evaluation.method_specs import MethodSpec
from testtime.evaluation.plan import Plan
from testtime.evaluation.records import Columns, count_wrong, score, walk
from testtime.evaluation.stream_checkpoints import PeriodicSaver, Save, StreamCheckpoint
from testtime.evaluation.timing import Paced, count_state
from testtime.evaluation.units import Unit
from testtime.progress import read_ahead

Advance = Callable[[int, int], None]

CHECKPOINT_SECONDS = 60.0
"""Minimum time between stream checkpoints; the interval grows so that writing takes at most 5% of the time."""

_BELOW_ONE = 1 - 2**-24


class StaleError(ValueError):
    """A checkpoint that its streams cannot resume from."""


class Worker(Inputs):
    """Runs the units of a plan.

    Args:
        plan: The plan.
        device: Where to compute.
        sets: Test sets of the plan that cannot be opened by name.
    """

    def __init__(
        self, plan: Plan, device: str | torch.device = "cpu", sets: Mapping[str, TestSet] | None = None
    ) -> None:
        super().__init__(plan, device, sets)
        self._adapter: tuple[Any, Adapter] | None = None
        self._thresholds: dict[tuple[str, str, int], float] = {}
        self._open = functools.lru_cache(maxsize=2)(self.open)  # consecutive jobs share sets
        self._state_bytes: dict[Unit, int] = {}

    def run_unit(
        self,
        unit: Unit,
        part: slice = slice(None),
        advance: Advance | None = None,
        begun: StreamCheckpoint | None = None,
        save: Save | None = None,
    ) -> Columns:
        """Run one unit, or a part of one whose images are independent.

        Args:
            unit: The unit.
            part: Positions in its order.
            advance: Called after each batch with the number of images done, and of those wrong.
            begun: A checkpoint of an online unit to resume from, bit for bit.
            save: Called periodically with a checkpoint.

        Returns:
            Its records as columns.

        Raises:
            StaleError: The unit cannot resume from `begun`; nothing was run.
        """
        test_set = self._open(unit.set_name)
        adapter = self.adapter(unit, test_set.shape)
        order, start = self.order(test_set, unit.seed)[part], part.start or 0
        parts: list[Columns] = []

        def add(columns: Columns) -> None:
            parts.append(columns)
            if advance is not None:
                advance(len(columns["sample"]), count_wrong(columns))

        if begun is not None:
            _resume(adapter, order[None], begun)
            add(begun.columns[0])
            done = len(begun.columns[0]["sample"])
            order, start = order[done:], start + done
        batch = choose_batch(test_set.shape, self.device, self.plan, self.method(unit))
        predict = self._pace(unit, adapter, start // batch)
        saver = PeriodicSaver(save, begun, CHECKPOINT_SECONDS)
        for numbers, images, _ in read_ahead(test_set.chunks(batch, order)):
            add(score(test_set, numbers, predict(images, samples=numbers)))
            saver.save_if_due([parts], adapter)
        self._note_state([unit], adapter)
        return join_columns(parts) if parts else make_columns([])

    def _pace(self, unit: Unit, adapter: Adapter, first: int) -> Callable[..., Prediction]:
        """Return the function that predicts the calls of a unit, of which `first` is the number of the first."""
        every, method = self.plan.every.get(unit.method, 1), self.plan.method(unit.method)
        if every == 1:
            return adapter.predict
        episodic = method.mode == "episodic"
        idle = method.observe_only(self.net(method.network, unit.set_name)) if episodic else None
        return Paced(adapter, every, first, idle).predict

    def method(self, unit: Unit) -> MethodSpec:
        """Return the method of a unit, with a numeric threshold."""
        method = self.plan.method(unit.method)
        return method if method.fraction is None else method.resolve(self.threshold(unit))

    def threshold(self, unit: Unit) -> float:
        """Return the threshold for a method with a percentage.

        It is a quantile of the unadapted network's confidences on all images of the unit, computed in advance without
        labels.
        """
        method = self.plan.method(unit.method)
        key = unit.method, unit.set_name, unit.seed
        if key not in self._thresholds:
            assert method.fraction is not None
            test_set, net = self._open(unit.set_name), self.net(method.network, unit.set_name)
            chunks = test_set.chunks(choose_batch(test_set.shape, self.device), self.order(test_set, unit.seed))
            parts = walk(method.observe_only(net), test_set, read_ahead(chunks))
            confidences = [confidence for columns in parts for confidence in columns["confidence"].tolist()]
            self._thresholds[key] = find_threshold(confidences, method.fraction)
        return self._thresholds[key]

    def remarks(self, unit: Unit) -> dict[str, Any]:
        """Return extra metadata of a unit that was run.

        `threshold`, if given as a percentage; with a protocol other than the default, `state_bytes` of an online unit,
        and with a `rate`, `every`: k if the method learned from every k-th call.
        """
        found: dict[str, Any] = {}
        if self.plan.method(unit.method).fraction is not None:
            found["threshold"] = self.threshold(unit)
        if self.plan.protocol.rate is not None:
            found["every"] = self.plan.every.get(unit.method, 1)
        return found | ({"state_bytes": self._state_bytes[unit]} if unit in self._state_bytes else {})

    def _note_state(self, units: Sequence[Unit], adapter: Adapter) -> None:
        if not self.plan.protocol.is_default and self.plan.method(units[0].method).mode == "online":
            self._state_bytes |= dict.fromkeys(units, count_state(adapter) // len(units))

    def adapter(self, unit: Unit, shape: tuple[int, ...]) -> Adapter:
        """Return the adapter of a unit, reset; the last one, with its recorded graphs, is reused if it matches."""
        method = self.method(unit)
        net = self.net(method.network, unit.set_name)
        key = method, self.plan.file(method.network, unit.set_name), unit.seed, shape
        if self._adapter is None or self._adapter[0] != key:
            self._adapter = None  # free its memory before the next one is allocated
            self._adapter = key, method.make(net, unit.seed, choose_parallel(method, shape, self.device))
        adapter = self._adapter[1]
        adapter.reset()
        return adapter

    def run_streams(
        self,
        units: Sequence[Unit],
        advance: Advance | None = None,
        begun: StreamCheckpoint | None = None,
        save: Save | None = None,
    ) -> list[Columns]:
        """Run online units in parallel; they share method, network, seed, and length and shape of their sets.

        Args:
            units: The units.
            advance: As for `run_unit`.
            begun: A checkpoint to resume from, bit for bit.
            save: Called periodically with a checkpoint.

        Returns:
            The columns of each unit.

        Raises:
            StaleError: The units cannot resume from `begun`; nothing was run.
        """
        self._adapter = None  # free its memory
        method, seed = self.plan.method(units[0].method), units[0].seed
        sets = [self.open(unit.set_name) for unit in units]
        orders = torch.stack([self.order(test_set, seed) for test_set in sets])  # (S, N)
        streams = method.make_streams(self.net(method.network, units[0].set_name), seed, len(units))
        parts: list[list[Columns]] = [[] for _ in units]

        def add(row: int, columns: Columns) -> None:
            parts[row].append(columns)
            if advance is not None:
                advance(len(columns["sample"]), count_wrong(columns))

        if begun is not None:
            _resume(streams, orders, begun)
            for row, columns in enumerate(begun.columns):
                add(row, columns)
            orders = orders[:, len(begun.columns[0]["sample"]) :]
        tuning = kernels.tuning(self.device)
        block = tuning.block if tuning.waits else max(1, tuning.block // len(units))

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for numbers in orders.split(block, dim=1) if orders.shape[1] else ():
                yield numbers, torch.stack([one.images(row) for one, row in zip(sets, numbers, strict=True)])

        saver = PeriodicSaver(save, begun, CHECKPOINT_SECONDS)
        for numbers, images in read_ahead(blocks()):  # (S, T), (S, T, C, H, W)
            images = images.to(self.device)
            steps = [streams.predict(images[:, t], samples=numbers[:, t]) for t in range(numbers.shape[1])]
            answers = [torch.stack([getattr(step, f.name) for step in steps], 1) for f in fields(Prediction)]
            for row, test_set in enumerate(sets):
                add(row, score(test_set, numbers[row], Prediction(*(tensor[row] for tensor in answers))))
            saver.save_if_due(parts, streams)
        self._note_state(units, streams)
        return [join_columns(part) for part in parts]


def _resume(adapter: Adapter, orders: Tensor, begun: StreamCheckpoint) -> None:
    """Load a checkpoint into an adapter, after checking that it matches the first images of the orders `(S, N)`."""
    for order, columns in zip(orders, begun.columns, strict=True):
        if not np.array_equal(columns["sample"], order[: len(columns["sample"])].numpy()):
            raise StaleError("its images differ")
    try:
        adapter.load_state_dict(begun.state)
    except ValueError as error:
        raise StaleError(str(error).removesuffix(".")) from None


def find_threshold(confidences: Sequence[float], share: float) -> float:
    """Return the threshold below which a fraction of the confidences lies; fewer in case of ties."""
    count = round(share * len(confidences))
    if count >= len(confidences):
        return 1.0
    # A threshold of 1 would select every image; many confidences round to 1 in single precision.
    return min(sorted(confidences)[count], _BELOW_ONE)


def choose_batch(
    shape: tuple[int, ...], device: torch.device, plan: Plan | None = None, method: MethodSpec | None = None
) -> int:
    """Return the images per call of an adapter: those of the plan's protocol, or by the shape of the images.

    The protocol's batch does not matter to what learns nothing from one image for another, unless time does. Shards
    are multiples of it, so that sharding does not change the results, bit for bit. On a GPU, episodes run in blocks,
    and each block size is recorded once as a graph; large batches of small images leave few odd sizes.
    """
    protocol = None if plan is None else plan.protocol
    learns = method is None or method.mode == "online" or (method.mode == "episodic" and method.needs_batch)
    if protocol is not None and protocol.batch is not None and (learns or protocol.rate is not None):
        return protocol.batch
    small, large = kernels.tuning(device).batch
    return small if shape[1] * shape[2] <= 64 * 64 else large


def choose_parallel(method: MethodSpec, shape: tuple[int, ...], device: torch.device) -> int | Literal["auto"]:
    """Return how many episodes run in parallel: measured on a GPU, by rule elsewhere.

    A measurement may vary between runs, and with it the last bits of the records. On a CPU, small views are dominated
    by call overhead, so eight in parallel are faster; large ones are faster one at a time.
    """
    if kernels.tuning(device).waits:
        return "auto"
    return 8 if method.make_settings().copies * shape[1] * shape[2] <= 16_384 else 1
