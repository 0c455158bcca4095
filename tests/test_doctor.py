"""`testtime doctor`: what it finds, and that it gives nothing private away."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from testtime import cli, doctor, kernels


def test_it_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--no-speed", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for text in (version("torch"), "digits-resnet8-gn-joint", "matplotlib", f"{torch.get_num_threads()} of torch"):
        assert text in out
    assert str(Path.home()) not in out


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json", "--no-speed", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == version("torch")
    assert found["speed"] is None
    assert found["extras"]["cli"]["typer"]


def test_a_missing_extra_a_quota_and_kernels_that_are_off_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"x": ("no_such_package",)})
    monkeypatch.setattr("testtime.threads.find_quota", lambda: 1.5)
    monkeypatch.setattr(kernels, "enabled", lambda: False)
    text = "\n".join(doctor.format_examination(doctor.examine(speed=False)))
    assert "no_such_package missing" in text
    assert "a CPU quota of 1.5" in text
    assert "TESTTIME_KERNELS" in text


def test_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", 0.01)
    found = doctor.measure_speed("cpu")
    assert found["steps_per_second"] > 0
