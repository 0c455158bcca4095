"""The `testtime` command in a process of its own, and texts that no output may obey."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]
"""The fixture `run`: takes the words of a command, returns its exit code and what it printed."""

TINY = [
    "train",
    "--data",
    "digits",
    "--depth",
    "8",
    "--limit",
    "48",
    "--batch",
    "16",
    "--epochs",
    "3",
    "--statistics",
    "0",
    "--device",
    "cpu",
]

EVIL = "a\nerror: b\x1b[31m\u202e\ud800[/red]"


def assert_tame(text: str) -> None:
    """Nothing in it steers a terminal or begins a line of its own."""
    assert all(line.isprintable() for line in text.split("\n"))
    assert not re.search(r"^error: b", text, re.MULTILINE)


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a command."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | variables
    command = [sys.executable, "-m", "testtime", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    )


def run_python(program: str) -> tuple[int, str, str]:
    """Run a program; returns its exit code and what it printed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a process has written a file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {path.name} within a minute"
        time.sleep(0.01)
