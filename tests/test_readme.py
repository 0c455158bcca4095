"""The README: its code runs, its table is what the results file says, its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import testtime as tt
from testtime.demo import CHOICE, METHODS, SHIFTS
from testtime.report.readme import BEGIN, END, RESULTS, update
from testtime.report.results import MEAN, Results, collect
from testtime.runs import open_runs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_there_is_code_to_run() -> None:
    assert len(BLOCKS) == 2
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 8


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "prediction" in names:
        assert capsys.readouterr().out.count("tensor") == 3
    else:
        assert type(names["net"]).__name__ == "YNet"


@pytest.fixture(scope="module")
def results() -> Results:
    return collect(open_runs(ROOT / RESULTS))


def test_the_table_is_what_the_results_file_says(results: Results, tmp_path: Path) -> None:
    assert update(README, results) == README
    held = json.loads((ROOT / RESULTS).read_text())
    held["runs"][0]["about"]["versions"]["torch"] = "0.0"
    (tmp_path / "other.json").write_text(json.dumps(held))
    assert update(README, collect(open_runs(tmp_path / "other.json"))) != README


def test_the_results_are_those_of_the_demo(results: Results) -> None:
    (run,) = results.runs
    assert not run.about["demo"]["quick"]
    assert run.about["demo"]["choice"] == CHOICE
    (table,) = results.tables
    assert table.shifted == tuple(shift.title for shift in SHIFTS)
    assert {cell.images for row in table.rows.values() for name, cell in row.items() if name != MEAN} == {500}
    ours = [method.describe(tt.load("digits-resnet8-gn-joint")) for method in METHODS]
    assert list(run.configuration["methods"].values()) == ours


def test_the_results_are_worth_showing(results: Results) -> None:
    rows = results.tables[0].rows
    assert rows["online"][MEAN].error <= 0.6 * rows["fixed"][MEAN].error
    assert rows["episodic"][MEAN].error < rows["fixed"][MEAN].error
    assert max(row["original"].error for row in rows.values()) <= rows["fixed"]["original"].error + 1


def test_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert {"docs/demo.svg", str(RESULTS)} <= set(targets)
    assert all((ROOT / target).is_file() for target in targets)


def test_a_readme_without_its_place_for_the_table_is_refused(results: Results) -> None:
    with pytest.raises(ValueError, match="must have the lines"):
        update("# testtime\n" + BEGIN, results)
    assert README.count(BEGIN) == README.count(END) == 1
