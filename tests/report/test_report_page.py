"""The page of runs and the command that writes it, also in a real browser."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from report_runs import METHODS, make_benchmark, make_columns, make_run
from testtime import cli
from testtime.evaluation import open_run
from testtime.report.publish import FORMATS, publish, read_formats
from testtime.report.results import collect
from testtime.report.run_figures import draw_all
from testtime.report.run_page import format_summary, render_run_page
from testtime.report.run_tables import markdown

VOID = {"meta", "img", "br"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on CIFAR's sets and its whole report beside it."""
    path = tmp_path_factory.mktemp("page")
    make_benchmark(path / "run", 60, "cifar10", corruptions=("gaussian_noise", "shot_noise", "fog", "contrast"))
    publish([path / "run"], path / "out", paper=True, root=path, command="testtime report <run>")
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "out/index.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Checks that tags close in the order they were opened, and collects what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert [one for one in tags.references if not one.startswith(("data:image/png;base64,", "#"))] == []
    assert not re.search(r"@import|url\((?!#)|fetch\(|<link|src=\"http", page)


def test_the_page_says_what_was_measured_and_how(folder: Path, page: str) -> None:
    text = html.unescape(page)
    results = collect([open_run(folder / "run")])
    rows = results.tables[0].rows
    assert f"on 4 shifts from {rows['fixed']['mean'].error:.1f}% to {rows['online']['mean'].error:.1f}%" in text
    for words in (
        "testtime eval digits-c/*/5 --out runs/made",
        "torch 2.13.0",
        "Some CPU <fast>",
        "testtime report <run>",
    ):
        assert words in text
    assert re.search(r"<dt>Seeds</dt><dd>0</dd>", page)
    assert "exact sign test" in page
    assert "Sample images are omitted" in page  # the sets are not there


def test_a_loss_is_not_reported_as_a_gain(tmp_path: Path) -> None:
    units = {}
    for name in ("fog", "snow"):
        units["fixed", f"digits-c/{name}/5", 0] = make_columns(np.arange(40) >= 10)
        units["online", f"digits-c/{name}/5", 0] = make_columns(np.arange(40) >= 20)
    words = format_summary(collect([make_run(tmp_path / "run", units)]), "error")
    assert "raised the error on 2 shifts from 25.0% to 50.0%" in words["headline"]
    assert "25.0 points above" in words["lead"]
    assert "worse on 2 (p < 0.05)" in words["lead"]


def test_chance_is_not_reported_as_a_gain(tmp_path: Path) -> None:
    units = {}
    for name in ("fog", "snow"):
        units["fixed", f"digits-c/{name}/5", 0] = make_columns(np.arange(40) >= 10)
        units["online", f"digits-c/{name}/5", 0] = make_columns(np.arange(40) >= 9)
    results = collect([make_run(tmp_path / "run", units)])
    words = format_summary(results, "error")
    assert "no significant difference on 2 shifts: error 25.0% before, 22.5% after" in words["headline"]
    assert "is the difference significant" in words["lead"]
    assert "accuracy 75.0% before, 77.5% after" in format_summary(results, "accuracy")["headline"]


def test_words_for_one_method_or_an_unfinished_run(tmp_path: Path) -> None:
    one = collect([make_run(tmp_path / "one", {("fixed", "digits", 0): make_columns([True, False])})])
    assert format_summary(one, "error")["headline"] == "fixed (JT) has error 50.0% on digits"
    units = {
        ("fixed", "digits-c/fog/5", 0): make_columns([True, False]),
        ("online", "digits-c/snow/5", 0): make_columns([True, False]),
    }
    part = collect([make_run(tmp_path / "part", units)])
    assert format_summary(part, "error")["headline"] == "Results on 2 shifts"
    assert "Results on 2 shifts" in render_run_page(part, list(draw_all(part)))


def test_sets_that_the_paper_has_only_for_some_methods(tmp_path: Path) -> None:
    labels = np.array([0, 3, 6, 6])  # airplane, dog, ships
    units = {}
    for method in ("fixed", "online"):
        units[method, "cifar10.1", 0] = make_columns([True, False])  # the paper has no TTT-Online here
        units[method, "vid-cifar7", 0] = make_columns([True, False, True, False], labels=labels)
    results = collect([make_run(tmp_path / "run", units)])
    page = render_run_page(results, list(draw_all(results, paper=True)), measure="accuracy", paper=True)
    assert 'class="theirs">83.3' in page
    assert 'class="theirs">45.4' in page
    assert 'data-value="" class="theirs">–' in page
    assert "online" in markdown(results, paper=True)


def test_names_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    method = "<b>&bold"
    plan = {"methods": METHODS | {method: {"lr": bad}}, "networks": {"<i>": {"architecture": {"norm": "<u>"}}}}
    units = {
        (method, bad.replace("/", "|"), 0): make_columns([True, False]),
        ("fixed", bad.replace("/", "|"), 0): make_columns([True, False]),
    }
    results = collect([make_run(tmp_path / "run", units, plan)])
    page = render_run_page(results, list(draw_all(results)), command=bad)
    for text in ("<script>alert", "<b>", "<i>", "<u>"):
        assert text not in page
    assert "&lt;b&gt;&amp;bold" in page


MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>"
ODD_METHODS = (
    "fixed",
    "online",
    "<img src=x onerror=alert(1)>",
    "$\\frac{1}{$",
    "a|b `c` *d* [e](javascript:alert(1)) ![f](x)",
    "[red]bold[link]",
    "--><svg onload=alert(1)>",
    "[0]&lt;b&gt;",
    "n" * 90,
)
ODD_SETS = ('x" onload="alert(1)/a', 'x" onload="alert(1)/b|c', "<b>folder</b>", "a[/red]b", "$x^", "digits-c/fog/5")


class Elements(HTMLParser):
    """Collects tags, and attributes that would run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.running: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.running += [name for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which every name and text was chosen to do harm."""
    path = tmp_path_factory.mktemp("odd") / f"run\n\x1b[31m{MARKUP.replace('/', '|')}"
    plan = {
        "methods": {name: {"mode": MARKUP, "settings": {MARKUP: MARKUP}} for name in ODD_METHODS},
        "networks": {MARKUP: {"architecture": {MARKUP: "group"}, "fingerprint": MARKUP}},
        "sets": dict.fromkeys(ODD_SETS, MARKUP),
    }
    units = {
        (method, name, 0): make_columns([place != 0, True, False])
        for place, method in enumerate(ODD_METHODS)
        for name in ODD_SETS
    }
    made = make_run(path, units, plan)
    held = json.loads((path / "run.json").read_text())
    held |= {"title": MARKUP, "command": f"\x1b[31m\n{MARKUP}\ud800", "remarks": {MARKUP: MARKUP}}
    held["hardware"] = {MARKUP: "\x1b]0;title\x07"}
    (path / "run.json").write_text(json.dumps(held))
    return made.path


@pytest.mark.parametrize("source", ["folder", "summary"])
def test_odd_names_do_no_harm(
    odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, source: str
) -> None:
    publish([odd], tmp_path / "first", formats=("json",))
    given = odd if source == "folder" else tmp_path / "first" / "summary.json"
    words = tmp_path / "diagnosis.json"
    entry = {"name": MARKUP, "verdict": {"kind": "helps", "headline": MARKUP, "reasons": [MARKUP]}, "facts": {}}
    words.write_text(json.dumps({"diagnoses": [entry | {"agreement": None}]}))
    out = tmp_path / "out"
    assert cli.run(["report", str(given), "--out", str(out), "--diagnosis", str(words)]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert all(line.isprintable() for line in (*shown.out.splitlines(), *shown.err.splitlines()))
    assert not recwarn.list
    elements = Elements()
    elements.feed((out / "index.html").read_text())
    assert elements.running == []
    assert elements.tags.count("script") == 1
    assert elements.tags.count("img") == 0
    assert "b" not in elements.tags
    for file in (out / "figures").iterdir():
        assert re.fullmatch(r"[\w-]{1,100}\.(svg|png)", file.name)
        if file.suffix == ".svg":
            tree = ElementTree.parse(file)
            assert not [name for part in tree.iter() for name in part.attrib if name.startswith("on")]
    tables = (out / "tables.md").read_text()
    assert "<" not in tables
    assert not re.search(r"(?<!\\)[\[`]", tables)
    for block in tables.split("### ")[1:]:
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len(lines) > 2
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    with (out / "tables.csv").open(newline="") as file:
        assert {row["method"] for row in csv.DictReader(file)} == set(ODD_METHODS)


def test_the_page_may_begin_with_words(folder: Path, tmp_path: Path) -> None:
    words = [("What <this> is", ["First & foremost.", "Then."])]
    publish([open_run(folder / "run")], tmp_path, formats=["html"], sections=words, root=tmp_path)
    page = (tmp_path / "index.html").read_text()
    begin = page.index("<h2>What &lt;this&gt; is</h2>\n<p>First &amp; foremost.</p>\n<p>Then.</p>")
    assert begin < page.index("<h2>How to read it</h2>")


def test_all_files_are_written(folder: Path) -> None:
    out = folder / "out"
    tables = {"tables.csv", "tables.md", "tables.tex", "summary.json"}
    assert {path.name for path in out.iterdir()} == {"figures", "index.html", *tables}
    names = {path.stem for path in (out / "figures").iterdir()}
    assert len(list((out / "figures").iterdir())) == 2 * len(names)
    assert "bars-cifar10-c-5" in names


def test_formats() -> None:
    assert read_formats("md, csv,md") == ("md", "csv")
    assert read_formats(",".join(FORMATS)) == FORMATS
    with pytest.raises(ValueError, match="got 'pdf'"):
        read_formats("md,pdf")
    with pytest.raises(ValueError, match="got none"):
        read_formats(",")


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", str(folder / "run"), "--out", str(tmp_path / "out"), "--format", "md,csv", "--accuracy"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    assert "cifar10-c, level 5" in shown
    assert "accuracy in %" in shown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tables.md", "tables.csv"}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["RUN", "--format", "pdf"], 2, "`format` must be some of md, latex, csv, json, html, got 'pdf'"),
        (["nowhere"], 1, "nowhere: "),
        (["RUN", "RUN"], 1, "was given twice"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    filled = [str(folder / "run") if argument == "RUN" else argument for argument in arguments]
    assert cli.run(["report", *filled, "--out", str(tmp_path / "out")]) == code
    shown = capsys.readouterr().err
    assert text in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_named(folder: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, sys\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else real(name, *rest)\n"
        "from testtime.cli import run\n"
        f"sys.exit(run(['report', {str(folder / 'run')!r}, '--out', {str(tmp_path / 'out')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 1
    assert "pip install 'testtime[report]'" in done.stderr
    assert done.stderr.count("\n") == 1
