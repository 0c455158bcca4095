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


def test_a_model_is_tuned_like_a_network(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import testtime as tt\n"
        "def make():\n"
        "    return tt.resnet26(depth=8, channels=1, size=8).describe(classes=tuple('0123456789'))\n"
    )
    given = ["--lr", "0.01", "--method", "tent", "--limit", "4", "--out", tmp_path / "run"]
    model = f"{tmp_path / 'mine.py'}:make"
    code, out, err = run("tune", "-m", model, *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pass --data" in err
    code, out, err = run("tune", "-m", model, "--data", "digits-held-out", *given)
    assert code == 0, err
    assert "chosen: lr=0.01" in out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["files"]["networks"] == {"joint": model}
    code, out, err = run("tune", "-m", model, "--weights", tmp_path / "none.pth", *given)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "none.pth: no such file" in err


def test_the_precision_is_recorded_only_if_it_is_given(run: Run, honest: Path, tmp_path: Path) -> None:
    for name, extra in (("usual", []), ("given", ["--precision", "bf16"])):
        arguments = ["--data", "digits-held-out", "--lr", "0.01", "--copies", "1", "--limit", "2", "--device", "cpu"]
        code, _, err = run("tune", "-c", honest, *arguments, "--out", tmp_path / name, *extra)
        assert code == 0, err
    settings = [
        json.loads((tmp_path / name / "choice.json").read_text())["chosen"]["settings"] for name in ("usual", "given")
    ]
    assert settings == [{"lr": 0.01, "copies": 1}, {"precision": "bf16", "lr": 0.01, "copies": 1}]


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
