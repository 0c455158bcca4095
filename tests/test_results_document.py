"""The document of results: what it says is what the committed files hold, worked out anew in the plainest way."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import testtime as tt
from testtime.cli import app
from testtime.corruptions import CORRUPTIONS
from testtime.report import committed, finding_differences, findings
from testtime.report.committed import Findings
from testtime.report.documents import bullets, fill, table, update
from testtime.report.finding_trainings import trained_precision
from testtime.report.paper import PAPER_NAMES, find_table
from testtime.report.results import Cell, Table
from testtime.report.sources import ResultsError
from testtime.report.statistics import Interval
from testtime.runs import open_runs
from testtime.training import Recipe

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / findings.DOCUMENT).read_text(encoding="utf-8")
FIGURES = sorted(path for family in ("cifar10", "imagenette") for path in (ROOT / "docs").glob(f"{family}-*.svg"))
PINNED = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> Findings:
    return committed.read(ROOT)


@pytest.fixture(scope="module")
def counts() -> dict[tuple[str, str], tuple[int, int]]:
    """Right answers and images by method and set, straight from the files; the whole sets win over parts of them."""
    known: dict[tuple[str, str], tuple[int, int]] = {}
    rows = [file for file in committed.ROWS.values() if (ROOT / file).exists()]
    for path in (committed.PART, *rows, committed.STANDARD, committed.LEVELS):
        for unit in json.loads((ROOT / path).read_text())["runs"][0]["units"]:
            known[unit["method"], unit["set"]] = unit["counts"]["is_right"], unit["counts"]["images"]
    return known


def error(counts: dict[tuple[str, str], tuple[int, int]], method: str, name: str) -> float:
    right, images = counts[method, name]
    return 100 * (images - right) / images


def part_of(name: str) -> str:
    return DOCUMENT.partition(f"<!-- begin: {name} -->")[2].partition("<!-- end -->")[0]


def rows_of(text: str) -> list[list[str]]:
    return [
        [cell.strip(" *\\†") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]


def agree(cells: list[str], values: list[float]) -> bool:
    """Whether printed numbers are these; a half may be rounded either way."""
    return len(cells) == len(values) and np.allclose([float(cell) for cell in cells], values, atol=0.0501)


def test_the_document_is_what_the_files_say(found: Findings, tmp_path: Path) -> None:
    """After new results: python -m testtime.report.findings."""
    parts = findings.tell_all(found)
    assert fill(DOCUMENT, parts) == DOCUMENT
    copy = tmp_path / "results.md"
    copy.write_text(DOCUMENT.replace("33.2", "33.1"), encoding="utf-8")
    assert not update({copy: parts}, check=True)
    assert "33.2" not in copy.read_text(encoding="utf-8")
    assert not update({copy: parts}, check=False)
    assert copy.read_text(encoding="utf-8") == DOCUMENT
    assert update({copy: parts}, check=True)


def test_level_5_by_hand(counts: dict[tuple[str, str], tuple[int, int]]) -> None:
    names = ["cifar10", *(f"cifar10-c/{name}/5" for name in CORRUPTIONS)]
    paper = find_table("cifar10-c", 5)
    assert paper is not None
    rows = rows_of(part_of("level 5"))
    for method in {method for method, _ in counts} & set(PAPER_NAMES):
        title = f"{method} ({PAPER_NAMES[method]})"
        place = [row[0] for row in rows].index(title)
        ours = [error(counts, method, name) for name in names]
        ours.append(sum(ours[1:]) / 15)
        theirs = [*paper.values[method], sum(paper.values[method][1:]) / 15]
        mine, _, known, _ = rows[place : place + 4]
        assert known[0] == "paper"
        assert agree(mine[1:], ours)
        assert agree(known[1:], theirs)


def test_the_means_of_every_level_by_hand(counts: dict[tuple[str, str], tuple[int, int]]) -> None:
    rows = {row[0]: row[1:] for row in rows_of(part_of("means"))}

    def mean(method: str, level: int) -> float:
        return sum(error(counts, method, f"cifar10-c/{name}/{level}") for name in CORRUPTIONS) / 15

    for method, title in (("fixed", "fixed (JT)"), ("online", "online (TTT-Online)")):
        assert agree(rows[title], [error(counts, method, "cifar10"), *(mean(method, level) for level in range(1, 6))])
    some = [cell.rstrip(" ‡") for cell in rows["episodic (TTT)"]]
    assert agree(some[1:], [mean("episodic", level) for level in range(1, 6)])
    assert counts["episodic", "cifar10-c/fog/1"][1] == 2000
    assert counts["episodic", "cifar10-c/fog/5"][1] == counts["fixed", "cifar10-c/fog/1"][1] == 10_000


def test_where_online_does_harm_by_hand(counts: dict[tuple[str, str], tuple[int, int]]) -> None:
    names = {"original": "cifar10"}
    names |= {
        f"{name.replace('_', ' ')} {level}": f"cifar10-c/{name}/{level}"
        for name in CORRUPTIONS
        for level in range(1, 6)
    }
    losses = {title: error(counts, "online", name) - error(counts, "fixed", name) for title, name in names.items()}
    worse = {title: loss for title, loss in losses.items() if loss > 0}
    rows = rows_of(part_of("online above fixed"))[2:]
    assert {row[0]: row[3] for row in rows} == {title: f"{loss:+.2f}" for title, loss in worse.items()}
    assert f"On {len(worse)} of {len(names)} sets" in part_of("online above fixed")
    # What the README says in words.
    assert 0.1 < losses["original"] < 1
    assert max(worse.values()) < 1


def test_flips_by_hand() -> None:
    right = {
        (unit.method, unit.set_name): unit.verdicts().right.astype(bool)
        for path in (committed.LEVELS, committed.STANDARD)
        for unit in open_runs(ROOT / path)[0].units
        if unit.level == 5
    }
    for method in ("episodic", "online"):
        sets = [f"cifar10-c/{name}/5" for name in CORRUPTIONS]
        better = sum(int((right[method, name] & ~right["fixed", name]).sum()) for name in sets)
        worse = sum(int((~right[method, name] & right["fixed", name]).sum()) for name in sets)
        words = f"{better:,} wrong answers right and {worse:,} right ones wrong"
        assert words in " ".join(part_of("flips").split())


def test_correlations_by_hand(counts: dict[tuple[str, str], tuple[int, int]]) -> None:
    sets = json.loads((ROOT / committed.GRADIENTS).read_text())["sets"]
    part = json.loads((ROOT / committed.PART).read_text())["runs"][0]["units"]
    some = {unit["set"]: unit["error"] for unit in part if unit["method"] == "fixed"}
    inner = [one["batch"]["inner"] for one in sets.values()]
    row = next(row for row in rows_of(part_of("gradients")) if row[0] == "inner product, by batch")
    for place, method, paper in ((1, "episodic", "0.93"), (4, "online", "0.89")):
        fixed = [some.get(name) if method == "episodic" else None for name in sets]
        gains = [
            (error(counts, "fixed", name) if base is None else base) - error(counts, method, name)
            for name, base in zip(sets, fixed, strict=True)
        ]
        assert len(gains) == 75
        assert row[place] == f"{np.corrcoef(inner, gains)[0, 1]:.2f}"
        assert row[place + 2] == paper


def make_table(level: int, **errors: float) -> Table:
    cells = {name: Cell(value, Interval(value - 1, value + 1), None, 100, 1) for name, value in errors.items()}
    return Table("", "cifar10-c", level, tuple(cells), {"fixed": cells}, find_table("cifar10-c", level))


def test_what_is_outside_the_interval_is_named() -> None:
    # The paper has 8.1, 49.4, 27.5 and 12.6 at level 5, and 8.1, 45.0, 14.1 and 10.0 at level 4.
    five = make_table(5, original=8.5, gaussian_noise=52.9, fog=25.0, brightness=12.0)
    assert finding_differences._tell_beyond(five, "fixed") == (
        "JT at level 5: outside on 2 of 4 sets; higher on gaussian noise (+3.5); lower on fog (−2.5)."
    )
    four = make_table(4, original=8.5, gaussian_noise=47.0, fog=16.1, brightness=8.0)
    assert finding_differences._tell_constant({4: four, 5: five}, "fixed") == (
        "JT outside at every level and to the same side: gaussian noise (+2.0 to +3.5)."
    )
    less = make_table(4, original=8.5, gaussian_noise=45.9, fog=16.1, brightness=8.0)
    assert finding_differences._tell_constant({4: less, 5: five}, "fixed").endswith("side: none.")


def test_the_files_belong_together(found: Findings) -> None:
    net = tt.load("cifar10-resnet26-gn-joint")
    runs = (*found.runs, *(run for run in found.more if "joint" in run.configuration["networks"]))
    marks = {run.configuration["networks"]["joint"]["fingerprint"] for run in runs}
    assert marks == {net.fingerprint()} == {found.study["configuration"]["network"]}
    recipe = found.training["configuration"]["recipe"]
    paper = json.loads(json.dumps(asdict(Recipe.cifar("group", precision="bf16"))))
    assert paper == {name: recipe.get(name, trained_precision(recipe)) for name in paper}
    assert len(found.training["epochs"]) == recipe["epochs"]
    first, other = found.runs[0], found.runs[1]
    unit = next(unit for unit in other.units if unit.method == "fixed")
    held = unit.verdicts()
    changed = replace(unit, held=held._replace(right=1 - held.right))
    with pytest.raises(ResultsError, match=r"fixed on cifar10 is not what .*levels"):
        committed._check_fixed(first, [replace(other, units=[changed])])


def commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_are_those_of_the_runs_and_can_be_given(found: Findings) -> None:
    given = commands(DOCUMENT)
    parts = [run for part in found.parts.values() for run in part.runs]
    rows = [run for run in found.more if run.path not in {each.path for each in parts}]
    evaluations = [shlex.join(words) for words in given if words[1] == "eval"]
    assert sorted(evaluations) == sorted(
        shlex.join(shlex.split(run.about["command"])) for run in (*found.runs, *rows, *parts)
    )
    group: Any = typer.main.get_command(app)
    ours = [words for words in given if words[0] == "testtime"]
    assert {words[1] for words in commands(part_of("commands")) if words[0] == "testtime"} == {
        *("corrupt", "train", "eval", "correlate", "report")
    }
    for _, name, *arguments in ours:
        group.commands[name].make_context(name, arguments)  # parses, and runs nothing
    with pytest.raises(Exception, match="No such option"):
        group.commands["eval"].make_context("eval", ["--out", "runs/r", "--level", "5"])


def plain(svg: str) -> tuple[str, np.ndarray]:
    """An SVG without its names: what is not a number, and the numbers."""
    bare = re.sub(r'(id="|href="#|url\(#)[^")]*', "", svg)
    number = r"-?\d+\.?\d*(?:e-?\d+)?"
    return re.sub(number, "#", bare), np.array(re.findall(number, bare), float)


def test_figures_are_small_and_all_shown() -> None:
    assert {path.name for path in FIGURES} == set(re.findall(r"\]\((.*?\.svg)\)", DOCUMENT))
    assert all(path.stat().st_size < 150_000 for path in FIGURES)


@pytest.mark.skipif(PINNED is None or version("matplotlib") != PINNED[1], reason="another matplotlib draws otherwise")
def test_figures_are_what_the_files_say(found: Findings) -> None:
    """After new results: python -m testtime.report.findings."""
    drawn = findings.draw_figures(found)
    assert {ROOT / path for path in drawn} == set(FIGURES)
    for path, drawing in drawn.items():
        words, numbers = plain(drawing.svg(inline=False))
        known, held = plain((ROOT / path).read_text(encoding="utf-8"))
        assert words == known, path
        assert np.allclose(numbers, held, atol=0.01), path


def test_parts_of_documents() -> None:
    text = "a\n<!-- begin: one -->\nold\n<!-- end -->\nb\n<!-- begin: two -->\n<!-- end -->\n"
    assert fill(text, {"one": "1\n1", "two": r"\1"}) == (
        "a\n<!-- begin: one -->\n1\n1\n<!-- end -->\nb\n<!-- begin: two -->\n\\1\n<!-- end -->\n"
    )
    for wrong in (text + "<!-- begin: three -->", text + text, text.replace("two", "2"), ""):
        with pytest.raises(ValueError, match="must have the parts one, two"):
            fill(wrong, {"one": "", "two": ""})
    assert table(["a", "b"], [["c", "1"]]) == "| a | b |\n|---|---:|\n| c | 1 |"
    assert [len(line) <= 120 for line in bullets(["word " * 60]).splitlines()] == [True] * 3
    assert bullets(["x", "y"]) == "- x\n- y"


def test_without_its_files_it_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert findings.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
