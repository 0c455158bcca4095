"""Streams of several test sets as one test set, and the order of the images within each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from testtime.data.corrupted import Corrupted
from testtime.data.sets import TestSet
from testtime.evaluation.protocols import Layout, Protocol, make_segments, make_walk
from testtime.randomness import Draws

Order = Callable[[TestSet, int], Tensor]
"""Returns the sample indices of a set in the order of the run for a seed, int64 `(n,)`."""


class StreamSet(TestSet):
    """A stream of several test sets; its samples are numbered as `Layout` describes.

    Args:
        name: Its name.
        sets: The sets, with the same classes and shape.
        protocol: The protocol.
        order: The order of the images within each set.

    Raises:
        ValueError: The sets do not match.
    """

    ordered = True

    def __init__(self, name: str, sets: Sequence[TestSet], protocol: Protocol, order: Order) -> None:
        _check_alike(protocol, sets)
        self.name, self.sets, self.protocol, self._order_within = name, tuple(sets), protocol, order
        self.classes = sets[0].classes
        self.origin = f"{protocol.name} stream of {len(sets)} sets"
        sizes = torch.tensor([0, *(len(one) for one in sets)], dtype=torch.int64, device="cpu")
        self._offsets = sizes.cumsum(0)  # (sets + 1,)
        self.pool = int(self._offsets[-1])
        """Number of images of all sets."""
        counts = [len(order(one, 0)) for one in sets]  # the same for every seed
        self.segments = make_segments(protocol, [one.name for one in sets], counts)
        samples = self.order(0)
        self.count = len(samples)
        """Number of images of the stream."""
        self._visits = int(samples.max()) // self.pool + 1 if len(samples) else 1
        self.labels = _repeat([one.labels for one in sets], self._visits)
        self.right = _repeat([one.right for one in sets], self._visits)

    def __len__(self) -> int:
        return self.pool * self._visits

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.sets[0].shape

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line for one in self.sets for line in one.skipped))

    def scores(self, logits: Tensor) -> Tensor:
        return self.sets[0].scores(logits)

    def fingerprint(self) -> str:
        parts = [self.name, self.protocol.hash(), *(one.fingerprint() for one in self.sets)]
        return hashlib.sha256("\n".join(parts).encode(errors="backslashreplace")).hexdigest()

    def order(self, seed: int) -> Tensor:
        """Return the sample numbers of the stream for a seed, int64 `(count,)`."""
        orders = [self._order_within(one, seed) for one in self.sets]
        if self.protocol.name == "mixed":
            samples = torch.cat([offset + order for offset, order in zip(self._offsets, orders, strict=False)])
            return samples[Draws.of(seed, samples).purpose("mixed").keys.argsort(stable=True)]
        visits = torch.zeros(self.pool, dtype=torch.int64, device="cpu")
        parts = [visits[:0]]
        for source, start, stop in self.segments:
            order = orders[source]
            positions = torch.arange(start, stop, device="cpu") % max(len(order), 1)
            images = self._offsets[source] + order[positions]
            parts.append(visits[images] * self.pool + images)
            visits[images] += 1  # at most once each: a segment is no longer than its set
        return torch.cat(parts)

    def layout(self) -> Layout:
        """Return its sets and segments."""
        names = [one.name for one in self.sets]
        segments = tuple((names[source], stop - start) for source, start, stop in self.segments)
        return Layout({one.name: len(one) for one in self.sets}, segments)

    def _read(self, numbers: Tensor) -> Tensor:
        images = numbers % max(self.pool, 1)
        source = torch.searchsorted(self._offsets, images, right=True) - 1
        found = torch.empty((len(numbers), *self.shape), dtype=torch.uint8, device="cpu")
        for k in source.unique().tolist():
            here = source == k
            found[here] = self.sets[k].images(images[here] - self._offsets[k])
        return found


def _check_alike(protocol: Protocol, sets: Sequence[TestSet]) -> None:
    """Check that sets can be joined to a stream."""
    first = sets[0]
    for one in sets:
        for what, ours, theirs in (
            ("shape of the images", one.shape, first.shape),
            ("classes", one.classes, first.classes),
            ("presence of labels", one.labels is None, first.labels is None),
            ("kind of labels", one.right is None, first.right is None),
        ):
            if ours != theirs:
                raise ValueError(f"One stream cannot contain both {first.name} and {one.name}: their {what} differs.")
        if protocol.name == "mixed" and one.ordered:
            raise ValueError(f"{one.name} has a fixed order and cannot be mixed.")


def _repeat(tensors: Sequence[Tensor | None], times: int) -> Tensor | None:
    held = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(held * times) if held else None


def share_bases(sets: Iterable[TestSet]) -> list[TestSet]:
    """Return sets, of which those generated from the same images share them: there may be 75 of one test set."""
    bases: dict[str, TestSet] = {}
    found = []
    for one in sets:
        if isinstance(one, Corrupted):
            one.base = bases.setdefault(one.base.fingerprint(), one.base)
        found.append(one)
    return found


def open_walk(name: str, base: TestSet, corruptions: Sequence[str], protocol: Protocol, order: Order) -> StreamSet:
    """Return a walk through pairs of corruptions of a set, computed as they are read.

    Args:
        name: Name of the stream.
        base: The set without corruption.
        corruptions: At least two.
        protocol: The protocol.
        order: The order of the images within the set.
    """
    states: list[TestSet] = []
    for levels in make_walk(protocol, corruptions):
        state = base
        for corruption, level in levels.items():
            state = Corrupted(state, corruption, level)
        state.name = f"{base.name}-walk/" + "+".join(f"{corruption}-{level}" for corruption, level in levels.items())
        states.append(state)
    return StreamSet(name, states, protocol, order)


def correlate(test_set: TestSet, order: Tensor, concentration: float, seed: int) -> Tensor:
    """Sort the images of a set so that neighbours tend to share a class (Yuan et al. 2023).

    The stream is divided into as many slots as there are classes. The images of each class are distributed over the
    slots with proportions from a symmetric Dirichlet distribution, and are contiguous within a slot. The proportions
    are not drawn themselves: images are assigned one by one as in a Pólya urn, to a random slot or to that of a random
    earlier image of the class, which has the same distribution.

    Args:
        test_set: The set.
        order: Sample indices in the order of the run, int64 `(n,)`.
        concentration: Of the Dirichlet distribution.
        seed: Seed of the draws.

    Returns:
        The same indices, sorted.

    Raises:
        ValueError: The set has no labels or a fixed order.
    """
    if test_set.labels is None:
        raise ValueError(f"{test_set.name} has no labels, which `concentration` needs.")
    if test_set.ordered:
        raise ValueError(f"{test_set.name} has a fixed order and cannot be sorted by class.")
    labels, slots = test_set.labels[order], max(len(test_set.classes), 1)
    draws = Draws.of(seed, order)
    slot = torch.zeros_like(order)
    for label in labels.unique().tolist():
        own = (labels == label).nonzero().flatten()
        keys, earlier = Draws(draws.keys[own]), torch.arange(len(own), device="cpu")
        fresh = keys.purpose("slot").integers(slots).tolist()
        like = keys.purpose("earlier image").integers(earlier).tolist()
        is_fresh = keys.purpose("new slot").uniform().double() * (slots * concentration + earlier)
        assigned: list[int] = []
        for k, random in enumerate((is_fresh < slots * concentration).tolist()):
            assigned.append(fresh[k] if random else assigned[like[k]])
        slot[own] = torch.tensor(assigned, dtype=torch.int64, device="cpu")
    pairs = slot * slots + labels  # a slot of a class
    rank = Draws.of(seed, pairs).purpose("order of classes").keys
    by_rank = rank.argsort(stable=True)
    return order[by_rank[slot[by_rank].argsort(stable=True)]]
