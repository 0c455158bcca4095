"""Reports: tables, figures and the page, from made-up results whose every number is known."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from testtime.report import markdown_table, render_page, text_table, write_page
from testtime.report.figures import draw_bars, draw_streams, picture_png, stream_mean, window_error
from testtime.report.page import tell_gain

VOID = {"meta", "img", "br", "link", "hr", "input"}


def make_set(title: str, fixed: str, online: str, shift: dict[str, Any] | None) -> dict[str, Any]:
    def mode(stream: str) -> dict[str, Any]:
        wrong = stream.count("-")
        return {"error": 100 * wrong / len(stream), "ms": 4.0, "stream": stream, "to_right": 3, "to_wrong": 1}

    pixels = base64.b64encode(bytes(range(256))).decode()
    sample = {"sample": 0, "label": 7, "fixed": 1, "online": 7, "became": "right", "side": 16}
    samples = [sample | {"clean": pixels, "pixels": pixels}] if shift else []
    return {
        "title": title,
        "shift": shift,
        "modes": {"fixed": mode(fixed), "episodic": mode(fixed), "online": mode(online)},
        "samples": samples,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    shifts = [("fog & <b>ice</b>", 3), ("dim light", None)]
    sets = [make_set("clean", "+" * 10, "+" * 9 + "-", None)]
    for title, severity in shifts:
        shift = {"title": title, "kind": "fog", "severity": severity, "words": "words about it"}
        sets.append(make_set(title, "-" * 4 + "+" * 6, "-" + "+" * 9, shift))
    summary = {
        "fixed": {"clean": 0.0, "mean": 40.0, "reduction": 0.0, "ms": 0.5},
        "episodic": {"clean": 0.0, "mean": 40.0, "reduction": 0.0, "ms": 9.0},
        "online": {"clean": 10.0, "mean": 10.0, "reduction": 75.0, "ms": 8.0},
    }
    return {
        "command": "testtime demo --out demo",
        "quick": False,
        "seed": 0,
        "count": 10,
        "summary": summary,
        "sets": sets,
        "training": {
            "network": {"depth": 8, "size": 16},
            "parameters": 130878,
            "digits": 1297,
            "recipe": {"epochs": 2, "lr": 0.05, "batch": 32},
        },
        "settings": {mode: {"steps": 2, "lr": 0.03} for mode in ("fixed", "episodic", "online")},
        "parallel": 10,
        "choice": "Chosen somewhere else.",
        "seconds": {"training": 1.0, "evaluation": 2.0, "total": 3.0},
        "versions": {"python": "3.11", "testtime": "0.1.0", "torch": "2.13"},
        "hardware": {"processor": "some CPU", "threads": 2, "machine": "Linux"},
        "cores": 2,
        "load": 0.5,
        "streams at once": 2,
    }


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
        if tag not in ("p", "li"):
            while self.open[-1] in ("p", "li") and tag != self.open[-1]:
                self.open.pop()
        assert self.open.pop() == tag


def test_the_text_table_has_a_row_for_each_set_and_the_mean(results: dict[str, Any]) -> None:
    lines = text_table(results).splitlines()
    assert lines[0].split() == ["error", "in", "%", "fixed", "episodic", "online"]
    assert lines[1].split() == ["clean", "0.0", "0.0", "10.0"]
    assert lines[-2].split() == ["mean", "of", "the", "shifts", "40.0", "40.0", "10.0"]
    assert lines[-1].split()[-3:] == ["0.5", "9.0", "8.0"]
    assert len({len(line) for line in lines}) == 1


def test_the_markdown_table_has_the_same_numbers(results: dict[str, Any]) -> None:
    lines = markdown_table(results).splitlines()
    assert lines[0] == "| error in % | `fixed` | `episodic` | `online` |"
    assert lines[4] == "| dim light | 40.0 | 40.0 | 10.0 |"
    assert lines[5] == "| **mean of the shifts** | **40.0** | **40.0** | **10.0** |"
    assert {line.count("|") for line in lines} == {5}


def test_the_page_stands_alone_and_is_well_formed(results: dict[str, Any]) -> None:
    page = render_page(results)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    outside = [one for one in tags.references if not one.startswith(("data:image/png;base64,", "#"))]
    assert outside == []
    assert not re.search(r"@import|url\((?!#)|fetch\(|<link|src=\"http", page)


def test_what_comes_from_the_results_is_escaped(results: dict[str, Any]) -> None:
    page = render_page(results)
    assert "fog & <b>ice" not in page
    assert "fog &amp; &lt;b&gt;ice&lt;/b&gt;" in page


def test_the_page_tells_the_measured_gain(results: dict[str, Any]) -> None:
    page = render_page(results)
    assert "cut the error on 2 shifts from 40.0% to 10.0%" in page
    assert "75% fewer mistakes" in page
    assert "rises by 10.0 points" in page


def test_a_loss_is_not_told_as_a_gain(results: dict[str, Any]) -> None:
    results["summary"]["online"] |= {"mean": 41.0, "clean": 0.0, "reduction": -2.5}
    gain = tell_gain(results)
    assert "did not help" in gain["headline"]
    assert "fewer" not in gain["headline"]
    assert gain["share"] == "no fewer mistakes"
    assert gain["clean"] == "does not change"


def test_a_number_missing_from_the_results_is_an_error(results: dict[str, Any]) -> None:
    import jinja2

    del results["seconds"]["total"]
    with pytest.raises(jinja2.UndefinedError):
        render_page(results)


def test_page_and_numbers_are_written_together(results: dict[str, Any], tmp_path: Path) -> None:
    page = write_page(results, tmp_path / "new")
    assert page.read_text() == render_page(results)
    assert {path.name for path in page.parent.iterdir()} == {"demo.json", "index.html"}


@pytest.mark.parametrize("inline", [True, False])
def test_figures_are_the_same_each_time_and_valid(results: dict[str, Any], inline: bool) -> None:
    for draw in (draw_bars, draw_streams):
        svg = draw(results, inline=inline)
        assert svg == draw(results, inline=inline)
        ElementTree.fromstring(svg)
        assert ("currentColor" in svg) == inline
        assert "#010203" not in svg
        assert "#040506" not in svg


def test_bars_say_every_error(results: dict[str, Any]) -> None:
    texts = [text.text for text in ElementTree.fromstring(draw_bars(results)).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("40.0") == 6  # two modes on two shifts and in the mean
    assert {"clean", "dim light", "mean of the shifts", "fixed", "episodic", "online"} <= set(texts)


def test_window_error_by_hand() -> None:
    seen, shares = window_error("--++-+++", 4)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]
    assert shares == pytest.approx([100, 100, 200 / 3, 50, 50, 25, 25, 25])
    assert window_error("-+", 100) == ([2], [50.0])


def test_stream_mean_by_hand(results: dict[str, Any]) -> None:
    assert stream_mean(results, "fixed", slice(0, 5)) == 80
    assert stream_mean(results, "fixed", slice(5, None)) == 0


def test_pictures_keep_their_pixels() -> None:
    picture = Image.open(io.BytesIO(picture_png(bytes([0, 255, 128, 64]), 2, scale=3)))
    assert picture.size == (6, 6)
    assert [picture.getpixel(place) for place in ((0, 0), (5, 0), (2, 5), (3, 3))] == [0, 255, 128, 64]


def test_the_core_needs_no_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'jinja2', 'typer', 'rich', 'markupsafe'): sys.modules[name] = None\n"
        "import testtime, testtime.report\n"
        "assert all(hasattr(testtime, name) for name in testtime.__all__)\n"
        "assert callable(testtime.train) and callable(testtime.evaluate) and testtime.__version__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
