"""Help, version and bad arguments: answered before torch is imported."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from command_line import Run, run_python

COMMANDS = [
    "train",
    "pack",
    "unpack",
    "predict",
    "info",
    "methods",
    "eval",
    "tune",
    "fit-branch",
    "report",
    "diagnose",
    "gradients",
    "correlate",
    "corrupt",
    "demo",
]

IMPORTS = """
import sys
from testtime.cli import run
code = run({arguments!r})
print([name for name in ("torch", "numpy", "matplotlib") if name in sys.modules], code)
"""


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert set(re.findall(r"^│ ([\w-]+) ", out, re.MULTILINE)) >= {*COMMANDS, "data"}
    assert run() == (0, out, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_of_the_command(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"testtime {command} " in out.partition("Example")[2]


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version") == (0, f"testtime {version('testtime')}\n", "")


@pytest.mark.parametrize("command", [(), ("predict",), ("eval",), ("data",), ("data", "pack")])
def test_flags_have_no_type_in_the_help(run: Run, command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "--help" in out
    assert "bool" not in out.lower()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        (["eval", "--help"], 0),
        (["data", "--help"], 0),
        (["nonsense"], 2),
        (["train", "--method", "magic"], 2),
        (["train", "--target", "digits"], 2),
        (["train", "--seeds", "two"], 2),
        (["train", "--severity", "2"], 2),
        (["tune", "-c", "x"], 2),
        (["fit-branch"], 2),
        (["fit-branch", "-c", "x", "--distillation", "2"], 2),
        (["eval", "--network", "uda"], 2),
        (["corrupt", "in", "out"], 2),
    ],
)
def test_it_answers_before_torch_is_imported(arguments: list[str], code: int) -> None:
    done, out, err = run_python(IMPORTS.format(arguments=arguments))
    assert (done, out.splitlines()[-1]) == (0, f"[] {code}")
    assert len(err.splitlines()) == (code == 2)


def test_without_typer_it_names_the_extra_to_install() -> None:
    code, out, err = run_python("import sys; sys.modules['typer'] = None; from testtime.cli import main; main()")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "typer" in err
    assert "pip install 'testtime[cli]'" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["train", "--out", "x", "--method", "magic"],
        ["train", "--out", "x", "--epochs", "0"],
        ["train", "--out", "x", "--epochs", "many"],
        ["train", "--out", "x", "--lr", "-1"],
        ["train", "--out", "x", "--depth", "9"],
        ["train", "--out", "x", "--data", "no-such-data"],
        ["train", "--out", "x", "--method", "uda"],
        ["train", "--out", "x", "--target", "digits"],
        ["train", "--out", "x", "--method", "uda", "--target", "no-such-set"],
        ["train", "--out", "x", "--seeds", "0-1", "--seed", "3"],
        ["train", "--out", "x", "--seeds", "0-99999999999"],
        ["train", "--out", "x", "--seeds", "9" * 5000],
        ["train", "--out", "x", "--start", "cifar10-resnet26-gn-joint"],
        ["train", "--out", "x", "--hold-out", "0"],
        ["train", "--out", "x", "--hold-out", "5000"],
        ["train", "--out", "x", "--hold-out", "5", "--data", "imagenet"],
        ["train", "--out", "x", "--hold-out", "5", "--start", "digits-resnet8-gn-joint"],
        ["train", "--out", "x", "--recipe", "robust", "--method", "plain"],
        ["train", "--out", "x", "--method", "robust"],
        ["train", "--out", "x", "--consistency", "1"],
        ["train", "--out", "x", "--recipe", "robust", "--severity", "11"],
        ["train", "--out", "x", "--width", "2", "--network", "resnet18"],
        ["fit-branch", "--out", "x"],
        ["fit-branch", "-c", "digits-resnet8-gn-joint", "--out", "x", "--lr", "-1"],
        ["fit-branch", "-c", "digits-resnet8-gn-joint", "--out", "x", "--optimizer", "lion"],
        ["fit-branch", "-c", "digits-resnet8-gn-joint", "--out", "x", "--data", "no-such-data"],
        ["fit-branch", "-c", "digits-resnet8-gn-joint", "--out", "x", "--hold-out", "5000"],
        ["fit-branch", "-c", "digits-resnet8-gn-joint", "--out", "x", "--distillation", "2"],
        ["tune", "--lr", "1", "--out", "x"],
        ["tune", "-c", "digits-resnet8-gn-joint", "--out", "x"],
        ["tune", "-c", "digits-resnet8-gn-joint", "--lr", "1,one", "--out", "x"],
        ["tune", "-c", "digits-resnet8-gn-joint", "--lr", "1", "--data", "digits-c", "--out", "x"],
        ["tune", "-c", "digits-resnet8-gn-joint", "--lr", "1", "--method", "magic", "--out", "x"],
        ["eval", "-c", "digits-resnet8-gn-joint", "--matrix", "digits-selection", "--data", "digits", "--out", "x"],
        ["train", "--out", "x", "--device", "abacus"],
        ["predict"],
        ["predict", "x.png", "--threshold", "2"],
        ["predict", "x.png", "--method", "fastest"],
        ["info"],
        ["gradients", "-c", "digits-resnet8-gn-joint", "--data", "digits"],
        ["gradients", "-c", "digits-resnet8-gn-joint", "--data", "digits-d", "--out", "x"],
        ["gradients", "-c", "digits-resnet8-gn-joint", "--data", "digits", "--out", "x", "--batch", "0"],
        ["gradients", "-c", "digits-resnet8-gn-joint", "--data", "digits", "--out", "x", "--device", "nowhere"],
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    run: Run, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert not list(tmp_path.iterdir())
