"""The committed result files, read and compared."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from testtime.evaluation import Run, open_runs
from testtime.evaluation.units import Verdicts
from testtime.report.results import Results, Table, collect
from testtime.report.sources import ResultsError, compare_methods, read_verdicts
from testtime.report.statistics import Interval, bootstrap_means, interval_of
from testtime.storage import read_json

from .documents import link, table

ROOT = Path(__file__).resolve().parents[2]
CIFAR, PICTURES = Path("results/cifar10"), Path("results/imagenette")
SEEDS, EARLIER = ("joint-1", "joint-2"), tuple(f"seed-{seed}" for seed in range(6))
"""The networks of the paper's recipe with further seeds, and those of version 0.1, trained in bfloat16."""
ROBUST = ("robust-levels", "robust-1", "robust-2")
"""The bundled robust network, and those with further seeds."""
CONTROL = "fixed-mirrored"
"""The control of `mirrored` and `best`, which learns nothing; not one of the methods of the main tables."""
PAST = {
    "joint": ("past-joint", "levels"),
    "robust": ("past-robust", "robust-levels"),
    "robust, width 2": ("past-robust-x2", "robust-x2-level-5"),
}
"""Networks, the file of the study `best` with each, and one with `fixed` and `online`."""
PARTS = ("without-original", "without-both", "mirrored")
"""What `best` is made of; in files that end in -parts."""


def in_cifar(*names: str) -> tuple[Path, ...]:
    """Result files of CIFAR-10 by name."""
    return tuple(CIFAR / f"{name}.json" for name in names)


MAIN = in_cifar(
    *("levels", "standard-level-5", "standard-levels-1-4", "baseline", "uda", "alp"),
    *("past-joint-parts", "best-levels", "past-joint"),
)
"""The files of the main tables."""


@functools.cache
def read_file(file: Path) -> Any:
    """The content of a JSON file of the repository."""
    return read_json(ROOT / file)


@functools.cache
def read_runs(file: Path) -> tuple[Run, ...]:
    """The runs of a summary."""
    return tuple(open_runs(ROOT / file))


@functools.cache
def read_results(*names: str, folder: Path = CIFAR, main: tuple[str, ...] = ()) -> Results:
    """The tables of some files, and of some methods of the main files on the same images."""
    own = [run for name in names for run in read_runs(folder / f"{name}.json")]
    files = in_cifar("levels", "standard-level-5") if main else ()
    others = [restrict(run, own, main) for file in files for run in read_runs(file)]
    return collect([*(run for run in others if run.units), *own])


@functools.cache
def read_main() -> Results:
    """The tables of `MAIN`."""
    return collect([without((CONTROL, *PARTS[:2]), run) for file in MAIN for run in read_runs(file)])


def find_past(folder: Path = CIFAR) -> dict[str, tuple[Path, ...]]:
    """The files of `PAST` by network, as far as they exist: of level 5, of level 1, and those with the parts.

    Args:
        folder: The folder of the results of the study `best`.
    """
    found = {}
    for name, (own, main) in PAST.items():
        files = [folder / f"{own}{suffix}.json" for suffix in ("", "-mild", "-parts", "-mild-parts")]
        if (ROOT / files[0]).exists():
            found[name] = (*(file for file in files if (ROOT / file).exists()), CIFAR / f"{main}.json")
    return found


@functools.cache
def read_past(folder: Path = CIFAR) -> dict[str, tuple[Results, Results]]:
    """The results of the study `best`, and those of `fixed` and `online`, by network; see `find_past`."""
    found = {}
    for name, (*files, main) in find_past(folder).items():
        own = [run for file in files if not file.stem.endswith("-parts") for run in read_runs(file)]
        parts = [run for file in files if file.stem.endswith("-parts") for run in read_runs(file)]
        found[name] = collect([*own, *(restrict(run, own, PARTS) for run in parts)]), collect(read_runs(main))
    return found


def without(left: Sequence[str], run: Run) -> Run:
    """A run without some of its methods."""
    methods = {name: held for name, held in run.configuration["methods"].items() if name not in left}
    units = [unit for unit in run.units if unit.method not in left]
    return replace(run, units=units, configuration={**run.configuration, "methods": methods})


def restrict(run: Run, others: Sequence[Run], methods: Sequence[str]) -> Run:
    """Some methods of a run on the sets and the images that other runs have."""
    seen = {unit.set_name: unit.verdicts().samples for other in others for unit in other.units}
    units = []
    for unit in run.units:
        if unit.method in methods and unit.set_name in seen:
            held = unit.verdicts()
            shared = np.isin(held.samples, seen[unit.set_name])
            units.append(replace(unit, held=Verdicts(*(column[shared] for column in held))))
    return replace(run, units=units)


def by_level(results: Results) -> dict[int, Table]:
    """The tables of corrupted sets by level, the lowest first."""
    return {one.level: one for one in sorted(results.tables, key=lambda one: one.level or 0) if one.level is not None}


def compare(results: Results, one: str, two: str, names: Sequence[str]) -> tuple[float, Interval]:
    """By how many points one method's error is above another's on the same images, mean over some sets.

    Returns:
        The difference, and its 95% interval over images, which are resampled together for all sets.

    Raises:
        ResultsError: The sets are of different images.
    """
    gaps, samples = [], None
    for name in names:
        first, second = (read_verdicts((method, name), results.sources[method, name]) for method in (one, two))
        if samples is not None and not np.array_equal(samples, first.samples):
            raise ResultsError(results.runs[0].path, f"{name} has other images than {names[0]}")
        samples = first.samples
        gaps.append(100 * (second.share - first.share))
    gap = np.mean(gaps, axis=0)
    return float(gap.mean()), interval_of(bootstrap_means(gap[:, None])[:, 0])


def find_methods(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """Mode, network and settings of every method, as the runs have them."""
    return {name: held for run in runs for name, held in run.configuration["methods"].items()}


def is_same_method(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two methods are the same but for the arithmetic and the name of the network."""
    held = [{"mode": each["mode"], "settings": dict(each["settings"]) | {"precision": "any"}} for each in (one, two)]
    return not compare_methods({"one": held[0]}, {"one": held[1]})


def count_images(runs: Sequence[Run]) -> dict[str, int]:
    """The images of each method, over all its units."""
    counts: dict[str, int] = {}
    for unit in (unit for run in runs for unit in run.units):
        counts[unit.method] = counts.get(unit.method, 0) + unit.about["counts"]["images"]
    return counts


def time_methods(runs: Sequence[Run], like: Sequence[Run] = ()) -> dict[str, float]:
    """The seconds that an image takes each method.

    Args:
        runs: Runs that were made for their times.
        like: Runs whose methods of the same names must have the same settings.

    Raises:
        ResultsError: Another method of the same name was timed.
    """
    known, wanted = find_methods(runs), find_methods(like)
    for method in known.keys() & wanted.keys():
        if not is_same_method(known[method], wanted[method]):
            raise ResultsError(runs[0].path, f"its {method} has other settings than that of the results")
    units = [unit for run in runs for unit in run.units]
    return {
        method: sum(unit.seconds for unit in units if unit.method == method) / count
        for method, count in count_images(runs).items()
    }


def format_sources(*files: Path) -> str:
    """Where numbers come from: file, number of sets and images, seeds, hardware and command."""
    rows = [[link(file), *cells] for file in files for cells in _describe(file)]
    return table(["file", "sets", "images of each", "seeds", "hardware", "command"], rows, words=(0, 4, 5))


def _describe(file: Path) -> list[list[str]]:
    held = read_file(file)
    if "runs" not in held:  # a benchmark
        shown = (held["rows"][0].get("images", ""), held.get("seed", ""), held["hardware"], held["command"])
        return [[str(len({row["set"] for row in held["rows"]})), *_cells(*shown)]]
    described = []
    for run in read_runs(file):
        counts = sorted({unit.about["counts"]["images"] for unit in run.units})
        images = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
        sets = len({unit.set_name for unit in run.units})
        shown = (images, _span(run.about["seeds"]), run.about["hardware"], run.about["command"])
        described.append([str(sets), *_cells(*shown)])
    return described


def _cells(images: Any, seeds: Any, hardware: Mapping[str, Any], command: str) -> list[str]:
    count = f"{images:,}" if isinstance(images, int) else images
    return [count, str(seeds), format_hardware(hardware), format_command(command)]


def format_command(command: str) -> str:
    """A command for a cell of a table."""
    return f"`{command.replace('|', chr(92) + '|')}`"


def _span(seeds: Sequence[int]) -> str:
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def format_hardware(held: Mapping[str, Any]) -> str:
    """The GPU, or the processor and its threads."""
    if held["device"] != "cpu":
        return held["device"]
    return f"{held['processor']}, {held['threads']} thread{'' if held['threads'] == 1 else 's'}"
