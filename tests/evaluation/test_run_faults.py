"""Evaluation runs that are killed, interrupted, or run out of disk: what is finished stays, the rest is done again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testtime import cli, resnet26
from testtime.data.sets import TensorSet
from testtime.evaluation import MethodSpec, Plan, SetSpec, make_plan, open_run, run_plan
from testtime.evaluation.worker import Worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")

# Kills children of its own at moments of the seed's choosing: most by the clock, some by themselves in the middle of
# writing a file. The interpreter and torch are loaded once.
KILLER = """
import os, random, signal, sys, time
import torch
import torch._dynamo  # learning needs it; imported once here instead of in every child
torch.set_num_threads(1)
from testtime import storage
from testtime.evaluation import make_plan, open_run, run_plan

checkpoint, out, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = random.Random(20)
plan = make_plan(checkpoint=checkpoint, data=["digits-c/*_noise/5"], limit=4, copies=["1"], steps=["1"], lr=["0.05"])

def die(*ignored, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def die_in_the_middle(self, content):
    with open(self, "wb") as file:
        file.write(content[: len(content) // 2])
    die()

def die_afterwards(source, target, replace=os.replace):
    replace(source, target)
    die()

def count_to(number, act, usual):
    def counted(*arguments, **named):
        nonlocal number
        number -= 1
        return (usual if number else act)(*arguments, **named)
    return counted

moments = ["clock"] * (kills - 5) + ["mkstemp", "write", "fsync", "replace", "afterwards"]
chance.shuffle(moments)
died = 0
while died < kills:
    child = os.fork()
    if child == 0:
        nth = 1 + chance.randrange(3)
        match moments[died]:
            case "mkstemp":
                storage.tempfile.mkstemp = count_to(nth, die, storage.tempfile.mkstemp)
            case "write":
                storage.Path.write_bytes = count_to(nth, die_in_the_middle, storage.Path.write_bytes)
            case "fsync":
                storage.os.fsync = count_to(nth, die, storage.os.fsync)
            case "replace":
                storage.os.replace = count_to(nth, die, storage.os.replace)
            case "afterwards":
                storage.os.replace = count_to(nth, die_afterwards, storage.os.replace)
        run_plan(plan, out)
        os._exit(0)
    wait = chance.uniform(0.02, 0.4)
    if moments[died] == "clock":
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        died += 1
    else:
        assert os.WEXITSTATUS(status) == 0
        for unit in open_run(out).units[::2]:  # it was done before it was killed: half of it again
            unit.path.unlink()
print(died, len(open_run(out).units))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    net = resnet26(depth=8, channels=1, size=8)
    net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
    file = tmp_path_factory.mktemp("network") / "net.safetensors"
    net.save(file)
    return str(file)


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def command(checkpoint: str, out: Path, seeds: int) -> list[str]:
    """A run of 16 units a seed."""
    arguments = ["eval", "-c", checkpoint, "--data", "digits-c", "--levels", "5", "--limit", "40", "--methods", "fixed"]
    arguments += [text for seed in range(seeds) for text in ("--seed", str(seed))]
    return [*arguments, "--shuffle", "--device", "cpu", "--out", str(out)]


def wait_for_units(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(list(out.glob("units/**/seed-*.safetensors"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"fewer than {count} units within a minute"
        time.sleep(0.005)


def all_columns(folder: Path) -> dict[str, dict[str, list[Any]]]:
    return {
        unit.title: {name: column.tolist() for name, column in unit.columns().items()}
        for unit in open_run(folder).units
    }


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob("*.part"))


@pytest.mark.parametrize("kills", [6, pytest.param(15, marks=pytest.mark.slow)])
def test_a_run_killed_many_times_ends_as_an_undisturbed_one(checkpoint: str, tmp_path: Path, kills: int) -> None:
    killer = start(sys.executable, "-c", KILLER, checkpoint, str(tmp_path / "killed"), str(kills))
    out, err = killer.communicate(timeout=120)
    assert killer.returncode == 0, err
    assert out.startswith(f"{kills} "), out
    plan = make_plan(
        checkpoint=checkpoint, data=["digits-c/*_noise/5"], limit=4, copies=["1"], steps=["1"], lr=["0.05"]
    )
    kept = {unit.title for unit in open_run(tmp_path / "killed").units}
    assert not open_run(tmp_path / "killed").damaged
    run_plan(plan, tmp_path / "killed")
    run_plan(plan, tmp_path / "undisturbed")
    assert kept  # what was finished stayed
    assert len(all_columns(tmp_path / "killed")) == 9
    # Online units that were killed while they were written go on in another company, which is another rounding.
    undisturbed = all_columns(tmp_path / "undisturbed")
    for title, columns in all_columns(tmp_path / "killed").items():
        for name, column in columns.items():
            np.testing.assert_allclose(column, undisturbed[title][name], atol=1e-5 * title.startswith("online"), rtol=0)
    assert not leftovers(tmp_path / "killed")


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_the_command_killed_and_then_interrupted(checkpoint: str, tmp_path: Path, kills: int) -> None:
    chance = random.Random(5)
    out = tmp_path / "killed"
    finished, seeds = 0, 2 + 2 * kills  # enough that some are left for the interrupt
    for kill in range(kills + 1):
        process = start(sys.executable, "-m", "testtime", *command(checkpoint, out, seeds))
        wait_for_units(out, finished + chance.randrange(1, 3), process)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL if kill < kills else signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if kill < kills else 130), err
        if kill == kills:
            assert err.splitlines()[-1].startswith("stopped; run ")
        run = open_run(out)
        assert not run.damaged
        assert finished < len(run.units) < 16 * seeds
        finished = len(run.units)
    assert cli.run(command(checkpoint, out, seeds)) == 0
    assert cli.run(command(checkpoint, tmp_path / "undisturbed", seeds)) == 0
    assert len(all_columns(out)) == 16 * seeds
    assert all_columns(out) == all_columns(tmp_path / "undisturbed")
    assert not leftovers(out)


def test_a_file_that_may_not_grow_is_one_line_and_the_run_resumes(checkpoint: str, tmp_path: Path) -> None:
    arguments = ["eval", "-c", checkpoint, "--data", "digits", "--methods", "fixed", "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "run")]
    # Eight blocks hold run.json, but not the records of 500 images.
    shell = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", sys.executable, "-m", "testtime", *arguments]
    process = start(*shell)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    *before, line = err.splitlines()
    file = tmp_path / "run/units/fixed/digits/seed-0.safetensors"
    assert line == f"error: {file}: cannot be written (File too large)."
    assert all(text.startswith("evaluate  ") for text in before)
    assert open_run(tmp_path / "run").units == []
    assert not leftovers(tmp_path / "run")
    assert cli.run(arguments) == 0
    assert len(open_run(tmp_path / "run").units[0].columns()["sample"]) == 500


def test_a_full_disk_is_one_line_and_the_run_resumes(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        arguments = ["eval", "-c", checkpoint, "--data", "digits", "--data", "digits-c/fog/5", "--methods", "fixed"]
        arguments += ["--limit", "400", "--device", "cpu", "--out", str(disk / "run")]
        assert cli.run(arguments) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith("cannot be written (No space left on device).")
        assert line.startswith(f"error: {disk / 'run' / 'units'}")
        assert [unit.set_name for unit in open_run(disk / "run").units] == ["digits"]
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        assert cli.run(arguments) == 0
        assert len(open_run(disk / "run").units) == 2
        assert not leftovers(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_run_in_which_nothing_was_finished_gives_way(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"checkpoint": checkpoint, "data": ["digits"], "methods": "fixed"}

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run_unit", stop)
        with pytest.raises(KeyboardInterrupt):
            run_plan(make_plan(**given, limit=3), tmp_path / "run")
    assert not open_run(tmp_path / "run").units
    run = run_plan(make_plan(**given, limit=4), tmp_path / "run")
    assert run.configuration["limit"] == 4
    assert [unit.about["counts"]["images"] for unit in run.units] == [4]


def test_a_set_that_the_network_cannot_see_is_refused_before_anything_is_written(
    checkpoint: str, tmp_path: Path
) -> None:
    colour = TensorSet("colour", torch.zeros(2, 3, 16, 16, dtype=torch.uint8), None)
    plan = Plan({"joint": checkpoint}, (SetSpec("colour"),), (MethodSpec("fixed", "fixed"),))
    with pytest.raises(ValueError, match="colour has 3 channels, the network takes 1"):
        run_plan(plan, tmp_path / "run", sets={"colour": colour})
    assert not (tmp_path / "run").exists()
