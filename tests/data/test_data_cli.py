"""`testtime data`: the commands print what the library says and exit as promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from testtime.cli import run
from testtime.data import describe_all
from testtime.data.families import FAMILIES
from testtime.data.family import Remote


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "list", "--data-root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for found in describe_all(tmp_path):
        assert any(line.split()[0] == found.name and found.what in line and found.state in line for line in lines)
    assert any(line.strip() == "testtime data get cifar10" for line in lines)


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", "digits"]) == 0
    assert capsys.readouterr().out == "digits is sound\n"
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"")
    assert run(["data", "check", "folder", "--data-root", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path / 'b.png'}: an empty file\n"
    assert run(["data", "check", "cifar10", "--data-root", str(tmp_path)]) == 1
    assert "holds no CIFAR-10" in capsys.readouterr().out


def test_get_reports_failures_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    remote = Remote("http://127.0.0.1:9/a.tar.gz", 9, "md5:0", "a")
    monkeypatch.setitem(FAMILIES, "cifar10", replace(FAMILIES["cifar10"], remotes=(remote,)))
    assert run(["data", "get", "cifar10", "--data-root", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: http://127.0.0.1:9/a.tar.gz: cannot be reached")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["get", "mnist"], ["get", "imagenet"], ["get"], ["check", "mnist"], ["check", "digits", "--root", "x"]],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
