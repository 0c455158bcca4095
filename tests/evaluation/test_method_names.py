"""Names of methods in runs: alone, in another mode, and in studies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import testtime as tt
from report_runs import make_columns, make_run
from testtime.adaptation.methods import METHODS
from testtime.evaluation import MethodSpec, RunError, make_plan
from testtime.evaluation.method_specs import find_spec, read_method
from testtime.evaluation.units import prepare_folder
from testtime.report.sources import compare_methods


def test_a_name_alone_stands_for_the_method_in_its_own_mode() -> None:
    for name in METHODS.keys() - {"ttt"}:
        spec = find_spec(name)
        assert spec is not None
        assert (spec.name, spec.mode, spec.method) == (name, METHODS[name].mode, name)


def test_a_method_of_ones_own_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", replace(METHODS["memo"], name="mine"))
    plan = make_plan(checkpoint="digits-resnet8-gn-joint", data="digits", methods="mine,mine/online")
    assert [(one.name, one.mode, one.method) for one in plan.methods] == [
        ("mine", "episodic", "mine"),
        ("mine-online", "online", "mine"),
    ]


def test_a_mode_behind_a_slash() -> None:
    spec = find_spec("tent/episodic")
    assert spec is not None
    assert (spec.name, spec.mode, spec.method) == ("tent-episodic", "episodic", "tent")
    assert [find_spec(name) for name in ("tent/", "tent/fixed", "tend/online", "/online", "tent/online/online")] == [
        None
    ] * 5


def test_a_plan_has_both() -> None:
    plan = make_plan(checkpoint="digits-resnet8-gn-joint", data="digits", methods="tent,tent/episodic,memo/online")
    assert [(one.name, one.mode, one.method) for one in plan.methods] == [
        ("tent", "online", "tent"),
        ("tent-episodic", "episodic", "tent"),
        ("memo-online", "online", "memo"),
    ]
    with pytest.raises(ValueError, match="'tent/always'"):
        make_plan(checkpoint="digits-resnet8-gn-joint", data="digits", methods="tent/always")


def test_a_study_may_leave_out_the_mode_and_set_resets() -> None:
    spec = read_method("often", {"method": "memo", "steps": 2})
    assert (spec.mode, spec.method) == ("episodic", "memo")
    spec = read_method("often", {"method": "tent", "resets": 50})
    net = tt.load("digits-resnet8-gn-joint")
    assert spec.describe(net)["settings"]["resets"] == 50
    assert spec.make(net, 0).settings.resets == 50
    assert "resets" not in read_method("plain", {"method": "tent"}).describe(net)["settings"]
    for bad in ({"resets": 0}, {"resets": "often"}, {"resets": 1.5}):
        with pytest.raises(ValueError, match="resets"):
            read_method("often", {"method": "tent", **bad})
    with pytest.raises(ValueError, match="`mode` or a `method`"):
        read_method("often", {"steps": 2})


def test_a_run_of_best_of_version_0_1_is_neither_continued_nor_combined_with_another(tmp_path: Path) -> None:
    """There `best` was `mirrored`, and runs did not name it."""
    net = tt.resnet26(depth=8)
    old, new = ({"best": MethodSpec("best", "online", method=one).describe(net)} for one in ("mirrored", "best"))
    assert "method" not in old["best"]["settings"]
    run = make_run(tmp_path / "run", {("best", "digits", 0): make_columns([True, False])}, {"methods": old})
    prepare_folder(run.path, {"methods": old}, {})
    with pytest.raises(RunError, match=r"another configuration .*best\.settings\.method"):
        prepare_folder(run.path, {"methods": new}, {})
    assert any(text.startswith("best.settings.method") for text in compare_methods(old, new))
