"""Ctrl-C ends a command with one line and exit code 130, wherever it strikes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import TINY, Run, run_python, start, wait_for

SUMMARISE = "testtime.evaluation.predict_files.summarise"

# Every program replaces the work of `testtime info` and runs it.
INFO = """
import signal, sys, threading, time
import torch
import testtime.cli
from testtime.evaluation import predict_files

{work}
predict_files.summarise = interrupt
sys.argv[1:] = ["info", "x"]
testtime.cli.main()
"""

# A thread that is never joined, as Ctrl-C leaves behind where it strikes while a pool is starting one.
ABANDONED = """
def work():
    while True:
        torch.randn(64, 64) @ torch.randn(64, 64)

def interrupt(source):
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
    print("half a line", end="")
    raise KeyboardInterrupt
"""

TWICE = """
def clean_up():
    try:
        yield
    finally:
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)

def interrupt(source):
    held = clean_up()
    next(held)
    signal.raise_signal(signal.SIGINT)
"""

# In the place of torch: it takes long to import, and native code in it swallows exceptions.
SLOW = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
for _ in range(600):
    try:
        time.sleep(0.1)
    except BaseException:
        pass
"""


@pytest.mark.parametrize(("work", "out"), [(ABANDONED, "half a line"), (TWICE, "")])
def test_a_process_ends_whatever_else_it_is_doing(work: str, out: str) -> None:
    assert run_python(INFO.format(work=work)) == (130, out, "stopped\n")


@pytest.mark.parametrize("swallows", [False, True])
def test_a_slow_import_is_interrupted(tmp_path: Path, swallows: bool) -> None:
    (tmp_path / "torch.py").write_text(SLOW if swallows else SLOW.replace("BaseException", "ImportError"))
    process = start("info", "x", PYTHONPATH=str(tmp_path))
    try:
        wait_for(tmp_path / "begun", process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "stopped\n")


def test_where_ctrl_c_is_ignored_it_stays_ignored() -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from testtime import cli; cli._call = lambda arguments: signal.raise_signal(signal.SIGINT) or 0\n"
        "cli.main()"
    )
    assert run_python(program) == (0, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_that_breaks_a_lock_is_ctrl_c_and_a_failing_disk_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(failure: Exception) -> Callable[[str], None]:
        def act(source: str) -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                raise failure

        return act

    monkeypatch.setattr(SUMMARISE, interrupt(RuntimeError("cannot release un-acquired lock")))
    assert run("info", "x") == (130, "", "stopped\n")
    monkeypatch.setattr(SUMMARISE, interrupt(OSError(28, "No space left on device")))
    assert run("info", "x") == (1, "", "error: [Errno 28] No space left on device\n")


def test_a_training_is_interrupted(tmp_path: Path) -> None:
    process = start(*TINY, "--epochs", "1000", "--out", str(tmp_path))
    wait_for(tmp_path / "checkpoint.safetensors", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "stopped; run the same command again to resume"
    assert "Traceback" not in err
