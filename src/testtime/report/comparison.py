"""Comparing methods under protocols: error, forgetting, calibration, flips, collapses, cost and ranks.

`compare_runs` groups runs by protocol. Runs that differ only in the order of their sets, the seed or the network are
repetitions. All numbers are of the predictions after the update, unless they say "before".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np

from testtime.evaluation import Run
from testtime.evaluation.protocols import Protocol, ProtocolName, read_layout, read_protocol
from testtime.evaluation.summary import read_details
from testtime.report.results import BASELINE, order_methods
from testtime.report.scores import Repetition, Score, StreamUnit, find_shifted, score_method
from testtime.report.sources import ResultsError, check_methods, check_norms, check_runs, check_sets
from testtime.report.statistics import rank


class StreamCurves(NamedTuple):
    """The error along one stream of several sets.

    Attributes:
        name: Name of the stream.
        seen: Number of images up to the end of each block, `(P,)`.
        percent: The error of each block by method, `(P,)`, averaged over repetitions.
        segments: Set and number of images of each segment; empty if the sets are mixed.
    """

    name: str
    seen: np.ndarray
    percent: Mapping[str, np.ndarray]
    segments: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ProtocolResults:
    """The methods under one protocol.

    Attributes:
        protocol: The protocol, without an order.
        runs: Its runs.
        scores: The scores by method.
        curves: The error along each stream of several sets.
    """

    protocol: Protocol
    runs: tuple[Run, ...]
    scores: Mapping[str, Score]
    curves: tuple[StreamCurves, ...]

    @property
    def title(self) -> str:
        """Name and arguments of the protocol."""
        arguments = {key: value for key, value in self.protocol.describe().items() if key not in ("name", "order")}
        return ", ".join([self.protocol.name, *(f"{key} {value}" for key, value in arguments.items())])

    @property
    def repetitions(self) -> list[Repetition]:
        """The repetitions that all methods have."""
        return sorted(set.intersection(*(set(score.errors) for score in self.scores.values())))

    def rank_in(self, method: str, repetition: Repetition) -> float:
        """Return the rank of a method in a repetition that all methods have."""
        errors = [score.errors[repetition] for score in self.scores.values()]
        return rank(errors)[list(self.scores).index(method)]

    def swaps(self, one: str, other: str) -> tuple[int, int]:
        """Return in how many repetitions two methods are in another order than on average, and of how many."""
        ours, theirs = self.scores[one].errors, self.scores[other].errors
        gaps = [ours[key] - theirs[key] for key in sorted(ours.keys() & theirs.keys())]
        mean = sum(gaps)
        return sum(gap * mean < 0 for gap in gaps), len(gaps)


@dataclass(frozen=True)
class Comparison:
    """Methods × protocols.

    Attributes:
        runs: The runs.
        protocols: The results of each protocol.
        notes: Notes for the reader, on what was omitted and why.
    """

    runs: tuple[Run, ...]
    protocols: tuple[ProtocolResults, ...]
    notes: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods, in the paper's order, then others."""
        return order_methods({method for one in self.protocols for method in one.scores})


def has_protocol(run: Run) -> bool:
    """Whether a run has a protocol other than the default, `reset` without arguments."""
    return "protocol" in run.configuration


def compare_runs(runs: Sequence[Run], seed: int = 0) -> Comparison:
    """Compare the methods of runs under their protocols.

    Args:
        runs: Runs with one kind of network.
        seed: Seed of the bootstrap.

    Raises:
        ResultsError: There is nothing to report, or the runs cannot be combined.
    """
    notes = check_runs(runs)
    for first, other in itertools.combinations(runs, 2):
        check_norms(first, other)
        check_methods(first, other)
    groups: dict[Protocol, list[tuple[Protocol, Run]]] = {}
    for run in runs:
        found = _read_protocol(run)
        groups.setdefault(_drop_order(found), []).append((found, run))
    known = get_args(ProtocolName)
    ordered = sorted(groups.items(), key=lambda entry: known.index(entry[0].name))
    results = [_measure(protocol, members, seed, notes) for protocol, members in ordered]
    kept = tuple(one for one in results if one is not None)
    if not kept:
        raise ResultsError(runs[0].path, "has no labelled set, hence no error to report")
    return Comparison(tuple(runs), kept, tuple(dict.fromkeys(notes)))


def _read_protocol(run: Run) -> Protocol:
    table = run.configuration.get("protocol", {})
    try:
        return read_protocol({key: value for key, value in table.items() if key != "hash"})
    except ValueError as error:
        raise ResultsError(run.path, f"has an unknown protocol ({str(error).removesuffix('.')})") from None


def _drop_order(protocol: Protocol) -> Protocol:
    return replace(protocol, order=0) if protocol.order is not None else protocol


def _measure(
    protocol: Protocol, members: Sequence[tuple[Protocol, Run]], seed: int, notes: list[str]
) -> ProtocolResults | None:
    """Return the results of one protocol; None if no set has labels. Adds to `notes`."""
    for (one, first), (two, other) in itertools.combinations(members, 2):
        if one == two:
            check_sets(first, other)
        if first.configuration.get("limit") != other.configuration.get("limit"):
            raise ResultsError(other.path, f"has another limit than {first.path}", "report them separately")
    units = _drop_unfinished(_find_units(members, notes), protocol, notes)
    if not units:
        return None
    is_shifted = find_shifted(units)
    methods = order_methods({one.unit.method for one in units})
    fixed = {(one.unit.set_name, one.repetition): one.verdicts for one in units if one.unit.method == BASELINE}
    scores = {
        method: score_method([one for one in units if one.unit.method == method], is_shifted, fixed, seed)
        for method in methods
    }
    runs = tuple(run for _, run in members)
    return _add_ranks(ProtocolResults(protocol, runs, scores, _find_curves(units, methods)))


def _find_units(members: Sequence[tuple[Protocol, Run]], notes: list[str]) -> list[StreamUnit]:
    """Return the labelled units of runs, each measurement once. Adds to `notes`."""
    networks: dict[str, list[str]] = {}
    found: dict[tuple[str, str, Repetition], StreamUnit] = {}
    for protocol, run in members:
        for unit in run.units:
            if unit.about["counts"]["labelled"] == 0:
                notes.append(f"{unit.set_name} has no labels, hence no error.")
                continue
            role, fingerprint = _find_network(run, unit.method)
            seen = networks.setdefault(role, [])
            if fingerprint not in seen:
                seen.append(fingerprint)
            key = Repetition(protocol.order or 0, unit.seed, seen.index(fingerprint))
            if (unit.method, unit.set_name, key) in found:
                notes.append(f"{run.path.name} repeats units of other runs with the same seed: counted once.")
                continue
            try:
                layout = read_layout(run.configuration, unit.set_name)
            except ValueError as error:
                raise ResultsError(run.path, str(error).removesuffix(".")) from None
            details = read_details(run, unit)
            found[unit.method, unit.set_name, key] = StreamUnit(run, unit, key, unit.verdicts(), layout, details)
    return list(found.values())


def _drop_unfinished(units: Sequence[StreamUnit], protocol: Protocol, notes: list[str]) -> list[StreamUnit]:
    """Return the units of complete repetitions: methods are compared on the same streams. Adds to `notes`."""
    due: dict[int, set[str]] = {}
    found: dict[tuple[str, Repetition], set[str]] = {}
    for one in units:
        due.setdefault(one.repetition.order, set()).add(one.unit.set_name)
        found.setdefault((one.unit.method, one.repetition), set()).add(one.unit.set_name)
    complete = {key for key, names in found.items() if names == due[key[1].order]}
    notes += [
        f"{protocol.name}: {method} has not finished all streams; repetitions without them are omitted."
        for method in sorted({method for method, _ in found.keys() - complete})
    ]
    return [one for one in units if (one.unit.method, one.repetition) in complete]


def _find_network(run: Run, method: str) -> tuple[str, str]:
    """Return the name of a method's network and its fingerprint, empty if not recorded."""
    plan = run.configuration
    name = plan.get("methods", {}).get(method, {}).get("network", "")
    network = plan.get("networks", {}).get(name, {}) if isinstance(name, str) else {}
    return str(name), json.dumps(network.get("fingerprint", ""), sort_keys=True)


def _find_curves(units: Sequence[StreamUnit], methods: Sequence[str]) -> tuple[StreamCurves, ...]:
    """Return the error along each stream of several sets."""
    curves: list[StreamCurves] = []
    streams = {one.unit.set_name: one.layout for one in units if one.layout is not None}
    for name, layout in streams.items():
        percent: dict[str, np.ndarray] = {}
        seen = np.array([], int)
        for method in methods:
            own = [one for one in units if (one.unit.method, one.unit.set_name) == (method, name)]
            blocks = [one.details.get("blocks") for one in own]
            held = [(block["size"], tuple(block["right"])) for block in blocks if block is not None]
            if not held or len({(size, len(right)) for size, right in held}) > 1:
                continue
            count, size = own[0].unit.about["counts"]["images"], held[0][0]
            seen = np.minimum(np.arange(1, len(held[0][1]) + 1) * size, count)
            share = np.mean([right for _, right in held], 0) / np.diff(seen, prepend=0)
            percent[method] = 100 * (1 - share)
        if percent:
            curves.append(StreamCurves(name, seen, percent, layout.segments))
    return tuple(sorted(curves, key=lambda one: one.name))


def _add_ranks(results: ProtocolResults) -> ProtocolResults:
    """Add mean ranks over the repetitions that all methods have."""
    keys = results.repetitions
    if not keys or len(results.scores) < 2:
        return results
    scores = {
        method: replace(score, rank=float(np.mean([results.rank_in(method, key) for key in keys])))
        for method, score in results.scores.items()
    }
    return replace(results, scores=scores)
