"""The demo: its shifts, its methods, and a tiny run from the command line to the page."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from testtime import Draws, cli, data, demo, quick_demo
from testtime.adaptation.adapters import Episodic, Fixed, Online
from testtime.evaluation import Run, open_run, open_runs
from testtime.evaluation.records import error, evaluate
from testtime.networks import load
from testtime.report.results import MEAN, Results, collect

KIND = "-epochs-1-seed-3-small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "page"
    demo.run(out, epochs=1, seed=3, small=True)
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return open_run(folder / f"run{KIND}")


@pytest.fixture(scope="module")
def results(run: Run) -> Results:
    return collect([run])


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


def test_methods_are_what_they_are_called(folder: Path) -> None:
    net = load(folder / "network.safetensors")
    kinds = [type(method.make(net, 5)) for method in demo.METHODS]
    assert [method.name for method in demo.METHODS] == ["fixed", "episodic", "online"]
    assert kinds == [Fixed, Episodic, Online]
    for method in demo.METHODS[1:]:
        settings = method.make(net, 5).settings
        assert (settings.copies, settings.seed, settings.steps) == (1, 5, 2)
        images = torch.ones(1, 1, 16, 16)
        assert settings.augment is not None
        assert torch.equal(settings.augment(images, Draws.of(0, torch.arange(1)[:, None]))[:, 0], images)  # no frame


def test_a_demo_leaves_a_report_a_run_and_the_network(folder: Path, run: Run) -> None:
    tables = ["tables.csv", "tables.md", "tables.tex"]
    report = ["figures", "index.html", "network.safetensors", f"run{KIND}", "summary.json", *tables]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*report, f"plain{KIND}", f"training{KIND}"])
    assert run.about["command"].endswith("--epochs 1 --seed 3 --small")
    assert run.about["seeds"] == [3]
    assert run.configuration["limit"] == 60
    net = load(folder / "network.safetensors")
    assert run.configuration["networks"]["joint"]["fingerprint"] == net.fingerprint()
    assert net.card.record["configuration"]["recipe"]["epochs"] == 1
    assert net.card.record["configuration"]["recipe"]["seed"] == 3
    assert len(run.units) == 12


def test_its_errors_are_those_of_evaluate(folder: Path, results: Results) -> None:
    net, sets = load(folder / "network.safetensors"), demo.make_sets(demo.SHIFTS[:3], seed=3)
    (table,) = results.tables
    assert table.columns == ("original", *(shift.title for shift in demo.SHIFTS[:3]), MEAN)
    assert [table.set_name(column) for column in table.columns[:-1]] == list(sets)
    for method in demo.METHODS[:2]:
        for column in table.columns[:-1]:
            adapter = method.make(net, 3, 8)
            records = evaluate(adapter, sets[table.set_name(column)], shuffle=True, seed=3, limit=60)
            assert table.rows[method.name][column].error == pytest.approx(100 * error(records))


def test_a_plain_network_gets_a_branch_and_nothing_else_of_it_changes(folder: Path) -> None:
    plain, branch = (load(folder / f"plain{KIND}" / name / "network.safetensors") for name in ("plain", "branch"))
    assert plain.card.record["configuration"]["recipe"]["method"] == "plain"
    for name, tensor in plain.state_dict().items():
        if not name.startswith("ssl."):
            assert torch.equal(tensor, branch.state_dict()[name]), name
    facts = open_runs(folder / "summary.json")[0].about["demo"]["plain"]
    assert facts["rotation"] == branch.card.record["branch"]["held_out"]["error"]
    assert list(facts["errors"]) == ["original", "gaussian noise"]
    sets, page = demo.make_sets(demo.SHIFTS[:3], seed=3), (folder / "index.html").read_text()
    for column, name in (("original", "digits"), ("gaussian noise", "digits-shifts/gaussian noise")):
        for method in (demo.METHODS[0], demo.METHODS[2]):
            records = evaluate(method.make(branch, 3), sets[name], shuffle=True, seed=3, limit=60)
            assert facts["errors"][column][method.name] == pytest.approx(100 * error(records), abs=2)  # rounding
        row = facts["errors"][column]
        assert f"{column} {row['fixed']:.1f} → {row['online']:.1f}" in page


def test_the_page_shows_the_numbers_of_the_run(folder: Path, results: Results) -> None:
    page = (folder / "index.html").read_text()
    rows = results.tables[0].rows
    shown = re.findall(r'<td data-value="([\d.]+)"', page)
    assert [float(value) for value in shown] == pytest.approx(
        [rows[method][column].error for column in results.tables[0].columns for method in rows], abs=1e-4
    )
    for words in ("What you are looking at", "Alpaydin", "gaussian_noise 5", "1,297 clean digits, 1 epoch,"):
        assert words in page
    assert 'aria-label="digits-shifts: error along the stream"' in page
    assert "Sample images are omitted" not in page


def test_the_summary_has_the_same_tables_and_says_how_long_it_took(folder: Path, results: Results) -> None:
    (summary,) = open_runs(folder / "summary.json")
    assert collect([summary]).tables == results.tables
    facts = summary.about["demo"]
    assert facts["small"] is True
    assert facts["choice"] == demo.CHOICE
    assert 0 < facts["training"] < facts["seconds"]


def test_a_second_call_does_nothing_twice(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder / f"run{KIND}").rglob("*.safetensors")}
    checkpoint = (folder / f"training{KIND}/network.safetensors").read_bytes()
    numbers = json.loads((folder / "summary.json").read_text())["runs"][0]["units"]
    demo.run(folder, epochs=1, seed=3, small=True)
    assert {path: path.stat().st_mtime_ns for path in (folder / f"run{KIND}").rglob("*.safetensors")} == before
    assert (folder / f"training{KIND}/network.safetensors").read_bytes() == checkpoint
    assert json.loads((folder / "summary.json").read_text())["runs"][0]["units"] == numbers


def test_a_missing_extra_is_reported_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("testtime.report.pages.find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setattr(demo, "train_network", lambda *_: pytest.fail("it trained"))
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib.*pip install 'testtime\[report\]'"):
        demo.run(tmp_path, small=True)


def test_a_quick_demo_shows_the_effect_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("testtime.demo.train", lambda *_, **__: pytest.fail("it trained"))
    monkeypatch.setattr(quick_demo, "IMAGES", 100)
    assert cli.run(["demo", "--quick", "--out", str(tmp_path)]) == 0
    (run,) = open_runs(tmp_path / "run-quick-seed-0")
    (table,) = collect([run]).tables
    assert table.columns == ("original", "contrast", "dim light", "brightness", MEAN)
    assert table.rows["online"][MEAN].error < 0.7 * table.rows["fixed"][MEAN].error
    card = load(quick_demo.NETWORK).card
    assert run.configuration["methods"]["online"]["settings"]["lr"] == card.settings["online"]["lr"]
    assert f"to {table.rows['online'][MEAN].error:.1f}%" in capsys.readouterr().out
    assert "cut the error on 3 shifts" in (tmp_path / "index.html").read_text()
    assert cli.run(["demo", "--quick", "--epochs", "2", "--out", str(tmp_path)]) == 2
