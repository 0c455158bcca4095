"""The committed results on CIFAR-10: the files of `results/cifar10/`, read and checked against each other.

`testtime.report.findings` makes a document of them, `testtime.report.readme` the README's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from testtime.analysis.study import read_study
from testtime.report.correlation import Joined, join
from testtime.report.further import FOLDER, Part, read_parts, read_trainings
from testtime.report.results import BASELINE, Results, Table, collect
from testtime.report.sources import ResultsError
from testtime.runs import Run, open_runs

LEVELS, STANDARD, PART = FOLDER / "levels.json", FOLDER / "standard-level-5.json", FOLDER / "standard-levels-1-4.json"
GRADIENTS, TRAINING = FOLDER / "correlations.json", FOLDER / "training-gn-joint.json"
STAND_INS = FOLDER / "stand-ins.json"
ROWS = {name: FOLDER / f"{name}.json" for name in ("baseline", "uda", "alp", "best")}
"""Further methods on the same sets, where they are there."""
CONTROL = "fixed-mirrored"
"""A method beside `best` that learns nothing: it stands where `best` is told of, not in the tables of all methods."""
PRECISIONS = {precision: FOLDER / f"precision-{precision}.json" for precision in ("fp32", "tf32", "bf16")}


@dataclass(frozen=True)
class Findings:
    """What the files hold.

    Attributes:
        results: `fixed` and `online` at every level, `episodic` at level 5, on all images; further methods where they
            were run on all images.
        part: `fixed` and `episodic` at levels 1 to 4, on some of the images.
        training: The record of the network's training.
        study: The study of gradients.
        gradients: The study joined with the improvement of `episodic` and of `online`.
        stand_ins: The same of a second study, on fewer images, which also has the balance of the predictions.
        stand_in_study: That study.
        precisions: `online` on a few sets, in each arithmetic.
        parts: What was measured besides, by name; what was not run yet is missing.
        trainings: The records of all trainings.
    """

    results: Results
    part: Results
    training: Mapping[str, Any]
    study: Mapping[str, Any]
    gradients: Mapping[str, Joined]
    stand_ins: Mapping[str, Joined]
    stand_in_study: Mapping[str, Any]
    precisions: Mapping[str, Results]
    parts: Mapping[str, Part]
    trainings: Mapping[str, Mapping[str, Any]]

    @property
    def levels(self) -> dict[int, Table]:
        """The tables on all images by level, the lowest first."""
        return by_level(self.results)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of the main files: `fixed` and `online`, the standard version at level 5 and at the others."""
        return (*self.results.runs[:2], *self.part.runs)

    @property
    def more(self) -> tuple[Run, ...]:
        """The runs of further methods on the same images."""
        return tuple(self.results.runs[2:])


def read(root: Path = Path()) -> Findings:
    """Read the committed files.

    Args:
        root: The checkout.

    Raises:
        OSError: A file is missing.
        ValueError: A file is damaged, or they do not belong together.
    """
    results = read_whole(root)
    part = collect(open_runs(root / PART))
    _check_fixed(results.runs[0], (*results.runs[1:], *part.runs))
    trainings = read_trainings(root)
    if "gn-joint" not in trainings:
        raise ResultsError(root / TRAINING, "no such file")
    gradients, stand_ins = (
        {
            "episodic": join(root / study, [root / STANDARD, root / PART]),
            "online": join(root / study, [root / LEVELS]),
        }
        for study in (GRADIENTS, STAND_INS)
    )
    studies = [read_study(root / study) for study in (GRADIENTS, STAND_INS)]
    precisions = {name: collect(open_runs(root / file)) for name, file in PRECISIONS.items()}
    return Findings(
        results,
        part,
        trainings["gn-joint"],
        studies[0],
        gradients,
        stand_ins,
        studies[1],
        precisions,
        read_parts(results.runs[:2], root),
        trainings,
    )


def read_whole(root: Path = Path()) -> Results:
    """Read the runs on all images: `fixed` and `online` at every level, `episodic` at level 5, what else is there.

    Args:
        root: The checkout.

    Raises:
        ValueError: A file is missing or damaged, or they do not belong together.
    """
    main = [*open_runs(root / LEVELS), *open_runs(root / STANDARD)]
    more = [run for file in ROWS.values() if (root / file).exists() for run in open_runs(root / file)]
    more = [_leave_out(CONTROL, run) for run in more if _is_whole(run, main[0])]
    return collect([*main, *(run for run in more if run.units)])


def _leave_out(method: str, run: Run) -> Run:
    """A run without one of its methods."""
    methods = {name: held for name, held in run.configuration["methods"].items() if name != method}
    units = [unit for unit in run.units if unit.method != method]
    return replace(run, units=units, configuration={**run.configuration, "methods": methods})


def _is_whole(run: Run, main: Run) -> bool:
    """Whether a run has as many images of each set as the main one."""
    counts = {unit.set_name: len(unit.verdicts().samples) for unit in main.units}
    return all(counts.get(unit.set_name) == len(unit.verdicts().samples) for unit in run.units)


def by_level(results: Results) -> dict[int, Table]:
    """The tables of corrupted sets by level, the lowest first."""
    return {one.level: one for one in sorted(results.tables, key=lambda one: one.level or 0) if one.level is not None}


def _check_fixed(first: Run, others: Sequence[Run]) -> None:
    """The document says that `fixed` was run once."""
    known = {unit.set_name: unit.verdicts() for unit in first.units if unit.method == BASELINE}
    for run in others:
        for unit in run.units:
            if unit.method != BASELINE:
                continue
            whole, here = known.get(unit.set_name), unit.verdicts()
            if whole is None or not np.array_equal(whole.right[np.isin(whole.samples, here.samples)], here.right):
                raise ResultsError(run.path, f"{BASELINE} on {unit.set_name} is not what {first.path} has")
