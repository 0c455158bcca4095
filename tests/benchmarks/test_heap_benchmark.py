"""benchmarks/heap.py: the same computations in processes that return freed memory, and reuse it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from scripts import load_script


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_the_quick_form_measures_both_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    out = tmp_path / "rows.json"
    load_script("benchmarks/heap.py").main(["--quick", "--out", str(out)])
    document = json.loads(out.read_text())
    assert [row["case"] for row in document["rows"]] == ["one stream, ResNet-26, 16 images", "16 streams, ResNet-26"]
    for row in document["rows"]:
        assert row["times"] == pytest.approx(row["returned"]["ms"] / row["reused"]["ms"], abs=0.01)
