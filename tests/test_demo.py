"""The demo: its shifts, its measuring, and a tiny run from the command line to the page."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from testtime import Draws, YNet, cli, data, demo, resnet26
from testtime.adapt import Episodic, Fixed, Online
from testtime.evaluate import Record

QUICK = ["demo", "--quick", "--epochs", "1", "--seed", "3", "--out"]


@pytest.fixture(scope="module")
def net() -> YNet:
    return resnet26(depth=8, channels=1, size=16, seed=1).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "page"
    assert cli.run([*QUICK, str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "demo.json").read_text())


def test_there_are_the_shifts_that_were_promised() -> None:
    kinds = [shift.kind for shift in demo.SHIFTS]
    assert {"gaussian_noise", "impulse_noise", "glass_blur", "contrast", "brightness", "pixelate"} < set(kinds)
    assert len(kinds) == len(set(kinds)) >= 7


@pytest.mark.parametrize("shift", demo.SHIFTS, ids=lambda shift: shift.kind)
def test_a_shift_changes_pictures_and_nothing_else(shift: demo.Shift) -> None:
    clean = data.open("digits")
    shifted = demo.shift_set(clean, shift, seed=1)
    assert shifted.shape == clean.shape
    assert shifted.labels is not None
    assert clean.labels is not None
    assert torch.equal(shifted.labels, clean.labels)
    images = shifted.images(slice(20))
    assert images.dtype == torch.uint8
    assert (images != clean.images(slice(20))).flatten(1).any(1).all()
    # One picture alone, in another order, under the same seed is the same picture.
    assert torch.equal(demo.shift_set(clean, shift, seed=1).images([7, 2]), images[[7, 2]])


def test_uneven_light_depends_on_the_seed_and_falls_across_the_picture() -> None:
    black = torch.zeros(3, 1, 16, 16, dtype=torch.uint8)
    one, other = (demo.uneven_light(black, Draws.of(seed, torch.arange(3))) for seed in (0, 1))
    assert not torch.equal(one, other)
    opposite = one.float() + one.flip(-2, -1).float()  # light and shade lie opposite each other
    assert (opposite - 0.6 * 255).abs().max() <= 1
    assert one.max() <= 0.6 * 255


def test_dim_light_keeps_a_fifth() -> None:
    pixels = torch.tensor([0, 100, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    assert demo.dim_light(pixels, Draws.of(0, torch.arange(1))).flatten().tolist() == [0, 20, 51]


def test_modes_are_what_they_are_called(net: YNet) -> None:
    kinds = {"fixed": Fixed, "episodic": Episodic, "online": Online}
    for mode in demo.MODES:
        adapter = demo.make_adapter(net, mode, seed=5)
        assert type(adapter) is kinds[mode]
        if mode != "fixed":
            assert adapter.settings.seed == 5
            assert adapter.settings.lr == demo.SETTINGS[mode]["lr"]


def test_measuring_counts_what_evaluate_says(net: YNet) -> None:
    told: list[tuple[int, int, str]] = []
    clean = data.open("digits")
    entries = demo.measure(net, clean, demo.SHIFTS[4:5], limit=7, progress=lambda *said: told.append(said))
    assert [entry["title"] for entry in entries] == ["clean", "brightness"]
    for entry in entries:
        for mode in demo.MODES:
            found = entry["modes"][mode]
            assert len(found["stream"]) == 7
            assert found["error"] == round(100 * found["stream"].count("-") / 7, 2)
            assert found["adapted"] == (0 if mode == "fixed" else 7)
        fixed, online = entry["modes"]["fixed"]["stream"], entry["modes"]["online"]
        pairs = list(zip(fixed, online["stream"], strict=True))
        assert online["to_right"] == pairs.count(("-", "+"))
        assert online["to_wrong"] == pairs.count(("+", "-"))
    assert told[-1][:2] == (42, 42)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_the_summary_is_plain_arithmetic() -> None:
    def entry(fixed: float, episodic: float, online: float) -> dict[str, Any]:
        values = {"fixed": fixed, "episodic": episodic, "online": online}
        return {"modes": {mode: {"error": value, "ms": value / 10} for mode, value in values.items()}}

    summary = demo.summarise([entry(1, 2, 3), entry(40, 30, 10), entry(20, 24, 20)])
    assert summary["fixed"] == {"clean": 1, "mean": 30, "reduction": 0, "ms": 2.03}
    assert summary["episodic"] == {"clean": 2, "mean": 27, "reduction": 10, "ms": 1.87}
    assert summary["online"] == {"clean": 3, "mean": 15, "reduction": 50, "ms": 1.1}


def test_samples_are_spread_flips_and_one_that_became_wrong() -> None:
    def records(rights: list[bool]) -> list[Record]:
        return [
            Record(n, 4, 4 if right else 9, 0, right, False, 0.0, 0.0, 0.0, True, False)
            for n, right in enumerate(rights)
        ]

    clean = data.open("digits")
    before, after = records([False] * 20 + [True] * 3), records([True] * 20 + [False] * 3)
    samples = demo.pick_samples(clean, clean, before, after, count=5)
    assert [sample["sample"] for sample in samples] == [2, 7, 12, 17, 21]
    assert [sample["became"] for sample in samples] == ["right"] * 4 + ["wrong"]
    assert [(sample["fixed"], sample["online"]) for sample in samples] == [(9, 4)] * 4 + [(4, 9)]
    assert base64.b64decode(samples[0]["pixels"]) == clean.images([2]).numpy().tobytes()
    assert demo.pick_samples(clean, clean, before, before) == []


def test_a_run_leaves_a_page_and_its_numbers(folder: Path, results: dict[str, Any]) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "index.html", "network.safetensors"]
    assert results["quick"] is True
    assert results["seed"] == 3
    assert results["command"].endswith("--epochs 1 --seed 3 --quick")
    assert results["training"]["recipe"]["epochs"] == 1
    assert results["training"]["recipe"]["seed"] == 3
    assert demo.summarise(results["sets"]) == results["summary"]


def test_the_page_shows_the_numbers_of_the_run(folder: Path, results: dict[str, Any]) -> None:
    page = (folder / "index.html").read_text()
    cells = re.findall(r"<td[^>]*>([\d.]+)</td>", page)
    errors = [f"{entry['modes'][mode]['error']:.1f}" for entry in results["sets"] for mode in demo.MODES]
    assert cells[: len(errors)] == errors


def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    values = {mode: {"mean": 12.34, "ms": 5.0} for mode in demo.MODES}
    canned = {"sets": [], "summary": values, "seconds": {"total": 2.0}}
    monkeypatch.setattr("testtime.demo.run", lambda *args, **kwargs: canned)
    assert cli.run(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "mean of the shifts        12.3" in printed
    assert str(tmp_path / "index.html") in printed


def test_a_missing_extra_is_told_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("testtime.report.find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setattr(demo, "train_network", lambda *_: pytest.fail("it trained"))
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: pip install 'testtime\[report\]'"):
        demo.run(tmp_path, quick=True)
