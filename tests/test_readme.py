"""The README and the demo's document: the code runs, the tables are what the results say, the links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import testtime as tt
from testtime.demo import CHOICE, METHODS, SHIFTS
from testtime.report.committed import read_whole
from testtime.report.documents import fill
from testtime.report.readme import (
    DEMO,
    ENGINE,
    ENGINES,
    RESULTS,
    TRAININGS,
    main,
    read_files,
    tell_cifar,
    tell_demo,
    tell_speed,
)
from testtime.report.results import MEAN, Results, collect
from testtime.report.sources import compare_methods
from testtime.runs import open_runs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENT = (ROOT / DEMO).read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_there_is_code_to_run() -> None:
    assert len(BLOCKS) == 3
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 8


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "cameras" in names:
        assert capsys.readouterr().out.count("tensor") == 2
    else:
        assert type(names["net"]).__name__ == "YNet"


@pytest.fixture(scope="module")
def results() -> Results:
    return collect(open_runs(ROOT / RESULTS))


def test_the_demos_table_is_what_the_results_file_says(results: Results, tmp_path: Path) -> None:
    """After new results: python -m testtime.report.readme."""
    assert fill(DOCUMENT, {str(RESULTS): tell_demo(results)}) == DOCUMENT
    held = json.loads((ROOT / RESULTS).read_text())
    held["runs"][0]["about"]["versions"]["torch"] = "0.0"
    (tmp_path / "other.json").write_text(json.dumps(held))
    assert "torch 0.0;" in tell_demo(collect(open_runs(tmp_path / "other.json")))


def test_the_readmes_table_is_what_the_results_say() -> None:
    """After new results: python -m testtime.report.readme."""
    whole = read_whole(ROOT)
    speed = tell_speed(read_files(ENGINES, ROOT), read_files(TRAININGS, ROOT), whole)
    parts = {"results/cifar10": tell_cifar(whole), str(ENGINE): speed}
    assert fill(README, parts) == README
    top = whole.tables[0]
    assert (top.family, top.level) == ("cifar10-c", 5)
    for method, mean in {method: row[MEAN].error for method, row in top.rows.items()}.items():
        line = next(line for line in README.splitlines() if line.startswith(f"| `{method}` "))
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        known = top.paper_value(method, MEAN, "error")
        assert cells[-2:] == [f"{mean:.1f}", "" if known is None else f"{known:.1f}"]
        assert float(cells[-2]) == pytest.approx(sum(map(float, cells[2:17])) / 15, abs=0.06)
    less = 100 * (1 - top.rows["online"][MEAN].error / top.rows["fixed"][MEAN].error)
    assert f"`online` {less:.0f}%" in README


def test_each_network_of_the_engines_file_has_its_table_and_training_its_sentence() -> None:
    row = {"name": "one", "steps_per_s": 1234.5, "images_per_s": 12.0, "times_naive": 40.0, "peak_mib": 321.0}
    plain = row | {"name": "plain training, batch 8, eager", "steps_per_s": 500.0}
    rates = {4: 1500.0, 16: 2000.0, 64: 1000.0, 256: 1000.0}
    many = [row | {"network": "resnet18", "name": f"{count} streams", "steps_per_s": rates[count]} for count in rates]
    small = [row | {"network": "resnet26"}, plain | {"network": "resnet26"}]
    many[-1]["peak_mib"] = None
    large = [row | {"network": "resnet18", "name": "two"}, *many, plain | {"network": "resnet18"}]
    about = {"hardware": "H", "command": "engine.py --device cuda", "versions": {"torch": "9"}}
    engines = {"cpu.json": about | {"load_average_before": 0.5, "command": "engine.py", "rows": small}}
    engines |= {"gpu.json": about | {"rows": small + large}}
    loops = [
        {"name": "ordinary loop, 8 workers, fp32", "precision": "fp32", "images_per_s": 9.0, "times_ordinary": 1.0},
        {"name": "t", "precision": "tf32", "images_per_s": 90.0, "times_ordinary": 10.0, "seeds": 1},
        {"name": "ordinary loop, 8 workers, bf16", "precision": "bf16", "images_per_s": 10.0, "times_ordinary": 1.0},
        {"name": "t", "precision": "bf16", "images_per_s": 100.0, "times_ordinary": 10.0, "seeds": 1},
        {"name": "t", "precision": "bf16", "images_per_s": 150.0, "times_ordinary": 15.0, "seeds": 3},
    ]
    trained = {"train.json": {"hardware": "H; C", "command": "train.py", "rows": loops}}
    told = " ".join(tell_speed(engines, trained, read_whole(ROOT)).split())
    assert "| two | 1,234.5 | 12.0 | 40.00 | 321 |" in told
    assert told.count("ResNet-26, 32×32, 32 copies") == 2
    assert told.count("ResNet-18, 224×224, 64 copies") == 1
    assert told.count("load average") == 1
    assert "| 4 streams |" not in told
    assert "| 16 streams | 2,000.0 |" in told  # the fastest
    assert "| 64 streams | 1,000.0 |" in told
    assert "| 256 streams | 1,000.0 | 12.0 | 40.00 | |" in told
    assert "all rows: [`gpu.json`](gpu.json)." in told
    assert "The most steps, one, are 2.5 times those of plain training on large batches" in told
    assert "are 4.0 times those of plain training on large batches at its fastest (batch 8, eager)" in told
    assert "has not been run" not in told
    assert "| joint training, images/s | ordinary loop, 8 workers | one seed | 3 seeds together |" in told
    assert "| fp32 | 9 | | |" in told
    assert "| tf32 | | 90 (10.0 times) | |" in told
    assert "| bf16 | 10 | 100 (10.0 times) | 150 (15.0 times) |" in told
    assert "ResNet-26 on H, all seeds counted; `train.py`; [`train.json`](train.json)." in told


def test_the_results_are_those_of_the_demo(results: Results) -> None:
    (run,) = results.runs
    assert not run.about["demo"]["quick"]
    assert run.about["demo"]["choice"] == CHOICE
    (table,) = results.tables
    assert table.shifted == tuple(shift.title for shift in SHIFTS)
    assert {cell.images for row in table.rows.values() for name, cell in row.items() if name != MEAN} == {500}
    ours = {method.name: method.describe(tt.load("digits-resnet8-gn-joint")) for method in METHODS}
    assert list(run.configuration["methods"]) == list(ours)
    assert compare_methods(run.configuration["methods"], ours) == []


def test_the_results_are_worth_showing(results: Results) -> None:
    rows = results.tables[0].rows
    assert rows["online"][MEAN].error <= 0.6 * rows["fixed"][MEAN].error
    assert rows["episodic"][MEAN].error < rows["fixed"][MEAN].error
    assert max(row["original"].error for row in rows.values()) <= rows["fixed"]["original"].error + 1


@pytest.mark.parametrize("name", ["README.md", "docs/demo.md", "docs/results.md"])
def test_links_lead_to_files(name: str) -> None:
    place = ROOT / name
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", place.read_text()) if "://" not in target]
    assert len(targets) > 1
    assert [target for target in targets if not (place.parent / target).exists()] == []


def test_without_its_files_it_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
