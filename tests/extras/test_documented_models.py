"""docs/models.md: its code runs with timm, without the download of weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

timm = pytest.importorskip("timm")
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from code_blocks import ROOT, read_blocks

BLOCKS = [block for block in read_blocks(ROOT / "docs/models.md") if block.mark == "models"]


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def create_untrained(name: str, pretrained: bool = False, **given: Any) -> Any:
        return create(name, **given)

    monkeypatch.setattr(timm, "create_model", create_untrained)
    assert BLOCKS
    names: dict[str, Any] = {}
    for block in BLOCKS:
        block.execute(names)
    assert names["net"].card.record["branch"]["task"] == "rotation"
