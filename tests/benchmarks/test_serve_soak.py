"""A very short form of benchmarks/serve_soak.py, which takes ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "serve_soak.py"


@pytest.mark.slow
def test_nothing_is_lost_mixed_up_or_leaked(tmp_path: Path) -> None:
    given = ("--minutes", "0.7", "--streams", "64", "--slots", "8", "--evictions", "5", "--out", tmp_path / "found")
    done = subprocess.run([sys.executable, SOAK, *map(str, given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "found").read_text())
    assert found["faults"] == []
    assert found["kills"] >= 1
    assert found["compared_images"] >= 20
