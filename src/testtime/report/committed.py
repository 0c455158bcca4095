"""The committed results on CIFAR-10: the files of `results/cifar10/`, read and checked against each other.

`testtime.report.findings` makes a document of them, `testtime.report.readme` the README's table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testtime.analysis.study import read_study
from testtime.report.correlation import Joined, join
from testtime.report.results import BASELINE, Results, Table, collect
from testtime.report.sources import ResultsError
from testtime.runs import Run, open_runs

FOLDER = Path("results/cifar10")
LEVELS, STANDARD, PART = FOLDER / "levels.json", FOLDER / "standard-level-5.json", FOLDER / "standard-levels-1-4.json"
GRADIENTS, TRAINING = FOLDER / "correlations.json", FOLDER / "training-gn-joint.json"
STAND_INS = FOLDER / "stand-ins.json"
PRECISIONS = {precision: FOLDER / f"precision-{precision}.json" for precision in ("fp32", "tf32", "bf16")}


@dataclass(frozen=True)
class Findings:
    """What the files hold.

    Attributes:
        results: `fixed` and `online` at every level, `episodic` at level 5, on all images.
        part: `fixed` and `episodic` at levels 1 to 4, on some of the images.
        training: The record of the network's training.
        study: The study of gradients.
        gradients: The study joined with the improvement of `episodic` and of `online`.
        stand_ins: The same of a second study, on fewer images, which also has the balance of the predictions.
        stand_in_study: That study.
        precisions: `online` on a few sets, in each arithmetic.
    """

    results: Results
    part: Results
    training: Mapping[str, Any]
    study: Mapping[str, Any]
    gradients: Mapping[str, Joined]
    stand_ins: Mapping[str, Joined]
    stand_in_study: Mapping[str, Any]
    precisions: Mapping[str, Results]

    @property
    def levels(self) -> dict[int, Table]:
        """The tables on all images by level, the lowest first."""
        return by_level(self.results)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs."""
        return (*self.results.runs, *self.part.runs)


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
    training = json.loads((root / TRAINING).read_text(encoding="utf-8"))
    if not isinstance(training, dict) or not training.keys() >= {"configuration", "epochs", "seconds"}:
        raise ResultsError(f"{root / TRAINING}: not the record of a training.")
    gradients, stand_ins = (
        {
            "episodic": join(root / study, [root / STANDARD, root / PART]),
            "online": join(root / study, [root / LEVELS]),
        }
        for study in (GRADIENTS, STAND_INS)
    )
    studies = [read_study(root / study) for study in (GRADIENTS, STAND_INS)]
    precisions = {name: collect(open_runs(root / file)) for name, file in PRECISIONS.items()}
    return Findings(results, part, training, studies[0], gradients, stand_ins, studies[1], precisions)


def read_whole(root: Path = Path()) -> Results:
    """Read the runs on all images: `fixed` and `online` at every level, `episodic` at level 5.

    Args:
        root: The checkout.

    Raises:
        ValueError: A file is missing or damaged, or they do not belong together.
    """
    return collect([*open_runs(root / LEVELS), *open_runs(root / STANDARD)])


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
                raise ResultsError(f"{run.path}: {BASELINE} on {unit.set_name} is not what {first.path} has.")
