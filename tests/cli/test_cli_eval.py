"""`testtime eval`: the folder of a run, and the command in its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import TINY, Run, assert_tame

from testtime.cli.commands import app
from testtime.evaluation.method_specs import USUAL_METHODS, find_spec


def test_the_same_options_find_the_default_folder_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        code, out, _ = run(*TINY)
        assert code == 0
    (trained,) = (tmp_path / "runs").iterdir()
    assert out.startswith(f"runs/{trained.name}/network.safetensors: epoch 3, loss ")
    evaluation = ["eval", "-c", f"runs/{trained.name}/network.safetensors", "--data", "digits", "--methods", "fixed"]
    for device in ("cpu", "auto"):
        code, out, _ = run(*evaluation, "--limit", "5", "--device", device)
        assert code == 0
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert out.splitlines()[-1].startswith(f"runs/{folders[0]}: written")
    assert folders[0].startswith("eval-")
    assert run(*evaluation, "--limit", "6")[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_the_help_names_methods_that_exist() -> None:
    group: Any = typer.main.get_command(app)
    (option,) = [one for one in group.commands["eval"].params if one.name == "methods"]
    names = option.help.partition("Any of ")[2].partition(", …")[0].split(", ")
    assert {*USUAL_METHODS, "auto"} <= {*names}
    assert all(find_spec(name) is not None for name in names)


def test_the_command_of_a_run_is_recorded_whatever_it_was(run: Run, network: Path, tmp_path: Path) -> None:
    out = tmp_path / "a\udc80  b\n"
    code, printed, err = run(
        "eval", "-c", network, "--data", "digits", "--methods", "fixed", "--limit", "2", "--out", out
    )
    assert code == 0, err
    assert_tame(printed + err)
    assert "  b" in json.loads((out / "run.json").read_text())["command"]
    assert run("report", out, "--out", tmp_path / "report")[0] == 0
    assert (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
