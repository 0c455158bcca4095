"""The scripts in results/: commands are those of this version, comparisons condensed, networks made to distribute."""

from __future__ import annotations

import json
import shlex
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from adapters import pictures
from scripts import ROOT, load_script
from testtime import collect, load, resnet26
from testtime.cli.commands import app
from testtime.evaluation import make_plan, read_study, run_plan
from testtime.evaluation.method_specs import find_spec


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return load_script("results/measure.py")


def test_every_step_can_be_run(measure: ModuleType) -> None:
    commands: Any = typer.main.get_command(app)
    for name in measure.list_steps():
        program, command, *arguments = shlex.split(measure.command(name))
        if program == "python":
            assert (ROOT / command).exists(), name
            continue
        given = commands.commands[command].make_context(command, arguments).params  # parses, and runs nothing
        study = given.get("matrix")
        known = {"", "plain", "alp", "uda"} | set(read_study(study)["methods"] if study else ())
        for method in (given.get("methods") or "").split(","):
            assert method in known or find_spec(method) is not None, f"{name}: {method}"


def test_steps_come_after_those_that_they_need(measure: ModuleType) -> None:
    assert measure.find_needed("train-joint") == []
    assert measure.find_needed("joint-1") == ["train-joint"]
    assert measure.find_needed("selection-joint") == ["train-selection-joint"]
    assert measure.find_needed("bundle-vit-branch") == ["fit-vit-branch", "tune-vit-branch"]
    needed = ["train-vit-plain", "fit-vit-branch", "tune-vit-branch", "bundle-vit-branch", "vit-branch-level-5"]
    assert measure.add_needed(needed[-1:]) == needed
    names = measure.list_steps()
    assert measure.add_needed(names) == names
    for place, name in enumerate(names):
        assert set(measure.find_needed(name)) <= set(names[:place]), name


def test_steps_run_concurrently(measure: ModuleType) -> None:
    """Two at a time, none before what it needs; what needs a failed one is not started, all else is."""
    names = measure.add_needed(["vit-branch-level-5", "vit-masked-level-5", "joint-1", "joint-2"])
    begun, ended, meet = [], set(), threading.Barrier(2)

    def run(name: str) -> bool:
        assert set(measure.find_needed(name)) <= ended
        begun.append(name)
        if name in ("joint-1", "joint-2"):
            meet.wait(60)
        ended.add(name)
        return name != "tune-vit-branch"

    failed = measure.run_concurrently(names, 2, run)
    assert set(failed) == {"tune-vit-branch", "bundle-vit-branch", "vit-branch-level-5"}
    assert sorted(begun) == sorted(set(names) - {"bundle-vit-branch", "vit-branch-level-5"})


def test_a_comparison_is_condensed_to_its_scores(measure: ModuleType, tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": ["digits-c"], "levels": "5", "corruptions": "contrast,fog", "limit": 24}
    plan = make_plan(checkpoint="digits-resnet8-gn-joint", methods="fixed,tent", protocol="continual", **given)
    run = run_plan(plan, tmp_path / "run")
    found = json.loads(json.dumps(measure.condense(run)))
    assert found["protocol"].startswith("continual")
    assert [row["method"] for row in found["rows"]] == ["fixed", "tent"]
    for row, unit in zip(found["rows"], run.units, strict=True):
        counts = unit.about["counts"]
        assert row["error"] == pytest.approx(100 * (1 - counts["is_right"] / counts["labelled"]))
        assert row["interval"][0] <= row["error"] <= row["interval"][1]
        assert row["errors"] == [pytest.approx(row["error"])]


def test_a_network_takes_from_another_what_that_does_on_unseen_images(tmp_path: Path) -> None:
    bundle, kept = load_script("results/bundle.py"), {}
    for name, unseen in (("all", None), ("some", pictures(5, seed=1))):
        net = resnet26(depth=8, size=16)
        kept[name] = collect(net, pictures(4), unseen=unseen).statistics
        net.save(tmp_path / f"{name}.safetensors")
    source, other, target = (str(tmp_path / f"{name}.safetensors") for name in ("all", "some", "made"))
    bundle.main([source, target, "--unseen", other])
    found = load(target).statistics
    assert found is not None
    assert found.about == kept["some"].about != kept["all"].about
    with pytest.raises(SystemExit):
        bundle.main([source, target, "--unseen", source])
