"""docs/guards.md: it names every field of a guard that a user sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from testtime.adaptation.guard import Fallback

PAGE = (Path(__file__).parents[2] / "docs/guards.md").read_text(encoding="utf-8")


def test_the_tables_have_every_check_and_fallback() -> None:
    first = {re.sub(r'[`" ]', "", line.split("|")[1]) for line in PAGE.splitlines() if line.startswith("|")}
    assert {"rise", "burst", "collapse", "distance", *get_args(Fallback)} <= first
