"""benchmarks/train.py: the rates from which the documents work out what an experiment takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_measures_what_the_costs_are_worked_out_from(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks/train.py"
    arguments = ["--quick", "--device", "cpu", "--only-imagenet", "--imagenet", "synthetic", "--photographs", "16"]
    command = [sys.executable, str(script), *arguments, "--sizes", "32", "--out", str(tmp_path / "out.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
    document = json.loads((tmp_path / "out.json").read_text())
    rates = {row["name"]: row["images_per_s"] for row in document["rows"]}
    for start in ("decode JPEGs into the packed cache", "training, fed"):
        assert [rate > 0 for name, rate in rates.items() if name.startswith(start)]
    assert "synthetic" in document["photographs"]
