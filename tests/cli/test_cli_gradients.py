"""`testtime gradients`: one line and one entry for each set, and only the missing ones are measured."""

from __future__ import annotations

from pathlib import Path

from command_line import Run

from testtime.diagnosis.gradient_study import read_gradient_study

FEW = ["gradients", "-c", "digits-resnet8-gn-joint", "--limit", "20", "--single", "4", "--device", "cpu"]


def test_every_set_is_measured_once(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "study.json"
    code, lines, err = run(*FEW, "--data", "digits-c/*/5", "--data", "digits", "--out", out)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines.splitlines()] == [f"{number}/16" for number in range(1, 17)]
    assert lines.splitlines()[-1].startswith("16/16  digits  inner ")
    assert len(read_gradient_study(out)["sets"]) == 16
    written = out.stat().st_mtime_ns
    assert run(*FEW, "--data", "digits", "--out", out) == (0, "", "")
    assert out.stat().st_mtime_ns == written
