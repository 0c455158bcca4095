"""Evaluations, diagnoses and reports do not depend on torch's global settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import testtime as tt
from testtime import demo
from testtime.data.sets import TensorSet
from testtime.diagnosis import gradient_correlation
from testtime.diagnosis.gradient_study import Gray
from testtime.diagnosis.measure import diagnose, find_reference
from testtime.evaluation import make_plan, run_plan
from testtime.evaluation.records import evaluate, stream_order
from testtime.report.correlation import bootstrap_correlation
from testtime.report.statistics import bootstrap_means
from torch_defaults import DEFAULTS

NAME = "digits-resnet8-gn-joint"


def run_evaluation(folder: Path) -> Any:
    digits = tt.data.open("digits")
    adapter = tt.Online(tt.load(NAME), copies=2)
    return [list(evaluate(adapter, digits, limit=4)), list(evaluate(adapter, digits, shuffle=True, limit=4))]


def run_units(folder: Path) -> Any:
    plan = make_plan(checkpoint=NAME, data=["digits", "digits-c/fog/5"], limit=4, copies=["2"], steps=["1"])
    run = run_plan(plan, folder / "run")
    return {unit.title: {name: column.tolist() for name, column in unit.columns().items()} for unit in run.units}


def run_correlation(folder: Path) -> Any:
    return gradient_correlation(tt.load(NAME), None, tt.data.open("digits"), limit=12, batch=6, single=4).describe()


def run_diagnosis(folder: Path) -> Any:
    net = tt.load(NAME)
    found = diagnose(net, tt.data.open("digits-c/fog/5"), reference=find_reference(net, limit=32), limit=33, trial=32)
    return found.describe()


def make_colours() -> TensorSet:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 4, 4), np.uint8)
    return TensorSet("colours", torch.from_numpy(pixels), None)


CASES: dict[str, Callable[[Path], Any]] = {
    "evaluate": run_evaluation,
    "run": run_units,
    "gradients": run_correlation,
    "diagnose": run_diagnosis,
    "order": lambda folder: stream_order(9, 1).tolist(),
    "gray": lambda folder: Gray(make_colours()).images(slice(None)).tolist(),
    "shifts": lambda folder: [one.images([3]).tolist() for one in demo.make_sets(demo.SHIFTS).values()],
    "bootstrap": lambda folder: bootstrap_means(np.eye(4), rounds=20).tolist(),
    "correlation": lambda folder: bootstrap_correlation(np.arange(4.0), np.arange(4.0) ** 2, rounds=20),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: json.dumps(run(tmp_path_factory.mktemp("usual"))) for name, run in CASES.items()}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("case", CASES)
def test_what_the_user_set_changes_nothing(case: str, default: str, expected: dict[str, str], tmp_path: Path) -> None:
    with DEFAULTS[default]():
        found = CASES[case](tmp_path)
    assert json.dumps(found) == expected[case]
