"""The documents: tables and figures are what the result files say; the README's code shows the effect."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate import build
from generate.documents import fill, table

import testtime as tt
from testtime.corruptions import CORRUPTIONS
from testtime.demo import CHOICE, METHODS, SHIFTS
from testtime.evaluation import make_plan, open_runs
from testtime.report.paper import PAPER_NAMES, find_table
from testtime.report.results import MEAN, collect
from testtime.report.sources import compare_methods

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "results/cifar10"
CODE = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
PINNED = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def parts_of(page: str) -> dict[str, str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- begin: (.*?) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip(" *\\†") for cell in line.strip("|").split("|")] for line in text.splitlines() if line]


def test_generated_parts_are_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After new results: python docs/generate."""
    assert build.main(["--check"]) == 0
    for page in build.make_parts():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(text.replace("33.4", "33.5"), encoding="utf-8")
    capsys.readouterr()
    assert build.main(["--check"], tmp_path) == 1
    assert "docs/results.md" in capsys.readouterr().err


@pytest.mark.skipif(PINNED is None or version("matplotlib") != PINNED[1], reason="another matplotlib draws otherwise")
def test_figures_are_current() -> None:
    """After new results: python docs/generate."""

    def plain(svg: str) -> tuple[str, np.ndarray]:
        bare = re.sub(r'(id="|href="#|url\(#)[^")]*', "", svg)
        number = r"-?\d+\.?\d*(?:e-?\d+)?"
        return re.sub(number, "#", bare), np.array(re.findall(number, bare), float)

    drawn = build.make_figures()
    assert {ROOT / path for path in drawn} == set((ROOT / build.FIGURES).glob("*.svg"))
    for path, svg in drawn.items():
        words, numbers = plain(svg)
        known, held = plain((ROOT / path).read_text(encoding="utf-8"))
        assert words == known, path
        assert np.allclose(numbers, held, atol=0.01), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_result_files_exist(page: Path) -> None:
    commands = re.sub(r"--out \S+", "", page.read_text(encoding="utf-8"))
    files = re.findall(r"\bresults/[\w/-]+\.json", commands)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_only_tables_are_generated_and_all_figures_shown() -> None:
    for page in PAGES:
        for part in parts_of(str(page.relative_to(ROOT))).values():
            assert all(line.startswith("|") for line in part.splitlines() if line)
    shown = {
        name for page in PAGES for name in re.findall(r"figures/([\w-]+\.svg)[)\"]", page.read_text(encoding="utf-8"))
    }
    assert shown == {path.name for path in (ROOT / build.FIGURES).glob("*.svg")}
    assert all(path.stat().st_size < 200_000 for path in (ROOT / build.FIGURES).iterdir())


@pytest.mark.parametrize("code", CODE[1:])
def test_the_readmes_code_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_readmes_model_has_what_tent_changes() -> None:
    names: dict[str, Any] = {}
    (code,) = [code for code in CODE if "tt.split(" in code]
    exec(compile(code, "README.md", "exec"), names)
    assert tt.Online(tt.wrap(names["model"]), method="tent").predict(names["images"][:8]).adapted.all()


def test_the_readmes_first_code_shows_that_learning_helps(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(CODE[0], "README.md", "exec"), {})
    (fixed, before), (online, after) = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (fixed, online) == ("Fixed", "Online")
    assert float(after.rstrip("%")) < float(before.rstrip("%")) - 10


@pytest.fixture(scope="module")
def counts() -> dict[tuple[str, str], tuple[int, int]]:
    """Right answers and images by method and set of level 5, straight from the files."""
    known = {}
    for name in ("past-joint-parts", "past-joint", "baseline", "uda", "alp", "standard-level-5", "levels"):
        for unit in json.loads((RESULTS / f"{name}.json").read_text())["runs"][0]["units"]:
            known[unit["method"], unit["set"]] = unit["counts"]["is_right"], unit["counts"]["images"]
    return known


def test_level_5_by_hand(counts: dict[tuple[str, str], tuple[int, int]]) -> None:
    paper = find_table("cifar10-c", 5)
    assert paper is not None
    rows = rows_of(parts_of("docs/results.md")["level 5"])
    for method, title in PAPER_NAMES.items():
        at = [row[0] for row in rows].index(f"{method} ({title})")
        found = [counts[method, name] for name in ("cifar10", *(f"cifar10-c/{name}/5" for name in CORRUPTIONS))]
        ours = [100 * (images - right) / images for right, images in found]
        for row, values in ((rows[at], ours), (rows[at + 2], paper.values[method])):
            expected = [*values, sum(values[1:]) / 15]
            np.testing.assert_allclose([float(cell) for cell in row[1:]], expected, atol=0.0501)


def test_flips_by_hand() -> None:
    right = {
        (unit.method, unit.set_name): unit.verdicts().right.astype(bool)
        for name in ("levels", "standard-level-5")
        for unit in open_runs(RESULTS / f"{name}.json")[0].units
        if unit.level == 5
    }
    rows = {row[0]: row[1:] for row in rows_of(parts_of("docs/results/streams.md")["flips"])}
    for method, title in (("episodic", "episodic (TTT)"), ("online", "online (TTT-Online)")):
        pairs = [(right[method, name], right["fixed", name]) for name in (f"cifar10-c/{one}/5" for one in CORRUPTIONS)]
        better, worse = (sum(int((a & ~b).sum()) for a, b in each) for each in (pairs, [pair[::-1] for pair in pairs]))
        assert rows[title][1:3] == [f"{better:,}", f"{worse:,}"]


def test_the_files_belong_together() -> None:
    net = tt.load("cifar10-resnet26-gn-joint")
    names = ("levels", "standard-level-5", "standard-levels-1-4")
    runs = [open_runs(RESULTS / f"{name}.json")[0] for name in names]
    assert {run.configuration["networks"]["joint"]["fingerprint"] for run in runs} == {net.fingerprint()}
    known = {unit.set_name: unit.verdicts() for unit in runs[0].units if unit.method == "fixed"}
    for unit in (unit for run in runs[1:] for unit in run.units if unit.method == "fixed"):
        whole, here = known[unit.set_name], unit.verdicts()
        assert np.array_equal(whole.right[np.isin(whole.samples, here.samples)], here.right)


@pytest.mark.parametrize("name", ["past-joint", "past-joint-mild", "past-joint-parts", "best-levels"])
def test_the_results_of_best_are_of_its_present_settings(name: str) -> None:
    (run,) = open_runs(RESULTS / f"{name}.json")
    plan = make_plan("best", checkpoint="x", methods=",".join(run.configuration["methods"]), precision=["bf16"])
    ours = {method.name: method.describe(tt.load("cifar10-resnet26-gn-joint")) for method in plan.methods}
    assert run.configuration["methods"].keys() == ours.keys() == {unit.method for unit in run.units}
    different = compare_methods(run.configuration["methods"], ours)
    assert [one for one in different if ".precision" not in one] == []  # its default depends on the device


def test_the_results_of_the_demo_are_of_its_present_settings() -> None:
    (run,) = open_runs(ROOT / build.DEMO)
    assert (run.about["demo"]["quick"], run.about["demo"]["choice"]) == (False, CHOICE)
    (shown,) = collect([run]).tables
    assert shown.shifted == tuple(shift.title for shift in SHIFTS)
    ours = {method.name: method.describe(tt.load("digits-resnet8-gn-joint")) for method in METHODS}
    assert compare_methods(run.configuration["methods"], ours) == []
    means = {method: row[MEAN].error for method, row in shown.rows.items()}
    assert means["online"] <= 0.6 * means["fixed"]
    assert means["episodic"] < means["fixed"]


def test_parts_are_filled() -> None:
    text = "a\n<!-- begin: one -->\nold\n<!-- end -->\nb\n<!-- begin: two -->\n<!-- end -->\n"
    assert fill(text, {"one": "1\n1", "two": r"\1"}) == (
        "a\n<!-- begin: one -->\n1\n1\n<!-- end -->\nb\n<!-- begin: two -->\n\\1\n<!-- end -->\n"
    )
    filled = fill(text, {"one": "[x](/results/x.json)", "two": ""}, Path("docs/results/levels.md"))
    assert "[x](../../results/x.json)" in filled
    for wrong in (text + "<!-- begin: three -->", text + text, text.replace("two", "2"), ""):
        with pytest.raises(ValueError, match="must have the parts one, two"):
            fill(wrong, {"one": "", "two": ""})
    assert table(["a", "b"], [["c", "1"]]) == "| a | b |\n|---|---:|\n| c | 1 |"
