"""Which units of which runs belong together, and whether they may: the same data, the same meaning of each method."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from testtime.adaptation.settings import Settings
from testtime.evaluation import Run, Unit
from testtime.evaluation.records import stream_order
from testtime.provenance import find_differences
from testtime.storage import FileError

_LARGEST = 1 << 25  # images of a set; the order of more would take gigabytes


class ResultsError(FileError):
    """A run, or a file of results, that no report can be made of."""


@dataclass(frozen=True)
class RunUnit:
    """A unit and the run it comes from."""

    run: Run
    unit: Unit


@dataclass(frozen=True)
class SetVerdicts:
    """What became of the images of a set under one method.

    Attributes:
        samples: `(N,)`, rising.
        labels: `(N,)`.
        right: float64 `(R, N)`, a row for each repetition.
        seconds: `(R,)`.
    """

    samples: np.ndarray
    labels: np.ndarray
    right: np.ndarray
    seconds: tuple[float, ...]

    @property
    def share(self) -> np.ndarray:
        return self.right.mean(0)


RunUnits = dict[tuple[str, str], tuple[RunUnit, ...]]


def sort_units(runs: Sequence[Run]) -> tuple[RunUnits, list[str]]:
    """The labelled units of runs by method and set, and what a reader should know of what was left out.

    Raises:
        ResultsError: There is nothing to report, or the runs do not belong together.
    """
    notes: list[str] = []
    if not runs:
        raise ValueError("`runs` must not be empty.")
    paths: set[Path] = set()
    for run in runs:
        if run.path.resolve() in paths:
            raise ResultsError(run.path, "was given twice")
        paths.add(run.path.resolve())
        if not run.units:
            raise ResultsError(run.path, "holds no finished unit yet")
        if run.damaged:
            notes.append(f"{run.path.name}: {_count(len(run.damaged), 'damaged file')} left out.")
    for first, other in itertools.combinations(runs, 2):
        _check_same_kind(first, other)
    summaries = [run for run in runs if any(unit.held is not None for unit in run.units)]
    if summaries:
        windows = "" if all("shuffle" in run.configuration for run in summaries) else ", such as sliding windows,"
        notes.append(f"From a summary of runs: what needs every record{windows} is left out.")
    found: dict[tuple[str, str], list[RunUnit]] = {}
    unlabelled: set[str] = set()
    twice: dict[tuple[str, str], int] = {}
    for run in runs:
        for unit in run.units:
            if unit.about.get("counts", {}).get("labelled") == 0:
                unlabelled.add(unit.set_name)
                continue
            entries, here = found.setdefault((unit.method, unit.set_name), []), RunUnit(run, unit)
            twin = next((other for other in entries if _is_same(other, here)), None)
            if twin is None:
                entries.append(here)
            else:
                names = twin.run.path.name, run.path.name
                twice[names] = twice.get(names, 0) + 1
    notes += [
        f"{_count(count, 'unit')} of {second} stood in {first} already, of the same network and seed: counted once."
        for (first, second), count in twice.items()
    ]
    notes += [f"{name} has no labels, so there is no error to show." for name in sorted(unlabelled)]
    if not found:
        raise ResultsError(runs[0].path, "has no labelled set, so there is no error to report")
    return {key: tuple(entries) for key, entries in found.items()}, notes


def _is_same(one: RunUnit, two: RunUnit) -> bool:
    """Whether two units are the same measurement, or would be but for the clock, and not repetitions of each other."""
    if one.unit != two.unit:
        return False
    marks = [_network_mark(source) for source in (one, two)]
    if None not in marks:
        return marks[0] == marks[1]
    return all(one.unit.about.get(key) == two.unit.about.get(key) for key in ("seconds", "counts", "device"))


def _network_mark(source: RunUnit) -> str | None:
    """The fingerprint of the network that a unit used, where its run says so."""
    plan, unit = source.run.configuration, source.unit
    try:
        mark = plan["networks"][plan["methods"][unit.method]["network"]]["fingerprint"]
        return mark if isinstance(mark, str) else str(mark[unit.set_name])
    except (KeyError, TypeError):
        return None


def _check_same_kind(first: Run, other: Run) -> None:
    norms = [", ".join(sorted(find_norms([run]))) for run in (first, other)]
    if norms[0] != norms[1]:
        fault = f"has networks of normalization {norms[1] or 'unknown'}, where {first.path} has {norms[0] or 'unknown'}"
        raise ResultsError(other.path, fault, "report them apart")
    for name in sorted(fingerprints(first).keys() & fingerprints(other).keys()):
        if fingerprints(first)[name] != fingerprints(other)[name]:
            raise ResultsError(other.path, f"is of different data: {name} is not the same as in {first.path}")
    ours, theirs = (run.configuration.get("methods") for run in (first, other))
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return
    for method in sorted(ours.keys() & theirs.keys()):
        different = compare_methods({method: ours[method]}, {method: theirs[method]})
        if different:
            fault = f"means something else by {method} than {first.path} ({different[0]})"
            raise ResultsError(other.path, fault, "report them apart")


def compare_methods(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where the methods of two runs differ; a setting that only one of them knows had its default in the other.

    Args:
        ours: Mode, network and settings by method, as a run's configuration has them.
        theirs: Those of the other run, under the same names.
    """
    usual = {field.name: field.default for field in fields(Settings)}

    def complete(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        held = dict(one)
        if isinstance(one.get("settings"), Mapping) and isinstance(other.get("settings"), Mapping):
            known = {name: usual[name] for name in other["settings"] if name in usual}
            held["settings"] = {**known, **one["settings"]}
        return held

    pairs = {name: (complete(ours[name], theirs[name]), complete(theirs[name], ours[name])) for name in ours}
    return find_differences(*({name: pair[place] for name, pair in pairs.items()} for place in (0, 1)))


def stream_of(source: RunUnit) -> np.ndarray | None:
    """The numbers of a unit's images in the order of its stream, `(N,)`; None where that is not known.

    A summary leaves the order out. Its run says whether it was shuffled, though, and the shuffled order is a function
    of the seed: any of the numbers stand in it as they do in the order of all.
    """
    unit, shuffled = source.unit, source.run.configuration.get("shuffle")
    if unit.held is None:
        return unit.columns()["sample"]
    samples = unit.held.samples
    if shuffled is False or (unit.corruption is not None and unit.level is None):  # a gradual set is its own order
        return samples
    if shuffled is None or samples[-1] >= _LARGEST:
        return None
    order = stream_order(int(samples[-1]) + 1, unit.seed).numpy()
    return order[np.isin(order, samples)]


def fingerprints(run: Run) -> dict[str, str]:
    """The fingerprints of a run's sets by name, of those that it knows."""
    sets = run.configuration.get("sets")
    return {name: str(mark) for name, mark in sets.items()} if isinstance(sets, Mapping) else {}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def read_verdicts(key: tuple[str, str], sources: Sequence[RunUnit]) -> SetVerdicts:
    """The verdicts of one method on one set, a row for each repetition.

    Raises:
        ResultsError: There are no images, or the repetitions are of different ones.
    """
    samples = labels = None
    right: list[np.ndarray] = []
    for source in sources:
        found = source.unit.verdicts()
        if len(found.samples) == 0:
            raise ResultsError(source.run.path, f"holds no image of {key[1]} under {key[0]}")
        if samples is not None and labels is not None:
            _check_same(key[1], (samples, labels), (found.samples, found.labels), sources[0], source)
        samples, labels = found.samples, found.labels
        right.append(found.right.astype(np.float64))
    assert samples is not None
    assert labels is not None
    return SetVerdicts(samples, labels, np.stack(right), tuple(source.unit.seconds for source in sources))


def check_images(verdicts: Mapping[tuple[str, str], SetVerdicts], sources: RunUnits) -> None:
    """Check that all methods saw the same images of each set.

    Raises:
        ResultsError: They did not.
    """
    first: dict[str, tuple[str, str]] = {}
    for key, found in verdicts.items():
        other = first.setdefault(key[1], key)
        known = verdicts[other]
        _check_same(
            key[1], (known.samples, known.labels), (found.samples, found.labels), sources[other][0], sources[key][0]
        )


def _check_same(
    name: str, one: Sequence[np.ndarray], two: Sequence[np.ndarray], first: RunUnit, second: RunUnit
) -> None:
    if len(one[0]) != len(two[0]):
        fault = f"{len(two[0]):,} and {len(one[0]):,} images"
    elif not np.array_equal(one[0], two[0]):
        fault = "different images"
    elif not np.array_equal(one[1], two[1]):
        fault = "different labels"
    else:
        return
    here, there = f"here ({second.unit.method})", f"in {first.run.path} ({first.unit.method})"
    raise ResultsError(second.run.path, f"is of different data: of {name} there are {fault} {here} and {there}")


def find_norms(runs: Sequence[Run]) -> set[str]:
    """The kinds of normalization that the configurations of runs mention."""

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                if key == "norm" and isinstance(entry, str):
                    yield entry
                yield from walk(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from walk(entry)

    return {norm for run in runs for norm in walk(run.configuration)}
