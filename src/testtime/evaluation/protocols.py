"""Protocols: in what order, and in which calls, the images of a run's test sets are presented.

    reset       every set is a stream of its own; methods start anew on each
    continual   one stream through all sets
    gradual     one stream; for each corruption the levels up and down again
    mixed       one stream of all images of all sets, in random order
    correlated  as reset, with the images of a set sorted so that neighbours share a class
    recurring   the continual stream, several times
    clean       the continual stream with pieces of the uncorrupted set between the others, to measure forgetting
    walk        one stream of images under two corruptions whose levels change one at a time

Nothing is reset within a stream. A `Protocol` together with the plan's sets and a seed determines every stream, so all
methods see the same images in the same order. stream_sets.py makes the streams, timing.py implements `rate`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from testtime.checks import (
    Kind,
    check_entries,
    format_value,
    is_integer,
    is_list_of,
    is_number,
    is_table,
    is_table_of,
    is_text,
)
from testtime.corruptions import CORRUPTIONS, SEVERITIES
from testtime.evaluation.descriptions import read_shift
from testtime.randomness import Draws

ProtocolName = Literal["reset", "continual", "gradual", "mixed", "correlated", "recurring", "clean", "walk"]

# The arguments of each protocol with their defaults; `batch` and `rate` are accepted by all.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "reset": {},
    "continual": {"order": 0, "concentration": None},
    "gradual": {"order": 0, "concentration": None},
    "mixed": {},
    "correlated": {"concentration": 0.1},
    "recurring": {"order": 0, "rounds": 10, "concentration": None},
    "clean": {"order": 0, "concentration": None},
    "walk": {"order": 0, "pace": 100},
}


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


_KINDS: dict[str, Kind] = {
    "order": ("an integer from 0 to 1,000,000", lambda value: is_integer(value, 0, 10**6)),
    "concentration": ("a positive number", _positive),
    "rounds": ("an integer from 1 to 1,000", lambda value: is_integer(value, 1, 1_000)),
    "pace": ("an integer from 1 to 1,000,000", lambda value: is_integer(value, 1, 10**6)),
    "batch": ("an integer from 1 to 100,000", lambda value: is_integer(value, 1, 100_000)),
    "rate": ("a positive number", _positive),
}


@dataclass(frozen=True)
class Protocol:
    """In what order, and in which calls, images are presented.

    Attributes:
        name: One of those above.
        order: The order of the sets, or of their corruptions: 0 as given, any other number a random permutation.
        concentration: Concentration of the Dirichlet distribution by which the images of each set are sorted; the
            smaller, the longer the runs of one class.
        rounds: How many times `recurring` visits all sets.
        pace: Images of `walk` per change of a level.
        batch: Images per call of a method; the last call of a stream may have fewer. None chooses by image size.
        rate: Images per second of the stream: a method that takes longer learns only from some of the calls, see
            timing.py. None waits for every method.
    """

    name: ProtocolName = "reset"
    order: int | None = None
    concentration: float | None = None
    rounds: int | None = None
    pace: int | None = None
    batch: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ProtocolName):
            known = ", ".join(get_args(ProtocolName))
            raise ValueError(f"`protocol` must be one of {known}, got {format_value(self.name)}.")
        own = _ARGUMENTS[self.name]
        for name, value in self.describe().items():
            if name not in ("name", "batch", "rate", *own):
                having = ", ".join(one for one, arguments in _ARGUMENTS.items() if name in arguments)
                raise ValueError(f"`{name}` is an argument of {having}, not of the protocol {self.name}.")
            if name != "name":
                check_entries({name: value}, _KINDS)
        for name, default in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    @property
    def is_default(self) -> bool:
        """Whether it is `reset` without arguments, which runs do not record."""
        return self == Protocol()

    @property
    def joins(self) -> bool:
        """Whether streams consist of several sets."""
        return self.name not in ("reset", "correlated")

    def describe(self) -> dict[str, Any]:
        """Return its name and arguments, JSON-serializable."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in held.items() if value is not None}

    def hash(self) -> str:
        """Return a hash of its name and arguments."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def permute(self, count: int) -> list[int]:
        """Return the order of `count` sets or corruptions."""
        if not self.order:
            return list(range(count))
        keys = Draws.of(self.order, torch.arange(count, device="cpu")).purpose("order of sets").keys
        return keys.argsort(stable=True).tolist()


def read_protocol(given: Any, study: Any = None) -> Protocol:
    """Return the protocol that a name or a table describes.

    Args:
        given: A name, a table such as `{name = "continual", order = 3}`, or None. A table without a name takes that of
            the study.
        study: The same of a study; arguments in `given` override those of the same protocol here.

    Raises:
        ValueError: The name or an argument is unknown or invalid.
    """
    ours, theirs = ({} if one is None else {"name": one} if is_text(one) else one for one in (given, study))
    for table in (ours, theirs):
        if not is_table(table):
            raise ValueError(f"`protocol` must be a name or a table, got {format_value(table)}.")
        for name in table:
            if name not in ("name", *_KINDS):
                raise ValueError(f"a protocol has no {format_value(name)}; available: name, {', '.join(_KINDS)}.")
    if "name" not in ours or ours["name"] == theirs.get("name", "reset"):
        ours = {**theirs, **ours}
    return Protocol(**ours)


class Segment(NamedTuple):
    """A part of a stream: images of one set.

    Attributes:
        source: Index of the set.
        start: Position of the first image in the set's own order.
        stop: Position after the last one; positions beyond the end of the set start over.
    """

    source: int
    start: int
    stop: int


def name_streams(protocol: Protocol, sets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the streams: of the sets, or e.g. `continual/cifar10/order-3`.

    Raises:
        ValueError: The sets do not suit the protocol.
    """
    if not protocol.joins:
        return tuple(sets)
    check_sets(protocol, sets)
    ending = f"/order-{protocol.order}" if protocol.order else ""
    bases = find_bases(sets)
    if protocol.name == "walk":
        return tuple(f"walk/{base}{ending}" for base in bases)
    more = f"+{len(bases) - 1}" if len(bases) > 1 else ""
    return (f"{protocol.name}/{next(iter(bases))}{more}{ending}",)


def find_bases(sets: Sequence[str]) -> dict[str, list[str]]:
    """Return the sets without corruption that sets belong to, e.g. `cifar10`, each with its corruptions for a walk.

    Any corruption can be computed for a folder.
    """
    found: dict[str, dict[str, None]] = {}
    for name in sets:
        family = name.split("/", 1)[0]
        corruption = read_shift(name)[0] if family.endswith("-c") else None
        own = CORRUPTIONS if family == "folder" else () if corruption is None else (corruption,)
        base = name if family == "folder" else family.removesuffix("-c")
        found.setdefault(base, {}).update(dict.fromkeys(own))
    return {base: list(corruptions) for base, corruptions in found.items()}


def check_sets(protocol: Protocol, sets: Sequence[str]) -> None:
    """Check that sets suit a protocol.

    Raises:
        ValueError: They do not.
    """
    plain = [name for name in sets if read_shift(name) == (None, None)]
    levelled = [name for name in sets if read_shift(name)[1] is not None]
    if protocol.name == "gradual" and len(levelled) < len(sets):
        other = next(name for name in sets if name not in levelled)
        raise ValueError(f"The protocol gradual needs sets with levels, such as cifar10-c, got {other}.")
    if protocol.name == "clean" and (len(plain) != 1 or len(plain) == len(sets)):
        raise ValueError(
            "The protocol clean needs one set without corruption and at least one with, such as cifar10-c, "
            f"got {len(plain)} and {len(sets) - len(plain)}."
        )
    if protocol.name == "walk":
        for base, corruptions in find_bases(sets).items():
            if len(corruptions) < 2:
                hint = "pass a corrupted set, such as cifar10-c"
                raise ValueError(f"A walk needs at least two corruptions: {base} has {len(corruptions)}; {hint}.")


def make_segments(protocol: Protocol, sets: Sequence[str], counts: Sequence[int]) -> list[Segment]:
    """Return the segments of a stream of several sets; none if they are mixed.

    Args:
        protocol: The protocol.
        sets: Names of the sets; of `walk`, its states in order.
        counts: Number of images that the run uses of each set.
    """
    whole = [Segment(number, 0, count) for number, count in enumerate(counts)]
    if protocol.name == "mixed":
        return []
    if protocol.name == "walk":
        images = [min(protocol.pace or 1, count) for count in counts]
        return [Segment(k, k * length, (k + 1) * length) for k, length in enumerate(images)]
    if protocol.name == "gradual":
        levels: dict[str, list[tuple[int, int]]] = {}
        for number, name in enumerate(sets):
            levels.setdefault(name.rpartition("/")[0], []).append((read_shift(name)[1] or 0, number))
        groups = [[whole[number] for _, number in sorted(group)] for group in levels.values()]
        return [one for k in protocol.permute(len(groups)) for one in groups[k] + groups[k][-2::-1]]
    if protocol.name == "clean":
        return _interleave(protocol, sets, whole)
    return [whole[k] for k in protocol.permute(len(whole))] * (protocol.rounds or 1)


def _interleave(protocol: Protocol, sets: Sequence[str], whole: Sequence[Segment]) -> list[Segment]:
    """Return the corrupted sets with pieces of the uncorrupted one before, between and after them."""
    clean = next(number for number, name in enumerate(sets) if read_shift(name) == (None, None))
    shifted = [one for one in whole if one.source != clean]
    bounds = np.linspace(0, whole[clean].stop, len(shifted) + 2).round().astype(int).tolist()
    pieces = [Segment(clean, start, stop) for start, stop in itertools.pairwise(bounds)]
    found = pieces[:1]
    for piece, k in zip(pieces[1:], protocol.permute(len(shifted)), strict=True):
        found += [shifted[k], piece]
    return found


def make_walk(protocol: Protocol, corruptions: Sequence[str]) -> list[dict[str, int]]:
    """Return the states of a walk: the levels of one or two corruptions, of which one changes by one at a time.

    Each pair of neighbours a, b in the order of corruptions goes through the levels 5, 0 → 5, 5 → 0, 5.
    """
    names, top = [corruptions[k] for k in protocol.permute(len(corruptions))], SEVERITIES[-1]
    states = [{names[0]: top}]
    for one, other in itertools.pairwise(names):
        states += [{one: top, other: level} for level in SEVERITIES]
        states += [{one: level, other: top} for level in SEVERITIES[-2::-1]] + [{other: top}]
    return states


@dataclass(frozen=True)
class Layout:
    """The sets and segments of a stream, as a run records them.

    Sample numbers of a stream count through its sets, one after another, and start over for each further visit of an
    image: with P images in all sets, sample n is the image n mod P, visited for the (n div P + 1)-th time.

    Attributes:
        sets: Number of images of each set, by name, in order.
        segments: Set and number of images of each segment, in order; empty if the sets are mixed.
    """

    sets: Mapping[str, int]
    segments: tuple[tuple[str, int], ...]

    def describe(self) -> dict[str, Any]:
        """Return it as JSON-serializable tables, for `read_layout`."""
        return {"sets": dict(self.sets), "segments": [list(segment) for segment in self.segments]}

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the index of the set, the image's index in it, and the number of earlier visits of each sample.

        Args:
            samples: Sample numbers of the stream, `(N,)`.
        """
        ends = np.cumsum(list(self.sets.values()))
        visits, rest = np.divmod(samples.astype(np.int64), ends[-1])
        source = np.searchsorted(ends, rest, side="right")
        return source, rest - np.concatenate([[0], ends])[source], visits

    def segment_of(self) -> np.ndarray:
        """Return the index of the segment at each position of the stream, `(N,)`; empty if the sets are mixed."""
        return np.repeat(np.arange(len(self.segments)), [count for _, count in self.segments])


def read_layout(configuration: Mapping[str, Any], stream: str) -> Layout | None:
    """Return the layout of a stream from a run's configuration; None for a stream of a single set.

    Raises:
        ValueError: The configuration is malformed.
    """
    held = configuration.get("streams", {})
    if not is_table(held) or stream not in held:
        return None
    table = held[stream]

    def is_segment(value: Any) -> bool:
        pair = isinstance(value, list) and len(value) == 2 and is_text(value[0])
        return pair and value[0] in table["sets"] and is_integer(value[1], 0)

    if not is_table(table):
        raise ValueError(f"`streams` must be tables, got {format_value(table)}.")
    counts: Kind = ("numbers of images", is_table_of(lambda value: is_integer(value, 0)))
    check_entries(table, {"sets": counts}, ["sets", "segments"])
    check_entries(table, {"segments": ("pairs of a set and a number", is_list_of(is_segment))})
    return Layout(table["sets"], tuple((name, count) for name, count in table["segments"]))
