"""The README: its code runs, its table is what the results file says, its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from testtime.demo import MODES, summarise
from testtime.report.readme import BEGIN, END, RESULTS, update

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


def test_the_table_is_what_the_results_file_says() -> None:
    results = json.loads((ROOT / RESULTS).read_text())
    assert update(README, results) == README
    results["sets"][1]["modes"]["online"]["error"] += 1
    assert update(README, results) != README


def test_the_results_file_agrees_with_itself() -> None:
    results = json.loads((ROOT / RESULTS).read_text())
    assert not results["quick"]
    for entry in results["sets"]:
        for mode in MODES:
            stream = entry["modes"][mode]["stream"]
            assert len(stream) == results["count"]
            assert entry["modes"][mode]["error"] == round(100 * stream.count("-") / len(stream), 2)
    assert summarise(results["sets"]) == results["summary"]


def test_the_results_are_worth_showing() -> None:
    summary = json.loads((ROOT / RESULTS).read_text())["summary"]
    assert summary["online"]["mean"] <= 0.6 * summary["fixed"]["mean"]
    assert summary["episodic"]["mean"] < summary["fixed"]["mean"]
    assert max(summary[mode]["clean"] for mode in MODES) <= summary["fixed"]["clean"] + 1


def test_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert {"docs/demo.svg", str(RESULTS)} <= set(targets)
    assert all((ROOT / target).is_file() for target in targets)


def test_a_readme_without_its_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the lines"):
        update("# testtime\n" + BEGIN, {})
    assert README.count(BEGIN) == README.count(END) == 1
