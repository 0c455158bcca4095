"""The benchmark of the drift, on a run and rows that are made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import load_script
from testtime.evaluation import make_plan, run_plan

NETWORK = "digits-resnet8-gn-joint"


def test_gains_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drift = load_script("benchmarks/drift.py")
    given: dict[str, Any] = {"data": ["digits-c"], "levels": "5", "corruptions": "contrast,fog", "limit": 12}
    run = run_plan(make_plan(checkpoint=NETWORK, methods="fixed,online", **given), tmp_path / "run")
    arguments = ["--checkpoint", NETWORK, "--measured", str(tmp_path / "run"), "--images", "8"]
    drift.main([*arguments, "--out", str(tmp_path / "drift.json")])
    rows = {row["set"]: row for row in json.loads((tmp_path / "drift.json").read_text())["rows"]}
    right = {(unit.method, unit.set_name): unit.about["counts"]["is_right"] for unit in run.units}
    assert sorted(rows) == ["digits", "digits-c/contrast/5", "digits-c/fog/5"]
    for name, row in rows.items():
        assert row["gain"] == pytest.approx(100 * (right["online", name] - right["fixed", name]) / 12, abs=1e-3)
        assert row["images"] == 8
    assert rows["digits-c/contrast/5"]["drift"] > rows["digits"]["drift"]
    assert "sign_right" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="another network"):
        drift.main(["--checkpoint", "cifar10-resnet26-gn-joint", *arguments[2:]])


def test_a_gain_is_expected_from_the_limit() -> None:
    drift = load_script("benchmarks/drift.py")
    rows = [
        {"drift": 1.0, "gain": -0.5, "accuracy": 0.9, "estimate": [0.8, 0.7, 0.95]},
        {"drift": drift.LIMIT, "gain": 0.5, "accuracy": 0.5, "estimate": [0.7, 0.6, 0.8]},
        {"drift": 4.0, "gain": -0.1, "accuracy": 0.5, "estimate": [0.5, 0.4, 0.6]},
        {"drift": 1.1, "gain": 0.2, "accuracy": 0.6, "estimate": [0.6, 0.5, 0.7]},
    ]
    found = drift.summarise(rows)
    assert (found["sets"], found["sets_that_lose"], found["sets_above_the_limit"]) == (4, 2, 2)
    assert found["sign_right"] == 0.5
    assert found["coverage"] == 0.75
    assert found["estimate_error"] == pytest.approx((0.1 + 0.2) / 4)
