"""`testtime tune`: a choice on held-out images, and nothing written otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import TINY, Run

from testtime import cli
from testtime.data.held_out import COUNTS


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that was not trained on the held-out digits."""
    folder = tmp_path_factory.mktemp("honest")
    assert cli.run([*TINY, "--epochs", "1", "--hold-out", str(COUNTS["digits"]), "--out", str(folder)]) == 0
    return folder / "network.safetensors"


def test_it_prints_and_writes_the_choice_and_report_reads_the_run(run: Run, honest: Path, tmp_path: Path) -> None:
    arguments = ["tune", "-c", honest, "--lr", "0.01,0.1", "--copies", "1", "--limit", "5", "--out", tmp_path / "run"]
    code, out, err = run(*arguments)
    assert code == 0, err
    choice = json.loads((tmp_path / "run" / "choice.json").read_text())
    assert {row["name"] for row in choice["table"]} == {"fixed", "lr=0.01 copies=1", "lr=0.1 copies=1"}
    assert len(choice["sets"]) == 5
    lines = out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == [row["name"] for row in choice["table"]]
    assert f"chosen: {choice['chosen']['name']}" in out
    assert choice["rule"] in out
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / "units").rglob("*.safetensors")}
    assert run(*arguments)[1] == out
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert run("report", tmp_path / "run", "--out", tmp_path / "report", "--format", "csv")[0] == 0
    assert "lr=0.1 copies=1" in (tmp_path / "report" / "tables.csv").read_text()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--data", "digits-c"], "digits is not held out"),
        (["--data", "digits-held-out-c/fog/5"], "got 'fog'"),
        (["--data", "cifar10-held-out"], "CIFAR-10"),
        (["--data", "nothing"], "matches no data set"),
    ],
)
def test_other_sets_are_refused_in_one_line(
    run: Run, honest: Path, tmp_path: Path, extra: list[str], said: str
) -> None:
    code, out, err = run("tune", "-c", honest, "--lr", "1", "--data-root", tmp_path, "--out", tmp_path / "run", *extra)
    assert code in (1, 2)
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not (tmp_path / "run").exists()


def test_a_network_that_saw_the_images_is_refused(run: Run, network: Path, tmp_path: Path) -> None:
    for command in (["tune", "--lr", "1"], ["eval", "--data", "digits-held-out"]):
        code, out, err = run(*command, "-c", network, "--out", tmp_path / "run")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "--hold-out 300" in err
    assert not (tmp_path / "run").exists()
