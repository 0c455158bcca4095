"""What ImageNet costs: the arithmetic by hand, and the document against the committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testtime.report import costs

ROOT = Path(__file__).parent.parent


def train_row(name: str, rate: float, size: int = 224, **more: Any) -> dict[str, Any]:
    return {"name": name, "network": "resnet18", "size": size, "images_per_s": rate, **more}


def engine_row(name: str, rate: float, peak: float, network: str = "resnet18") -> dict[str, Any]:
    return {"name": name, "network": network, "images_per_s": rate, "peak_mib": peak}


TRAINING = {
    "command": "python benchmarks/train.py",
    "hardware": "a GPU",
    "photographs": "some",
    "rows": [
        train_row("training, fed from the cache", 9999.0, size=128, share_of_steps=0.5),
        train_row("decode JPEGs into the packed cache", 2000.0),
        train_row("training steps, images on the device", 4000.0, share_of_steps=1.0),
        train_row("training, fed from the cache", 3600.0, share_of_steps=0.9),
        train_row("look at images that the threshold passes over", 5000.0),
    ],
}
ENGINE = {
    "command": "benchmarks/engine.py",
    "hardware": "a GPU",
    "rows": [
        engine_row("16 streams, bf16", 1e6, 1.0, "resnet26"),
        engine_row("one online stream, bf16", 20.0, 700.0),
        engine_row("4 streams, bf16", 50.0, 2048.0),
        engine_row("16 streams, bf16", 80.0, 2048.0 + 12 * 512),
        engine_row("64 streams, bf16", 400.0, 2048.0 + 60 * 512),
        engine_row("4 episodes of 10 steps, bf16", 5.0, 1.0),
        engine_row("16 episodes of 10 steps, bf16", 8.0, 1.0),
    ],
}


def cells(text: str, first: str) -> list[str]:
    """The row of a table that begins with a word."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_arithmetic_is_the_divisions_it_shows() -> None:
    text = costs.tell_costs(TRAINING, ENGINE)
    assert cells(text, "decode, once")[1:3] == ["1,281,167 / 2,000.0", "11 min"]  # 640.6 s
    assert cells(text, "an epoch")[1:] == ["1,281,167 / 3,600.0", "6 min", "an eighth", "44 s"]  # 355.9 s, 44.5 s
    assert cells(text, "90 epochs")[2] == "8.9 h"  # 32,029 s
    assert cells(text, "90 epochs")[4] == "67 min"
    assert cells(text, "standard, bf16")[1:] == ["800,000 / 8.0", "27.8 h", "100,000 / 8.0", "3.5 h"]
    # 16 sets are 16 streams; on eight GPUs two sets each, one after the other.
    assert cells(text, "online, bf16")[1:] == ["800,000 / 80.0", "2.8 h", "100,000 / 20.0", "83 min"]
    gated = ["800,000 / 5,000.0 + 0.2 × 800,000 / 8.0", "5.6 h", "100,000 / 5,000.0 + 0.2 × 100,000 / 8.0", "42 min"]
    assert cells(text, "standard, bf16, threshold")[1:] == gated  # 160 s + 20,000 s; 20 s + 2,500 s
    assert cells(text, "fixed")[1:3] == ["800,000 / 5,000.0", "3 min"]
    assert cells(text, "bf16")[2] == "0.50 GiB"
    assert cells(text, "training set")[2] == "251.9 GB"
    assert "90% of its rate" in text


@pytest.mark.parametrize(("training", "engine"), [(None, None), (TRAINING, None), (None, ENGINE)])
def test_what_is_not_measured_is_said(training: Any, engine: Any) -> None:
    text = costs.tell_costs(training, engine)
    missing = [f"results/{name}-h200.json` does not have it" in text for name in ("photographs", "engine")]
    assert missing == [training is None, engine is None]
    if training is None:
        assert "threshold |" not in text  # it needs the time of a look


def test_a_damaged_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (costs.DOCUMENT, costs.TRAINING):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("{")
    monkeypatch.chdir(tmp_path)
    assert costs.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {costs.TRAINING}: ")
    assert said.count("\n") == 1
    assert (tmp_path / costs.DOCUMENT).read_text() == "{"


def test_the_document_says_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """After new results: python -m testtime.report.costs."""
    monkeypatch.chdir(ROOT)
    assert costs.main(["--check"]) == 0
    with pytest.raises(ValueError, match="must have the lines"):
        costs.update("nothing", None, None)
