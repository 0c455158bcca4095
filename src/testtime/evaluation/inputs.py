"""The inputs of a run: opens the networks and streams of a plan on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from testtime import data as datasets
from testtime.data import families
from testtime.data.held_out import COUNTS, find_source, was_seen
from testtime.data.sets import TestSet
from testtime.evaluation.plan import Plan, SetSpec
from testtime.evaluation.protocols import Layout, find_bases
from testtime.evaluation.records import stream_order
from testtime.evaluation.stream_sets import StreamSet, correlate, open_walk, share_bases
from testtime.networks.card import Card, CheckpointError
from testtime.networks.sources import open_network
from testtime.networks.ynet import YNet
from testtime.progress import Progress


@dataclass(frozen=True)
class Facts:
    """Facts about a stream of images that scheduling needs: a test set, unless the protocol joins them.

    Attributes:
        fingerprint: A hash of its content.
        count: Number of images that the run uses.
        shape: `(C, H, W)` of its images.
        skipped: A line for each unreadable file.
        labelled: Whether it has labels.
        layout: Sets and segments of a stream that joins several.
    """

    fingerprint: str
    count: int
    shape: tuple[int, int, int]
    skipped: tuple[str, ...] = ()
    labelled: bool = True
    layout: Layout | None = None


class Inputs:
    """The networks and streams of a plan, opened on demand.

    Args:
        plan: The plan.
        device: Where the networks are put.
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
        """Open a stream of the plan, with the image size and classes of the network.

        Args:
            name: Its name in the plan: of a test set, unless the protocol joins them.
            progress: Called with the image files read, their total, and a message.

        Raises:
            ValueError: The channels or classes of a set and the network differ, or the sets cannot be joined.
            DataError: A set is missing or damaged.
        """
        plan, order = self.plan, self._order_within
        if not plan.protocol.joins:
            return self._open_set(plan.find_set(name), progress)
        if plan.protocol.name == "walk":
            bases = find_bases([one.name for one in plan.sets])
            base, corruptions = dict(zip(plan.streams, bases.items(), strict=True))[name]
            source = plan.find_set(base) if base.startswith("folder/") else SetSpec(base)
            return open_walk(name, self._open_set(source, progress), corruptions, plan.protocol, order)
        sets = share_bases(self._open_set(one, progress) for one in plan.sets)
        return StreamSet(name, sets, plan.protocol, order)

    def _open_set(self, source: SetSpec, progress: Progress | None) -> TestSet:
        name = source.name
        net = self.net(next(iter(self.plan.networks)), name)
        card = net.card
        family = families.FAMILIES.get("folder" if source.folder is not None else name.split("/", 1)[0])
        options: dict[str, Any] = {}
        resizes = family is not None and family.pictures and name not in self._sets
        if family is not None and family.sized and (resizes or card.size is not None):
            options["size"] = card.require_size()
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
        """Return the facts about a stream; `progress` as for `open`."""
        if name not in self._facts:
            found = self.open(name, progress)
            count = len(self.order(found, self.plan.seeds[0]))  # the same for every seed
            labelled = found.labels is not None or found.right is not None
            layout = found.layout() if isinstance(found, StreamSet) else None
            self._facts[name] = Facts(found.fingerprint(), count, found.shape, found.skipped, labelled, layout)
        return self._facts[name]

    def order(self, test_set: TestSet, seed: int) -> Tensor:
        """Return the sample indices of a stream in the order of the run."""
        return test_set.order(seed) if isinstance(test_set, StreamSet) else self._order_within(test_set, seed)

    def _order_within(self, test_set: TestSet, seed: int) -> Tensor:
        """Return the sample indices of a set in the order of the run."""
        shuffled = self.plan.shuffle and not test_set.ordered
        order = stream_order(len(test_set), seed) if shuffled else torch.arange(len(test_set), device="cpu")
        order, concentration = order[: self.plan.limit], self.plan.protocol.concentration
        return order if concentration is None else correlate(test_set, order, concentration, seed)


def _check_unseen(file: str, card: Card, set_name: str) -> None:
    """Raise a `CheckpointError` if a network was trained on the images of a held-out set."""
    source = find_source(set_name)
    if source is not None and was_seen(card.record, source, COUNTS[source]):
        remedy = f"train it with --hold-out {COUNTS[source]}"
        raise CheckpointError(file, f"was trained on the images of {set_name}", remedy)
