"""Summaries of runs: what is made of one is what is made of the folders, and what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report_runs import METHODS, make_benchmark, make_columns, make_run
from testtime import cli
from testtime.evaluation import RunError, open_run, open_runs, write_summary
from testtime.report.publish import publish
from testtime.report.results import MEAN, collect
from testtime.report.run_figures import draw_all

NOISES = ("gaussian_noise", "fog")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs that belong together: two seeds of four methods, and two of the paper's baselines."""
    path = tmp_path_factory.mktemp("runs")
    own = ("plain", "fixed", "episodic", "online")
    make_benchmark(path / "main", 50, "cifar10", (4, 5), own, (0, 1), corruptions=NOISES)
    for method in ("uda", "alp"):
        make_benchmark(path / method, 50, "cifar10", (5,), [method], gradual=False, corruptions=NOISES)
    return [path / name for name in ("main", "uda", "alp")]


@pytest.fixture(scope="module")
def summary(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    publish(folders, out, formats=("md", "latex", "csv", "json"), paper=True)
    return out / "summary.json"


def test_a_summarys_tables_are_those_of_the_folders(summary: Path, tmp_path: Path) -> None:
    publish([summary], tmp_path, formats=("md", "latex", "csv", "json"), paper=True)
    note = "From a summary of runs: whatever needs all records, e.g. sliding windows, is omitted."
    for name in ("tables.tex", "tables.csv", "summary.json"):
        assert (tmp_path / name).read_text() == (summary.parent / name).read_text()
    assert (tmp_path / "tables.md").read_text() == (summary.parent / "tables.md").read_text() + f"- {note}\n"


def test_methods_of_several_runs_stand_in_one_table_beside_the_papers(summary: Path) -> None:
    results = collect(open_runs(summary))
    top, second = results.tables[:2]
    assert (top.level, second.level) == (5, 4)
    assert tuple(top.rows) == ("plain", "fixed", "episodic", "online", "uda", "alp")
    assert tuple(second.rows) == ("plain", "fixed", "episodic", "online")
    paper = {"plain": 50.5, "fixed": 49.4, "episodic": 45.6, "online": 25.8, "uda": 28.2, "alp": 22.7}
    for method, value in paper.items():
        assert top.paper_value(method, "gaussian_noise", "error") == value
        assert top.rows[method][MEAN].repetitions == (2 if method in METHODS else 1)
        assert (top.rows[method][MEAN].spread is not None) == (method in METHODS)
        assert (top.rows[method][MEAN].p_value is not None) == (method != "fixed")


def test_a_summary_and_a_folder_belong_together(folders: list[Path], tmp_path: Path) -> None:
    write_summary(tmp_path / "others.json", [open_run(folder) for folder in folders[1:]])
    mixed = collect([*open_runs(folders[0]), *open_runs(tmp_path / "others.json")])
    plain = collect([open_run(folder) for folder in folders])
    assert mixed.tables == plain.tables
    assert [run.path.name for run in open_runs(tmp_path / "others.json")] == ["uda", "alp"]


def test_figures_that_need_the_order_are_left_out_and_others_stay(folders: list[Path], summary: Path) -> None:
    whole = [(kind, table.title) for kind, table, _ in draw_all(collect([open_run(path) for path in folders]))]
    few = [(kind, table.title) for kind, table, _ in draw_all(collect(open_runs(summary)))]
    assert few == [entry for entry in whole if entry[0] != "streams"]
    assert {kind for kind, _ in few} == {"bars", "levels", "flips", "gradual", "cost"}
    assert len(whole) == len(few) + 1


def test_the_page_of_a_summary_says_what_is_missing(summary: Path, tmp_path: Path) -> None:
    publish([summary], tmp_path, formats=("html",), root=tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "Sample images are omitted: a summary contains no records." in page
    assert "whatever needs all records, e.g. sliding windows, is omitted" in page
    assert "testtime eval digits-c/*/5 --out runs/made" in page


def test_units_say_what_they_counted(summary: Path, folders: list[Path]) -> None:
    held = json.loads(summary.read_text())
    unit = held["runs"][0]["units"][0]
    known = open_run(folders[0]).units[0]
    columns = known.columns()
    assert (unit["method"], unit["set"], unit["seed"]) == (known.method, known.set_name, known.seed)
    assert unit["error"] == pytest.approx(100 * (1 - columns["is_right"].mean()))
    assert unit["error_before"] == pytest.approx(100 * (1 - columns["was_right"].mean()))
    assert unit["counts"]["images"] == 50
    assert unit["adapted_share"] == 1
    assert unit["seconds"] == 2.0
    assert held["runs"][0]["about"]["hardware"]["processor"] == "Some CPU <fast>"
    assert "files" not in held["runs"][0]["about"]
    with pytest.raises(RunError, match="a summary contains no records"):
        open_runs(summary)[0].units[0].columns()


def test_seeds_may_have_seen_different_images(tmp_path: Path) -> None:
    columns = make_columns(np.arange(6) % 2 == 0)
    first = {name: column[:4] for name, column in columns.items()}
    second = {name: column[2:] for name, column in columns.items()}
    run = make_run(tmp_path / "run", {("fixed", "digits", 0): first, ("fixed", "digits", 1): second})
    write_summary(tmp_path / "summary.json", [run])
    units = open_runs(tmp_path / "summary.json")[0].units
    assert [unit.verdicts().samples.tolist() for unit in units] == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert [unit.verdicts().right.tolist() for unit in units] == [[1, 0, 1, 0]] * 2


def test_the_same_measurement_does_not_count_twice(summary: Path, folders: list[Path]) -> None:
    both = collect([*open_runs(folders[0]), *open_runs(summary)])
    assert both.tables == collect(open_runs(summary)).tables
    count = len(open_run(folders[0]).units)
    assert f"{count} units of main with the same network and seed as in main: counted once." in both.notes


def test_another_run_of_the_same_network_is_no_repetition(tmp_path: Path) -> None:
    def run(name: str, network: str, seed: int, right: int) -> Any:
        plan = {
            "methods": {"fixed": {"mode": "fixed", "network": "joint"}},
            "networks": {"joint": {"fingerprint": network, "architecture": {"norm": "group"}}},
        }
        units = {("fixed", "digits", seed): make_columns(np.arange(10) < right)}
        return make_run(tmp_path / name, units, plan, seconds=len(name))

    first, again = run("first", "a", 0, 8), run("once again", "a", 0, 8)
    other, later = run("other", "b", 0, 6), run("later seed", "a", 1, 4)
    cell = collect([first, again, other, later]).tables[0].rows["fixed"]["digits"]
    assert (cell.repetitions, cell.error) == (3, pytest.approx(40))
    assert collect([first, again]).notes == (
        "1 unit of once again with the same network and seed as in first: counted once.",
    )


def test_ten_thousand_images_take_little_room(tmp_path: Path) -> None:
    right = np.random.default_rng(0).random(10_000) > 0.3
    units = {("fixed", f"cifar10-c/fog/{level}", 0): make_columns(right) for level in range(1, 6)}
    write_summary(tmp_path / "summary.json", [make_run(tmp_path / "run", units)])
    assert (tmp_path / "summary.json").stat().st_size < 5 * 2500 + 10_000


def change(held: dict[str, Any], damage: str) -> str:
    unit = held["runs"][0]["units"][0]
    if damage == "another kind":
        held["kind"] = "shopping list"
    elif damage == "format":
        held["format"] = 9
    elif damage == "counts":
        unit["counts"]["is_right"] += 1
    elif damage == "verdicts":
        unit["right"] = unit["right"][:-8]
    elif damage == "an array":
        del held["arrays"][held["runs"][0]["sets"]["cifar10"]["labels"]]
    elif damage == "a list":
        return "[]"
    return json.dumps(held)[: -5 if damage == "cut" else None]


@pytest.mark.parametrize("damage", ["another kind", "format", "counts", "verdicts", "an array", "a list", "cut"])
def test_what_is_no_summary_is_refused_in_one_line(
    summary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    (tmp_path / "bad.json").write_text(change(json.loads(summary.read_text()), damage))
    with pytest.raises(RunError, match=r"bad\.json: "):
        open_runs(tmp_path / "bad.json")
    assert cli.run(["report", str(tmp_path / "bad.json"), "--out", str(tmp_path / "out")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
