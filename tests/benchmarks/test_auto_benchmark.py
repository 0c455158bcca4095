"""The benchmark of Auto, on a run and rows that are made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import load_script
from testtime.evaluation import make_plan, run_plan

NETWORK = "digits-resnet8-gn-joint"


def test_fits_to_a_run_and_measures_with_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = load_script("benchmarks/auto.py")
    given: dict[str, Any] = {"data": ["digits-c"], "levels": "5", "corruptions": "contrast,fog", "limit": 12}
    run = run_plan(make_plan(checkpoint=NETWORK, methods="fixed,episodic,online", **given), tmp_path / "run")
    arguments = ["--fit", NETWORK, str(tmp_path / "run"), "--checkpoint", NETWORK, "--levels", "5", "--limit", "4"]
    auto.main([*arguments, "--out", str(tmp_path / "auto.json")])
    found = json.loads((tmp_path / "auto.json").read_text())
    rows = found["results"][NETWORK]["rows"]
    assert [row["set"] for row in rows][:2] == ["digits", "digits-c/gaussian_noise/5"]
    assert len(rows) == 16
    assert all(row["images"] == 4 and row["estimate"][1] <= row["estimate"][0] <= row["estimate"][2] for row in rows)
    assert all(row["auto"] == row["fixed"] for row in rows if row["learned"] == 0)
    assert "sign of the gain right" in capsys.readouterr().out
    # Of the run fitted to: two sets of level 5 and the original one, counted by hand.
    right = {(unit.method, unit.set_name): unit.about["counts"]["is_right"] / 12 for unit in run.units}
    hard = [right["online", f"digits-c/{name}/5"] for name in ("contrast", "fog")]
    assert found["accuracy"]["levels 3 to 5"]["online"] == pytest.approx(sum(hard) / 2)
    assert found["accuracy"]["mean"]["fixed"] <= found["accuracy"]["mean"]["auto"]


def make_row(level: int, drift: float, fixed: float, online: float, auto: float, last: float) -> dict[str, Any]:
    return {"level": level, "drift": drift, "fixed": fixed, "online": online, "auto": auto, "last": last} | {
        "estimate": [0.7, 0.6, 0.8]
    }


def test_a_summary_is_of_groups_that_count_alike() -> None:
    auto = load_script("benchmarks/auto.py")
    rows = [
        make_row(0, 1.0, 0.9, 0.8, 0.9, 0.9),  # predicted 0.1, harmed: the wrong sign
        make_row(1, 1.0, 0.8, 0.8, 0.8, 0.75),  # neither gain nor loss: has no sign
        make_row(5, 2.718281828, 0.5, 0.7, 0.7, 0.7),
        make_row(4, 2.718281828, 0.3, 0.5, 0.5, 0.2),
    ]
    found = auto.summarise(rows, (1.0, 0.1))
    assert found["levels 3 to 5"] == pytest.approx({"fixed": 0.4, "online": 0.6, "auto": 0.6})
    assert found["mean"] == pytest.approx({"fixed": 0.7, "online": 2.2 / 3, "auto": 2.3 / 3})
    assert found["sign_right"] == pytest.approx(2 / 3)
    assert found["sets_with_a_gain_or_loss"] == 3
    assert found["coverage"] == 0.5
    assert found["estimate_error"] == pytest.approx((0.2 + 0.05 + 0 + 0.5) / 4)
    assert found["correlation"] > 0.9
