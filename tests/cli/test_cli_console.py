"""Progress in a terminal and in a pipe, and lines whose texts come from outside."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
from command_line import EVIL, assert_tame

from testtime.cli.console import echo, progress


class Stream(io.StringIO):
    """Standard error, as a terminal or as a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def shown(self) -> str:
        """What was written, without the escapes that steer a terminal."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def test_progress_in_a_pipe_is_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    for every, expected in ((0.0, ["read  0/3", "read  1/3", "read  2/3", "read  3/3"]), (1000.0, ["read  3/3"])):
        with progress("read", every) as report:
            for done in range(4):
                report(done, 3, "words")
        lines = capsys.readouterr().err.splitlines()
        assert [line[:9] for line in lines] == expected
        assert all(line.endswith("  words") for line in lines)


def test_progress_measures_anew_when_something_else_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(float(second) for second in range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress("work", every=0) as report:
        for done, total in ((0, 500), (500, 500), (0, 40), (10, 40)):
            report(done, total, "")
    lines = capsys.readouterr().err.splitlines()
    assert "left" not in lines[2]
    assert lines[3].startswith("work  10/40  0.33/s  1:30 ")  # the clock is asked three times for a line: 10 in 30 s


def test_progress_in_a_terminal_is_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal := Stream(True))
    with progress("read") as report:
        report(0, 0, "wait")
        report(1, 3, "")
        report(3, 3, "words")
    assert "\x1b" in terminal.getvalue()
    assert re.search(r"read .*3/3 .* words", terminal.shown())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_printable(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", stream := Stream(is_terminal))
    with progress(EVIL, every=0) as report:
        for done in range(3):
            report(done, 2, EVIL)
    written = stream.shown().replace("\r", "\n")
    assert "[31m" in written  # shown, and not obeyed
    assert "[/red]" in written
    assert_tame(written)


def test_echo_preserves_columns_and_begins_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a   b", "  c\td\x1b[31m\r\u2028e\nerror: f")
    echo("for the others", err=True)
    assert capsys.readouterr() == ("a   b\n  c d\\x1b[31m e error: f\n", "for the others\n")
