"""The worker of a run: opens networks and test sets on demand and runs units on them.

It does not access the run's folder, so that every process of a cluster and every thread can have its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from testtime import data as datasets
from testtime import kernels
from testtime.adaptation.adapters import Adapter
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.streams import Streams
from testtime.data import families
from testtime.data.held_out import COUNTS, find_source, was_seen
from testtime.data.sets import TestSet
from testtime.evaluation.columns import join_columns, make_columns
from testtime.evaluation.method_specs import MethodSpec
from testtime.evaluation.plan import Plan
from testtime.evaluation.records import Columns, count_wrong, score, stream_order, walk
from testtime.evaluation.stream_checkpoints import StreamCheckpoint
from testtime.evaluation.units import Unit
from testtime.networks.card import Card, CheckpointError
from testtime.networks.sources import open_network
from testtime.networks.ynet import YNet
from testtime.progress import Progress, read_ahead

Advance = Callable[[int, int], None]

CHECKPOINT_SECONDS = 60.0
"""Minimum time between stream checkpoints; the interval grows so that writing takes at most 5% of the time."""

_BELOW_ONE = 1 - 2**-24


class StaleError(ValueError):
    """A checkpoint that its streams cannot resume from."""


@dataclass(frozen=True)
class Facts:
    """Facts about a test set that scheduling needs.

    Attributes:
        fingerprint: A hash of its content.
        count: Number of images that the run uses.
        shape: `(C, H, W)` of its images.
        skipped: A line for each unreadable file.
        labelled: Whether it has labels.
    """

    fingerprint: str
    count: int
    shape: tuple[int, int, int]
    skipped: tuple[str, ...] = ()
    labelled: bool = True


class Worker:
    """Runs the units of a plan; networks and test sets are opened on demand.

    Args:
        plan: The plan.
        device: Where to compute.
        sets: Test sets of the plan that cannot be opened by name.
    """

    def __init__(
        self, plan: Plan, device: str | torch.device = "cpu", sets: Mapping[str, TestSet] | None = None
    ) -> None:
        self.plan = plan
        self.device = torch.device(device)
        self._sets = dict(sets or {})
        self.fingerprints: dict[str, str] = {}
        """Fingerprints of the networks opened so far, by file."""
        self._held: dict[str, tuple[str, YNet]] = {}
        self._adapter: tuple[Any, Adapter] | None = None
        self._thresholds: dict[tuple[str, str, int], float] = {}
        self._open = functools.lru_cache(maxsize=2)(self.open)  # consecutive jobs share sets
        self._facts: dict[str, Facts] = {}

    def net(self, name: str, set_name: str) -> YNet:
        """Return a network for a test set, on the device; the last one of each name is cached.

        Raises:
            CheckpointError: Its file is missing, damaged, or has changed since it was first opened.
            FileError: A file of a model is, see `open_network`.
        """
        file = self.plan.file(name, set_name)
        held, net = self._held.get(name, (None, None))
        if net is None or held != file:
            net = open_network(file, self.plan.needs_branch(name)).to(self.device)
            if self.fingerprints.setdefault(file, net.fingerprint()) != net.fingerprint():
                raise CheckpointError(file, "was replaced by another network during the run")
            self._held[name] = file, net
        return net

    def describe_network(self, name: str) -> dict[str, Any]:
        """Describe a network for a run's configuration, with a fingerprint per set if each set has its own network.

        Raises:
            CheckpointError: A file is missing or damaged, the networks of the sets differ in kind, or one was trained
                on the images of a held-out set.
        """
        sets = [source.name for source in self.plan.sets]
        files = {set_name: self.plan.file(name, set_name) for set_name in sets}
        if set(files.values()) == {self.plan.networks[name]}:
            net = self.net(name, sets[0])
            for set_name, file in files.items():
                _check_unseen(file, net.card, set_name)
            return {"fingerprint": self.fingerprints[files[sets[0]]], "architecture": net.card.architecture}
        first: Card | None = None
        for set_name, file in files.items():
            try:
                card = self.net(name, set_name).card
            except CheckpointError as error:
                fault = f"{error.fault} (the network {name} of {set_name})"
                raise CheckpointError(error.path, fault, error.remedy) from None
            _check_unseen(file, card, set_name)
            first = first or card
            # Only the training record may differ.
            if replace(card, record={}) != replace(first, record={}):
                raise CheckpointError(file, f"another kind of network than {files[sets[0]]}", "a method needs one kind")
        assert first is not None
        fingerprints = {set_name: self.fingerprints[file] for set_name, file in files.items()}
        return {"fingerprint": fingerprints, "architecture": first.architecture}

    def open(self, name: str, progress: Progress | None = None) -> TestSet:
        """Open a test set of the plan, with the image size and classes of the network.

        Args:
            name: Its name in the plan.
            progress: Called with the image files read, their total, and a message.

        Raises:
            ValueError: The channels or classes of the set and the network differ.
            DataError: The set is missing or damaged.
        """
        net = self.net(next(iter(self.plan.networks)), name)
        card = net.card
        source = self.plan.find_set(name)
        family = families.FAMILIES.get("folder" if source.folder is not None else name.split("/", 1)[0])
        options: dict[str, Any] = {}
        if family is not None and family.sized and card.size is not None:
            options["size"] = card.size
        if family is not None and family.is_subset and card.classes:
            options["classes"] = card.classes
        if family is not None and family.pictures:
            options["on_bad"] = self.plan.on_bad_image
            if progress is not None:
                options["progress"] = lambda done, total, _: progress(done, total, f"reading the images of {name}")
        root = source.folder or self.plan.data_root
        if name in self._sets:
            found = self._sets[name]
        else:
            found = datasets.open("folder" if source.folder is not None else name, root, **options)
        if source.folder is not None and found.labels is not None and card.classes:
            found = datasets.open("folder", root, classes=card.classes, **options)
        if card.classes and found.labels is not None:
            answers = found.scores(torch.zeros(1, len(card.classes), dtype=torch.float32, device="cpu")).shape[1]
            if answers != len(found.classes):
                raise ValueError(f"{name} has {len(found.classes)} classes, the network has {answers}.")
        if net.channels is not None and found.shape[0] != net.channels:
            raise ValueError(f"{name} has {found.shape[0]} channels, the network takes {net.channels}.")
        return found

    def facts(self, name: str, progress: Progress | None = None) -> Facts:
        """Return the facts about a test set; `progress` as for `open`."""
        if name not in self._facts:
            found = self.open(name, progress)
            count = len(found) if self.plan.limit is None else min(self.plan.limit, len(found))
            labelled = found.labels is not None or found.right is not None
            self._facts[name] = Facts(found.fingerprint(), count, found.shape, found.skipped, labelled)
        return self._facts[name]

    def order(self, test_set: TestSet, seed: int) -> Tensor:
        """Return the sample indices of a set in the order of the run."""
        shuffled = self.plan.shuffle and not test_set.ordered
        order = stream_order(len(test_set), seed) if shuffled else torch.arange(len(test_set), device="cpu")
        return order[: self.plan.limit]

    def run_unit(self, unit: Unit, part: slice = slice(None), advance: Advance | None = None) -> Columns:
        """Run one unit, or a part of one whose images are independent.

        Args:
            unit: The unit.
            part: Positions in its order.
            advance: Called after each batch with the number of images done, and of those wrong.

        Returns:
            Its records as columns.
        """
        test_set = self._open(unit.set_name)
        adapter = self.adapter(unit, test_set.shape)
        parts: list[Columns] = []
        chunks = test_set.chunks(choose_batch(test_set.shape, self.device), self.order(test_set, unit.seed)[part])
        for columns in walk(adapter, test_set, read_ahead(chunks)):
            parts.append(columns)
            if advance is not None:
                advance(len(columns["sample"]), count_wrong(columns))
        return join_columns(parts) if parts else make_columns([])

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
        """Return extra metadata of a unit: the threshold, if it was given as a percentage."""
        return {} if self.plan.method(unit.method).fraction is None else {"threshold": self.threshold(unit)}

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
        save: Callable[[StreamCheckpoint], None] | None = None,
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
        if method.needs_batch:
            return [self.run_unit(unit, advance=advance) for unit in units]
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

        start = saved = time.monotonic()
        pause = CHECKPOINT_SECONDS
        for numbers, images in read_ahead(blocks()):  # (S, T), (S, T, C, H, W)
            images = images.to(self.device)
            steps = [streams.predict(images[:, t], samples=numbers[:, t]) for t in range(numbers.shape[1])]
            answers = [torch.stack([getattr(step, f.name) for step in steps], 1) for f in fields(Prediction)]
            for row, test_set in enumerate(sets):
                add(row, score(test_set, numbers[row], Prediction(*(tensor[row] for tensor in answers))))
            now = time.monotonic()
            if save is not None and now - saved >= pause:
                seconds = now - start + (begun.seconds if begun else 0)
                save(StreamCheckpoint([join_columns(part) for part in parts], streams.state_dict(), seconds))
                saved = time.monotonic()
                pause = max(CHECKPOINT_SECONDS, 20 * (saved - now))
        return [join_columns(part) for part in parts]


def _check_unseen(file: str, card: Card, set_name: str) -> None:
    """Raise a `CheckpointError` if a network was trained on the images of a held-out set."""
    source = find_source(set_name)
    if source is not None and was_seen(card.record, source, COUNTS[source]):
        remedy = f"train it with --hold-out {COUNTS[source]}"
        raise CheckpointError(file, f"was trained on the images of {set_name}", remedy)


def _resume(streams: Streams, orders: Tensor, begun: StreamCheckpoint) -> None:
    """Load a checkpoint into streams, after checking that it matches the first images of the orders `(S, N)`."""
    for order, columns in zip(orders, begun.columns, strict=True):
        if not np.array_equal(columns["sample"], order[: len(columns["sample"])].numpy()):
            raise StaleError("its images differ")
    try:
        streams.load_state_dict(begun.state)
    except ValueError as error:
        raise StaleError(str(error).removesuffix(".")) from None


def find_threshold(confidences: Sequence[float], share: float) -> float:
    """Return the threshold below which a fraction of the confidences lies; fewer in case of ties."""
    count = round(share * len(confidences))
    if count >= len(confidences):
        return 1.0
    # A threshold of 1 would select every image; many confidences round to 1 in single precision.
    return min(sorted(confidences)[count], _BELOW_ONE)


def choose_batch(shape: tuple[int, ...], device: torch.device) -> int:
    """Return the images per call of an adapter for an image shape.

    Shards are multiples of it, so that sharding does not change the results, bit for bit. On a GPU, episodes run in
    blocks, and each block size is recorded once as a graph; large batches of small images leave few odd sizes.
    """
    small, large = kernels.tuning(device).batch
    return small if shape[1] * shape[2] <= 64 * 64 else large


def choose_parallel(method: MethodSpec, shape: tuple[int, ...], device: torch.device) -> int | Literal["auto"]:
    """Return how many episodes run in parallel: measured on a GPU, by rule elsewhere.

    A measurement may vary between runs, and with it the last bits of the records. On a CPU, small views are dominated
    by call overhead, so eight in parallel are faster; large ones are faster one at a time.
    """
    if kernels.tuning(device).waits:
        return "auto"
    return 8 if method.copies * shape[1] * shape[2] <= 16_384 else 1
