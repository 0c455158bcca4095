"""benchmarks/motion_blur.py: levels as ImageNet-C has them, directions as they are called, errors counted by class."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import testtime as tt
from pictures import smooth_pictures
from scripts import load_script


@pytest.fixture
def motion(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script("benchmarks/motion_blur.py")
    monkeypatch.setattr(module, "CHUNK", 3)
    return module


def test_the_directions_are_what_they_are_called(motion: ModuleType) -> None:
    images, samples = torch.zeros(2, 3, 224, 224, dtype=torch.uint8), torch.arange(2)
    images[:, :, 100, 100] = 255
    right, down = (motion.blur(images, samples, name, 0).long() for name in ("right", "down"))
    assert right[0, 0].nonzero()[:, 0].unique().tolist() == [100]  # one row
    assert down[0, 0].nonzero()[:, 1].unique().tolist() == [100]  # one column
    spread = motion.blur(smooth_pictures(2, 224, 224), samples, "any direction", 0)
    assert spread.shape == images.shape
    level = motion.blur(images, samples, "level 3", 0)
    assert level.equal(tt.corruptions.corrupt(images, "motion_blur", 3, samples=samples))
    assert motion.blur(images, samples, "original", 0) is images


def test_every_variant_is_counted_by_class(motion: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, pixels in enumerate(smooth_pictures(5, 40, 40)):
        folder = tmp_path / "photographs" / "val" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    net = tt.resnet26(classes=2, depth=8, size=16)
    net.describe(classes=("ant", "bee"), size=16)
    net.save(tmp_path / "net.safetensors")
    out = tmp_path / "motion.json"
    given = ["--checkpoint", str(tmp_path / "net.safetensors"), "--data-root", str(tmp_path / "photographs")]
    monkeypatch.setattr(sys, "argv", ["motion_blur.py", *given, "--copies", "2", "--out", str(out)])
    motion.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["set"] for row in rows] == list(motion.VARIANTS)
    for row in rows:
        assert row["images"] == 5
        for name in ("fixed", "online"):
            ants, bees = row[f"{name}_by_class"]
            assert row[name] == pytest.approx((3 * ants + 2 * bees) / 5)
            assert sum(row[f"{name}_answers"]) == 5
