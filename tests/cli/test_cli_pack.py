"""`testtime pack` and `testtime unpack`."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run


def test_a_run_is_packed_and_unpacked(run: Run, network: Path, tmp_path: Path) -> None:
    assert run("pack", network.parent, tmp_path / "packed")[0] == 0
    parts = list((tmp_path / "packed").glob("part-*"))
    assert len(parts) == 1
    assert run("unpack", tmp_path / "packed", tmp_path / "again")[0] == 0
    files = {path.name: path.read_bytes() for path in network.parent.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files


def test_the_limit_is_in_mebibytes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_bytes(bytes(3 << 20))
    assert run("pack", tmp_path / "run", tmp_path / "packed", "--limit", "2")[0] == 0
    assert [path.stat().st_size for path in sorted((tmp_path / "packed").glob("part-*"))] == [2 << 20, 1 << 20]


@pytest.mark.parametrize(("words", "code"), [(["nothing", "out"], 1), (["nothing", "out", "--limit", "0"], 2)])
def test_what_cannot_be_packed_is_one_line(
    run: Run, words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = run("pack", *words)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_unpacked_is_one_line(run: Run, tmp_path: Path) -> None:
    found, out, err = run("unpack", tmp_path, tmp_path / "again")
    assert (found, out, err.count("\n")) == (1, "", 1)
    assert "index.json" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_help_has_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"testtime {command} " in out.partition("Example")[2]
