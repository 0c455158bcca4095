"""The moving picture: well-formed, without anything that a host would block, and its numbers are the result file's."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from generate import moving
from generate.build import FIGURES, STREAM
from generate.result_files import ROOT, read_file

from testtime.storage import read_json


@pytest.mark.parametrize("scheme", moving.PALETTES)
def test_the_picture_is_that_of_the_result_file(scheme: str) -> None:
    found = read_json(ROOT / STREAM)
    svg = moving.draw_stream(read_file(STREAM), scheme)
    assert (ROOT / FIGURES / f"stream-{scheme}.svg").read_text(encoding="utf-8") == svg
    assert len(svg.encode()) < 300_000
    tree = ElementTree.fromstring(svg)
    assert {element.tag.rpartition("}")[2] for element in tree.iter()} <= {
        *("svg", "desc", "style", "g", "rect", "text", "polyline", "path"),
    }
    assert "href" not in svg
    texts = [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    for name, bits in found["wrong"].items():
        errors = [
            sum(map(int, bits[max(0, frame["number"] - found["window"]) : frame["number"]]))
            * 100
            / min(frame["number"], found["window"])
            for frame in found["frames"]
        ]
        assert [text for text in texts if re.fullmatch(rf"\d+% {name}", text)] == [
            f"{one:.0f}% {name}" for one in errors
        ]
    assert any(found["command"] in text and f"seed {found['seed']}" in text for text in texts)
