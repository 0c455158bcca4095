"""What goes wrong is one line on standard error, whatever the texts in it hold."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from command_line import EVIL, TINY, Run, assert_tame

from testtime import cli

SUMMARISE = "testtime.evaluation.predict_files.summarise"


def test_failures_are_one_line_and_exit_code_1(run: Run, tmp_path: Path, network: Path, pictures: Path) -> None:
    fake = tmp_path / "fake.png"
    fake.write_text("I am a text\nof two lines")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(network.read_bytes()[:-9])
    for arguments in (
        ["predict", fake, "-c", network],
        ["predict", tmp_path / "missing.png", "-c", network],
        ["predict", tmp_path / "empty", "-c", network],
        ["predict", pictures, "-c", cut],
        ["predict", pictures, "-c", tmp_path / "missing"],
        ["info", cut],
        ["info", fake],
        ["train", "--data", "cifar10", "--data-root", tmp_path, "--out", tmp_path / "run"],
        [*TINY, "--out", tmp_path / "file"],
        [*TINY, "--lr", "1e30", "--out", tmp_path / "burnt"],
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (1, ""), arguments
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        if fake in arguments:
            assert str(fake) in err


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (RuntimeError("CUDA out of memory.\nTried to allocate"), 1, "error: CUDA out of memory. Tried to allocate\n"),
        (MemoryError(), 1, "error: MemoryError\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_whatever_goes_wrong_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int, line: str
) -> None:
    def fail(source: str) -> None:
        raise failure

    monkeypatch.setattr(SUMMARISE, fail)
    assert run("info", "x") == (code, "", line)
    if isinstance(failure, Exception):
        monkeypatch.setenv("TESTTIME_DEBUG", "1")
        with pytest.raises(type(failure)):
            cli.run(["info", "x"])


def test_what_goes_wrong_is_printable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str) -> None:
        raise ValueError(EVIL)

    monkeypatch.setattr(SUMMARISE, fail)
    for arguments in (["info", "x"], ["info", EVIL, EVIL], [EVIL], ["predict", "x", "--device", EVIL]):
        code, out, err = run(*arguments)
        assert code in (1, 2)
        assert (out, err.count("\n")) == ("", 1)
        assert_tame(err)


@pytest.mark.filterwarnings("always:it ")
def test_warnings_are_one_line_each_and_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = warnings.showwarning

    def warn(source: str) -> None:
        for text in ("it is not trained", f"it moves {EVIL}", "it is not trained"):
            warnings.warn(text, stacklevel=1)
        warnings.warn("it is not trained", RuntimeWarning, stacklevel=1)
        raise ValueError("no")

    monkeypatch.setattr(SUMMARISE, warn)
    code, out, err = run("info", "x")
    assert (code, out) == (1, "")
    assert_tame(err)
    first, second, last = err.splitlines()
    assert (first, last) == ("warning: it is not trained", "error: no")
    assert second.startswith("warning: it moves a")
    assert warnings.showwarning is before
