"""The report of a comparison: what its tables state, the files that are written, what is refused."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocol_runs import METHODS, SETS, configure, make_continual, make_reset

from report_runs import make_columns, make_run
from testtime import cli
from testtime.evaluation import open_run, open_runs, write_summary
from testtime.report.comparison import Comparison, compare_runs
from testtime.report.comparison_tables import make_sheets
from testtime.report.publish import compare
from testtime.report.results import collect
from testtime.report.sheets import Entry, Sheet, format_latex, format_markdown, format_terminal
from testtime.report.sources import ResultsError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("runs")
    make_reset(path / "reset")
    make_continual(path / "first", 0, (0, 1))
    make_continual(path / "other", 3)
    return [path / name for name in ("reset", "first", "other")]


@pytest.fixture(scope="module")
def comparison(folders: list[Path]) -> Comparison:
    return compare_runs([open_run(folder) for folder in folders])


def test_every_table_states_how_it_was_made(comparison: Comparison) -> None:
    overview, reset, continual, swaps = make_sheets(comparison)
    assert overview.columns == ("reset", "continual, batch 64")
    for sheet in (continual, swaps):
        facts = dict(sheet.notes)
        assert facts["Answers"] == "after the update"
        assert facts["Images"].startswith("60 answers")
        assert facts["Order"].startswith("0, 3 ")
        assert facts["Batch"].startswith("64 ")
        assert "500 updates (tent)" in facts["Resets"]
        assert re.search(r"not selected: the papers' settings but for lr 0\.5 \(eata\)", facts["Settings"])
        assert re.search(r"none \(fixed, tent\); statistics of source images \(eata\)", facts["Source data"])
    assert "before every set" in dict(reset.notes)["Resets"]
    assert all("Batch: 64" in text for name, text in overview.notes if name != "reset")


def test_settings_that_tune_chose_are_named(tmp_path: Path) -> None:
    make_continual(tmp_path / "run")
    held = json.loads((tmp_path / "run/run.json").read_text())
    held["choices"] = {"tent": {"rule": "lowest mean error", "sets": {"digits-held-out": 300}}}
    (tmp_path / "run/run.json").write_text(json.dumps(held))
    (sheet,) = make_sheets(compare_runs([open_run(tmp_path / "run")]))
    assert "lowest mean error on digits-held-out (tent)" in dict(sheet.notes)["Settings"]


def test_best_of_version_0_1_is_mirrored(tmp_path: Path) -> None:
    """Its record has no name, only the settings."""
    settings = {"steps": 1, "lr": 0.001, "copies": 32, "update": "encoder+ssl", "mirrored": True}
    methods = METHODS | {"best": {"mode": "online", "network": "joint", "settings": settings}}
    units = {(method, name, 0): make_columns([True, False]) for method in ("fixed", "best") for name in SETS}
    run = make_run(tmp_path / "run", units, configure({"name": "reset", "batch": 2}, methods=methods))
    (sheet,) = make_sheets(compare_runs([run]))
    assert dict(sheet.notes)["Settings"] == "none (fixed); not selected: the papers' settings (best)"


def test_methods_are_compared_on_the_same_streams(tmp_path: Path) -> None:
    units = {("fixed", name, 0): make_columns([True, False]) for name in SETS}
    units |= {("tent", name, 0): make_columns([True, True]) for name in SETS[:2]}
    found = compare_runs([make_run(tmp_path / "run", units, configure({"name": "reset", "batch": 2}))])
    assert list(found.protocols[0].scores) == ["fixed"]
    assert ["tent" in note for note in found.notes] == [True]


def test_what_cannot_be_compared_is_refused(folders: list[Path], tmp_path: Path) -> None:
    first = open_run(folders[1])
    with pytest.raises(ResultsError, match="has the protocol continual"):
        collect([first])
    few = make_run(
        tmp_path / "few", {("fixed", "digits", 0): make_columns([True])}, configure({"name": "reset", "batch": 8})
    )
    with pytest.raises(ResultsError, match="reset, batch 8"):
        collect([few])
    with pytest.raises(ResultsError, match="another limit"):
        compare_runs([first, make_continual(tmp_path / "limited", 4, limit=30)])
    marked = [make_continual(tmp_path / name, sets={"continual/digits": name}) for name in ("a", "b")]
    with pytest.raises(ResultsError, match="is not the same"):
        compare_runs(marked)
    changed = METHODS | {"tent": METHODS["tent"] | {"settings": {"method": "tent", "lr": 0.3}}}
    with pytest.raises(ResultsError, match="another tent"):
        compare_runs([first, make_continual(tmp_path / "changed", 5, methods=changed)])
    odd = make_run(tmp_path / "odd", {("fixed", "digits", 0): make_columns([True])}, configure({"name": "sideways"}))
    with pytest.raises(ResultsError, match=r"odd: has an unknown protocol .*sideways"):
        compare_runs([odd])
    with pytest.raises(ResultsError, match="given twice"):
        compare_runs([first, open_run(folders[1])])


@pytest.mark.parametrize("layout", [3, {"sets": {}, "segments": []}, {"sets": {"a": 1}, "segments": [["b", 1]]}])
def test_a_malformed_layout_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: Any) -> None:
    make_continual(tmp_path / "run")
    held = json.loads((tmp_path / "run/run.json").read_text())
    held["configuration"]["streams"]["continual/digits"] = layout
    (tmp_path / "run/run.json").write_text(json.dumps(held))
    assert cli.run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    assert re.fullmatch(r".*/run\S*: .*\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


class Tags(HTMLParser):
    """Checks that tags close in the order they were opened; collects tags and attributes that would run something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.running: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.running += [name for name, _ in attrs if name.startswith("on")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_written_in_all_formats(folders: list[Path], tmp_path: Path) -> None:
    shown: list[tuple[int, int, str]] = []
    found = compare(folders, tmp_path, command="testtime report <runs>", progress=lambda *said: shown.append(said))
    assert {path.name for path in tmp_path.iterdir()} == {
        "tables.md", "tables.tex", "tables.csv", "summary.json", "index.html", "figures",
    }  # fmt: skip
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        "protocols", "cost-reset", "cost-continual-batch-64", "along-continual-batch-64", "ranks-continual-batch-64",
    }  # fmt: skip
    assert shown[-1][:2] == (6, 6)
    page = (tmp_path / "index.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    score = found.protocols[1].scores["tent"]
    for text in (page, (tmp_path / "tables.md").read_text(), (tmp_path / "tables.tex").read_text()):
        assert f"{score.error:.1f}" in text
        assert f"{score.ece_after:.1f}" in text
    with (tmp_path / "tables.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["row"], row["column"]) == ("tent", "error in %")]
    assert [float(row["value"]) for row in rows] == pytest.approx(
        [one.scores["tent"].error for one in found.protocols], abs=1e-3
    )
    assert len(open_runs(tmp_path / "summary.json")) == 3


def test_odd_names_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "<script>alert(1)|`x`*[y](z)$_^"
    name = "continual/<b>"
    plan = configure({"name": "continual", "order": 0}) | {"methods": {bad: {"mode": bad, "settings": {bad: bad}}}}
    layout = {"sets": {"<i>": 20, 'x"/y': 20}, "segments": [["<i>", 20], ['x"/y', 20]]}
    columns = make_columns(np.arange(40) % 2 > 0)
    runs = [tmp_path / "run", tmp_path / "summary.json"]
    unit = {(bad.replace("/", "|"), name, seed): columns for seed in (0, 1)}
    write_summary(runs[1], [make_run(runs[0], unit, plan | {"streams": {name: layout}})])
    for run in runs:
        assert cli.run(["report", str(run), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
        tags = Tags()
        tags.feed((tmp_path / "out/index.html").read_text())
        assert tags.open == []
        assert tags.running == []
        assert tags.tags.count("script") == 1
        tables = (tmp_path / "out/tables.md").read_text()
        assert "<" not in tables
        assert not re.search(r"(?<!\\)[\[`$]", tables)


def test_the_command_prints_the_tables(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(folder) for folder in folders]
    assert cli.run(["report", *paths, "--out", str(tmp_path), "--format", "md"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # notes are wrapped
    assert "continual, batch 64" in shown
    assert shown.count("Batch: 64 images per call") == 1  # not once for each table
    assert cli.run(["report", *paths, "--out", str(tmp_path), "--paper"]) == 2
    assert "--paper" in capsys.readouterr().err


def test_sheets() -> None:
    entries = Entry("1.0", 1.0, "±0.1", True), Entry()
    sheet = Sheet("A_b", "x", ("one", "two"), (("r|s", entries),), (("Batch", "8"),))
    assert format_markdown([sheet], ["End."]) == (
        "### A\\_b\n\n| x | one | two |\n|---|---:|---:|\n| r\\|s | **1.0** ±0.1 |  |\n\n- Batch: 8\n\n- End.\n"
    )
    assert r"r$|$s & \textbf{1.0} {\scriptsize $\pm$0.1} &  \\" in format_latex([sheet])
    assert sheet.drop_empty().columns == ("one",)
    assert len(format_terminal([sheet], 80)) == 2  # with its note
    assert len(format_terminal([sheet], 10)) == 3
    with pytest.raises(ValueError, match="`rows` must have 2 entries, got 1 for r"):
        Sheet("t", "x", ("one", "two"), (("r", entries[:1]),))
