"""What was measured besides the levels of CIFAR-10-C: committed files that are read where they are there.

Each is a part of the document by itself, mostly beside methods of the main files on the same images. A part whose files
are missing was not run yet, and the document says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from testtime.report.results import BASELINE, Results, collect
from testtime.report.sources import ResultsError, compare_methods, read_verdicts
from testtime.report.statistics import Interval, bootstrap_means, interval_of
from testtime.runs import Run, open_runs
from testtime.runs.units import Verdicts
from testtime.storage import FileError, read_json

FOLDER, PICTURES = Path("results/cifar10"), Path("results/imagenette")

_SEEDS, _TF32 = tuple(f"seed-{seed}" for seed in range(1, 6)), ("tf32-0", "tf32-1")
RETRAINED = (*_SEEDS, *_TF32)
"""Networks trained as the joint one but for their seed or their arithmetic."""

FILES: Mapping[str, tuple[Path, ...]] = {
    "batch norm": (FOLDER / "batch-norm.json",),
    "gradual": (FOLDER / "gradual.json", FOLDER / "gradual-uda.json"),
    "fast": (FOLDER / "fast.json",),
    "threshold": (FOLDER / "threshold.json",),
    "steps": (FOLDER / "steps.json",),
    "seeds": tuple(FOLDER / f"{name}.json" for name in _SEEDS),
    "tf32": tuple(FOLDER / f"{name}.json" for name in _TF32),
    "orders": (FOLDER / "mild-orders.json",),
    "networks": (FOLDER / "mild-networks.json",),
    "best": (FOLDER / "best.json", FOLDER / "best-levels.json"),
    "tuning": (FOLDER / "tuning.json",),
    "costs": (FOLDER / "costs.json",),
    "photographs": (PICTURES / "level-5.json",),
    "standard photographs": (PICTURES / "standard-level-5.json",),
}
"""The files of each part; that of the costs has times alone, of runs with nothing beside them."""

SHARED = tuple(
    FOLDER / f"{name}.json"
    for name in (
        *("baseline", "uda", "alp", "best", "fast", "threshold", "steps"),
        *("gradual", "gradual-uda", "batch-norm", "tuning", "mild-orders", "mild-networks"),
        *RETRAINED,
    )
)
"""The files whose runs shared their GPU with others, which no record says: their times are no measure of speed."""

TRAININGS: Mapping[str, Path] = {
    **{
        name: FOLDER / f"training-{name}.json"
        for name in ("gn-joint", "gn-plain", "gn-alp", "bn-joint", "bn-plain", *RETRAINED, "uda")
    },
    **{f"imagenette-{name}": PICTURES / f"training-{name}.json" for name in ("joint", "plain")},
}
"""The records of trainings; that of `uda` has one for each test set."""

_BESIDE: Mapping[str, tuple[str, ...]] = {
    "fast": ("fixed", "episodic"),
    "threshold": ("fixed", "episodic"),
    "steps": ("fixed",),
    "seeds": ("fixed", "online"),
    "best": ("fixed", "online"),
}
"""The methods of the main files that a part is compared with."""


@dataclass(frozen=True)
class Part:
    """A part of the document that has its own files.

    Attributes:
        results: What its files hold, and what they are compared with, on the same images; of the costs only the
            seconds, since each method has as many images as its time needs.
        files: The files that are there.
        runs: Their runs.
    """

    results: Results
    files: tuple[Path, ...]
    runs: tuple[Run, ...]


def read_parts(main: Sequence[Run], root: Path = Path()) -> dict[str, Part]:
    """Read the files that are there.

    Args:
        main: The runs of the main files, whose methods stand beside.
        root: The checkout.

    Raises:
        ValueError: A file is damaged, or does not belong to the others.
    """
    parts: dict[str, Part] = {}
    for name, files in FILES.items():
        there = tuple(file for file in files if (root / file).exists())
        if not there:
            continue
        own = [run for file in there for run in open_runs(root / file)]
        if name == "costs":
            seconds = time_methods(own)
            if BASELINE not in seconds:
                raise ResultsError(root / there[0], f"{BASELINE} was not timed")
            parts[name] = Part(Results(own, (), {}, seconds, ()), there, tuple(own))
            continue
        beside = [restrict(run, own, _BESIDE.get(name, ())) for run in main]
        parts[name] = Part(collect([*(run for run in beside if run.units), *own]), there, tuple(own))
    return parts


def restrict(run: Run, others: Sequence[Run], methods: Sequence[str]) -> Run:
    """Some methods of a run on the sets and the images that other runs have."""
    seen = {unit.set_name: unit.verdicts().samples for other in others for unit in other.units}
    units = []
    for unit in run.units:
        if unit.method in methods and unit.set_name in seen:
            held = unit.verdicts()
            keep = np.isin(held.samples, seen[unit.set_name])
            units.append(replace(unit, held=Verdicts(*(column[keep] for column in held))))
    return replace(run, units=units)


def read_trainings(root: Path = Path()) -> dict[str, Mapping[str, Any]]:
    """The records of trainings that are there, by name; those of UDA-SS as `uda SET`.

    Raises:
        ResultsError: A file holds something else.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, file in TRAININGS.items():
        if not (root / file).exists():
            continue
        try:
            held = read_json(root / file)
            records = {f"uda {key}": one for key, one in held.items()} if name == "uda" else {name: held}
            if not all(record["seconds"] > 0 and record["epochs"] for record in records.values()):
                raise ValueError("nothing was trained")
            methods = {record["configuration"]["recipe"]["method"] for record in records.values()}
        except FileError as error:
            raise ResultsError(root / file, error.fault) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(root / file, f"not the record of a training ({error})") from None
        if name == "uda" and methods != {"uda"}:
            raise ResultsError(root / file, "not records of UDA-SS")
        found |= records
    return found


def time_methods(runs: Sequence[Run]) -> dict[str, float]:
    """What an image cost each method in seconds, over all its units."""
    units = [unit for run in runs for unit in run.units]
    return {
        method: sum(unit.seconds for unit in units if unit.method == method) / count
        for method, count in count_images(runs).items()
    }


def count_images(runs: Sequence[Run]) -> dict[str, int]:
    """The images of each method, over all its units."""
    counts: dict[str, int] = {}
    for unit in (unit for run in runs for unit in run.units):
        counts[unit.method] = counts.get(unit.method, 0) + unit.about["counts"]["images"]
    return counts


def find_costs(parts: Mapping[str, Part], results: Results, methods: Sequence[str]) -> dict[str, float] | None:
    """What an image costs some methods of other results, in seconds.

    Args:
        parts: All parts, of which that of the costs has the times.
        results: The results that the methods stand in.
        methods: Their names.

    Returns:
        The seconds by method; None where one of them was not timed.

    Raises:
        ResultsError: What was timed is another method of the same name.
    """
    timed = parts.get("costs")
    if timed is None or not all(method in timed.results.seconds for method in methods):
        return None
    known, wanted = (find_methods(one) for one in (timed.results, results))
    for method in methods:
        if not is_same_method(known[method], wanted[method]):
            raise ResultsError(timed.files[0], f"its {method} has other settings than that of the results")
    return {method: timed.results.seconds[method] for method in methods}


def find_methods(results: Results) -> dict[str, Mapping[str, Any]]:
    """Mode, network and settings of every method, as the runs have them."""
    return {name: held for run in results.runs for name, held in run.configuration["methods"].items()}


def is_same_method(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two methods are the same but for the arithmetic and the name of the network."""
    held = [{"mode": each["mode"], "settings": dict(each["settings"]) | {"precision": "any"}} for each in (one, two)]
    return not compare_methods({"one": held[0]}, {"one": held[1]})


def compare(results: Results, one: str, two: str, names: Sequence[str]) -> tuple[float, Interval]:
    """By how many points one method's error is above another's on the same images, mean over some sets.

    Args:
        results: Results that have both.
        one: A method.
        two: The other.
        names: The sets; their images are resampled together.

    Returns:
        The difference, and its 95% interval over images.

    Raises:
        ResultsError: The sets are of different images.
    """
    gaps, samples = [], None
    for name in names:
        first, second = (read_verdicts((method, name), results.sources[method, name]) for method in (one, two))
        if samples is not None and not np.array_equal(samples, first.samples):
            raise ResultsError(results.runs[0].path, f"{name} is of other images than {names[0]}")
        samples = first.samples
        gaps.append(100 * (second.share - first.share))
    gap = np.mean(gaps, axis=0)
    return float(gap.mean()), interval_of(bootstrap_means(gap[:, None])[:, 0])
