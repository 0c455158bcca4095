"""Grouping the units of runs, and checking that runs can be combined: same data, same methods."""

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

_LARGEST = 1 << 25  # maximum sample index for which to recompute the order


class ResultsError(FileError):
    """A run or a result file that cannot be reported."""


@dataclass(frozen=True)
class RunUnit:
    """A unit and the run it comes from."""

    run: Run
    unit: Unit


@dataclass(frozen=True)
class SetVerdicts:
    """Which predictions of one method on a set are right.

    Attributes:
        samples: Sample indices in ascending order, `(N,)`.
        labels: Class labels, `(N,)`.
        right: Whether the predictions are right, float64 `(R, N)`, one row per repetition.
        seconds: Seconds of each repetition, length R.
    """

    samples: np.ndarray
    labels: np.ndarray
    right: np.ndarray
    seconds: tuple[float, ...]

    @property
    def share(self) -> np.ndarray:
        return self.right.mean(0)


RunUnits = dict[tuple[str, str], tuple[RunUnit, ...]]


def check_runs(runs: Sequence[Run]) -> list[str]:
    """Check that each run was given once and has finished units; returns notes on damaged files.

    Raises:
        ResultsError: A run cannot be reported.
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
            raise ResultsError(run.path, "contains no finished unit yet")
        if run.damaged:
            notes.append(f"{run.path.name}: {_count(len(run.damaged), 'damaged file')} omitted.")
    return notes


def sort_units(runs: Sequence[Run]) -> tuple[RunUnits, list[str]]:
    """Return the labelled units of runs by method and set, and notes on what was omitted.

    Raises:
        ResultsError: There is nothing to report, or the runs cannot be combined.
    """
    notes = check_runs(runs)
    for run in runs:
        if "protocol" in run.configuration:
            held = run.configuration["protocol"]
            arguments = [f"{name} {value}" for name, value in held.items() if name not in ("name", "hash")]
            title = ", ".join([str(held.get("name")), *arguments])
            fault = f"has the protocol {title} instead of reset without arguments"
            remedy = "run `testtime eval` again without --protocol and --batch, or compare it with `testtime report`"
            raise ResultsError(run.path, fault, remedy)
    for first, other in itertools.combinations(runs, 2):
        check_norms(first, other)
        check_sets(first, other)
        check_methods(first, other)
    summaries = [run for run in runs if any(unit.held is not None for unit in run.units)]
    if summaries:
        windows = "" if all("shuffle" in run.configuration for run in summaries) else ", e.g. sliding windows,"
        notes.append(f"From a summary of runs: whatever needs all records{windows} is omitted.")
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
        f"{_count(count, 'unit')} of {second} with the same network and seed as in {first}: counted once."
        for (first, second), count in twice.items()
    ]
    notes += [f"{name} has no labels, hence no error." for name in sorted(unlabelled)]
    if not found:
        raise ResultsError(runs[0].path, "has no labelled set, hence no error to report")
    return {key: tuple(entries) for key, entries in found.items()}, notes


def _is_same(one: RunUnit, two: RunUnit) -> bool:
    """Whether two units are the same measurement, up to its time, rather than repetitions."""
    if one.unit != two.unit:
        return False
    networks = [_find_fingerprint(source) for source in (one, two)]
    if None not in networks:
        return networks[0] == networks[1]
    return all(one.unit.about.get(key) == two.unit.about.get(key) for key in ("seconds", "counts", "device"))


def _find_fingerprint(source: RunUnit) -> str | None:
    """Return the fingerprint of a unit's network, if recorded."""
    plan, unit = source.run.configuration, source.unit
    try:
        found = plan["networks"][plan["methods"][unit.method]["network"]]["fingerprint"]
        return found if isinstance(found, str) else str(found[unit.set_name])
    except (KeyError, TypeError):
        return None


def check_norms(first: Run, other: Run) -> None:
    """Check that the networks of two runs have the same normalization.

    Raises:
        ResultsError: They do not.
    """
    norms = [", ".join(sorted(find_norms([run]))) for run in (first, other)]
    if norms[0] != norms[1]:
        fault = f"has networks with normalization {norms[1] or 'unknown'}, {first.path} has {norms[0] or 'unknown'}"
        raise ResultsError(other.path, fault, "report them separately")


def check_sets(first: Run, other: Run) -> None:
    """Check that the sets that two runs share have the same content.

    Raises:
        ResultsError: They do not.
    """
    for name in sorted(fingerprints(first).keys() & fingerprints(other).keys()):
        if fingerprints(first)[name] != fingerprints(other)[name]:
            raise ResultsError(other.path, f"has different data: {name} is not the same as in {first.path}")


def check_methods(first: Run, other: Run) -> None:
    """Check that the methods that two runs share have the same settings.

    Raises:
        ResultsError: They do not.
    """
    ours, theirs = (run.configuration.get("methods") for run in (first, other))
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return
    for method in sorted(ours.keys() & theirs.keys()):
        different = compare_methods({method: ours[method]}, {method: theirs[method]})
        if different:
            fault = f"has another {method} than {first.path} ({different[0]})"
            raise ResultsError(other.path, fault, "report them separately")


def compare_methods(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differences between the methods of two runs; settings missing in one are taken as defaults.

    Args:
        ours: Mode, network and settings by method, as in a run's configuration.
        theirs: The same for the other run.
    """
    # Records without a precision are of version 0.1, whose default was fp32.
    usual = {field.name: field.default for field in fields(Settings)} | {"precision": "fp32"}

    def complete(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        held = dict(one)
        if isinstance(one.get("settings"), Mapping) and isinstance(other.get("settings"), Mapping):
            known = {name: usual[name] for name in other["settings"] if name in usual}
            held["settings"] = {**known, **one["settings"]}
        return held

    pairs = {name: (complete(ours[name], theirs[name]), complete(theirs[name], ours[name])) for name in ours}
    return find_differences(*({name: pair[side] for name, pair in pairs.items()} for side in (0, 1)))


def stream_of(source: RunUnit) -> np.ndarray | None:
    """Return the sample indices of a unit in the order of its stream, `(N,)`, or None if not known.

    A summary does not store the order, but it records whether the run was shuffled, and the order is a function of the
    seed; a subset of the samples has the same relative order.
    """
    unit, shuffled = source.unit, source.run.configuration.get("shuffle")
    if unit.held is None:
        return unit.columns()["sample"]
    samples = unit.held.samples
    if shuffled is False or (unit.corruption is not None and unit.level is None):  # the order of a gradual set is fixed
        return samples
    if shuffled is None or samples[-1] >= _LARGEST:
        return None
    order = stream_order(int(samples[-1]) + 1, unit.seed).numpy()
    return order[np.isin(order, samples)]


def fingerprints(run: Run) -> dict[str, str]:
    """Return the recorded fingerprints of a run's sets by name."""
    sets = run.configuration.get("sets")
    return {name: str(value) for name, value in sets.items()} if isinstance(sets, Mapping) else {}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def read_verdicts(key: tuple[str, str], sources: Sequence[RunUnit]) -> SetVerdicts:
    """Read the verdicts of one method on one set, one row per repetition.

    Raises:
        ResultsError: There are no images, or the repetitions have different ones.
    """
    samples = labels = None
    right: list[np.ndarray] = []
    for source in sources:
        found = source.unit.verdicts()
        if len(found.samples) == 0:
            raise ResultsError(source.run.path, f"contains no images of {key[1]} for {key[0]}")
        if samples is not None and labels is not None:
            _check_same(key[1], (samples, labels), (found.samples, found.labels), sources[0], source)
        samples, labels = found.samples, found.labels
        right.append(found.right.astype(np.float64))
    assert samples is not None
    assert labels is not None
    return SetVerdicts(samples, labels, np.stack(right), tuple(source.unit.seconds for source in sources))


def check_images(verdicts: Mapping[tuple[str, str], SetVerdicts], sources: RunUnits) -> None:
    """Check that all methods were run on the same images of each set.

    Raises:
        ResultsError: They were not.
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
    raise ResultsError(second.run.path, f"has different data: {name} has {fault} {here} and {there}")


def find_norms(runs: Sequence[Run]) -> set[str]:
    """Return the kinds of normalization in the configurations of runs."""

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
