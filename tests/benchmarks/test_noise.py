"""benchmarks/noise.py: two streams that differ in nothing but which images a step has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scripts import load_script


@pytest.fixture
def noise() -> ModuleType:
    return load_script("benchmarks/noise.py")


def test_both_streams_have_as_many_steps_and_copies_of_every_image(noise: ModuleType) -> None:
    for order, settings in noise.orders(48, 0, torch.device("cpu")).values():
        assert len(order) == 48
        assert (torch.bincount(order.flatten(), minlength=48) * settings["copies"]).tolist() == [32] * 48
    one, many = (order for order, _ in noise.orders(48, 0, torch.device("cpu")).values())
    assert one.shape == (48, 1)
    assert many.shape == (48, 32)
    assert len(many[0].unique()) == 32


def test_the_quick_form_runs_without_data(
    noise: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "noise.json"
    monkeypatch.setattr(sys, "argv", ["noise.py", "--quick", "--device", "cpu", "--out", str(out)])
    noise.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["stream"], row["steps"], list(row["errors"])) for row in rows] == [
        ("copies of one image", 32, ["32"]),
        ("copies of many images", 32, ["32"]),
    ]
    assert "digits, 32 images" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--checkpoint", "nowhere"], ["--data-root", "/nowhere"]])
def test_what_is_missing_is_named_in_one_line(
    noise: ModuleType, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["noise.py", "--device", "cpu", *given])
    with pytest.raises(SystemExit, match=r"^[^\n]*nowhere[^\n]*$"):
        noise.main()
