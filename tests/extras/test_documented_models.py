"""docs/models.md: its code runs with timm, without the download of weights."""

from __future__ import annotations

from typing import Any

import pytest

from code_blocks import ROOT, read_blocks

timm = pytest.importorskip("timm")
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
