"""The benchmark of the drift, on a run and rows that are made for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import ROOT, load_script
from testtime import Auto, Calibration, evaluate, load, recommend
from testtime.data import open as open_data
from testtime.evaluation import make_plan, run_plan

NETWORK = "digits-resnet8-gn-joint"


@pytest.fixture
def drift(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script("benchmarks/drift.py")


def test_gains_are_those_of_the_run(drift: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"data": ["digits-c"], "levels": "5", "corruptions": "contrast,fog", "limit": 12}
    run = run_plan(make_plan(checkpoint=NETWORK, methods="fixed,online", **given), tmp_path / "run")
    arguments = ["--checkpoint", NETWORK, "--measured", str(tmp_path / "run"), "--images", "8"]
    drift.main([*arguments, "--out", str(tmp_path / "drift.json")])
    found = json.loads((tmp_path / "drift.json").read_text())
    rows = {row["set"]: row for row in found["rows"]}
    right = {(unit.method, unit.set_name): unit.about["counts"]["is_right"] for unit in run.units}
    assert sorted(rows) == ["digits", "digits-c/contrast/5", "digits-c/fog/5"]
    for name, row in rows.items():
        assert row["gain"] == pytest.approx(100 * (right["online", name] - right["fixed", name]) / 12, abs=1e-3)
        assert row["images"] == 8
    net = load(NETWORK)
    auto = Auto(net, calibration=Calibration(**found["calibration"]), **recommend(net))
    for name, row in rows.items():
        auto.reset()
        records = list(evaluate(auto, open_data(name), shuffle=True, limit=8))
        assert row["learned"] == sum(record.adapted for record in records) / 8
    assert rows["digits-c/contrast/5"]["drift"] > rows["digits"]["drift"]
    assert "sign_right" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="another network"):
        drift.main(["--checkpoint", "cifar10-resnet26-gn-joint", *arguments[2:]])


def make_row(name: str, drift: float, gain: float, learned: float, accuracy: float, estimate: list[float]) -> dict:
    about = {"set": name, "drift": drift, "gain": gain}
    return about | {"learned": learned, "accuracy": accuracy, "estimate": estimate}


def test_a_gain_is_expected_where_most_is_learned(drift: ModuleType) -> None:
    rows = [
        make_row("digits", 1.0, -0.5, 0.2, 0.9, [0.8, 0.7, 0.95]),
        make_row("digits-c/fog/1", 1.1, 0.2, 0.5, 0.6, [0.6, 0.5, 0.7]),
        make_row("digits-c/fog/2", 2.0, 0.6, 1.0, 0.5, [0.7, 0.6, 0.8]),
        make_row("digits-c/fog/5", 4.0, -0.1, 1.0, 0.5, [0.5, 0.4, 0.6]),
    ]
    found = drift.summarise(rows)
    assert (found["sets"], found["sets_that_lose"], found["sets_learned"]) == (4, 2, 2)
    assert found["gains"] == pytest.approx([(-0.5 + 0.4 - 0.1) / 3, (-0.1 + 0.35 - 0.1) / 3])
    assert found["sign_right"] == 0.5
    assert found["coverage"] == 0.75
    assert found["estimate_error"] == pytest.approx((0.1 + 0.2) / 4)
