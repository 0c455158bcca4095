"""docs/methods.md: it names every method."""

from __future__ import annotations

import re
from pathlib import Path

from testtime import METHODS

PAGE = (Path(__file__).parents[2] / "docs/methods.md").read_text(encoding="utf-8")


def test_the_table_has_every_method_and_what_it_needs() -> None:
    words = {"branch": "branch", "batch": "batches", "statistics": "statistics", "batchnorm": "BatchNorm"}
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    needs = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert needs.keys() == METHODS.keys()
    for name, method in METHODS.items():
        assert {need for need, word in words.items() if word in needs[name]} == set(method.needs), name
