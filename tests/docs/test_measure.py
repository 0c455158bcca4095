"""The scripts in results/: commands are those of this version, comparisons condensed, networks made to distribute."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from adapters import pictures
from scripts import load_script
from testtime import collect, load, resnet26
from testtime.cli.commands import app
from testtime.evaluation import make_plan, read_study, run_plan
from testtime.evaluation.method_specs import find_spec


def test_every_step_can_be_run() -> None:
    measure = load_script("results/measure.py")
    commands: Any = typer.main.get_command(app)
    for name in measure.list_steps():
        command, *arguments = shlex.split(measure.command(name))
        given = commands.commands[command].make_context(command, arguments).params  # parses, and runs nothing
        study = given.get("matrix")
        known = {"", "plain", "alp", "uda"} | set(read_study(study)["methods"] if study else ())
        for method in (given.get("methods") or "").split(","):
            assert method in known or find_spec(method) is not None, f"{name}: {method}"


def test_a_comparison_is_condensed_to_its_scores(tmp_path: Path) -> None:
    measure = load_script("results/measure.py")
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
