"""benchmarks/low_rank.py: paths of low rank that add nothing at first, and learn alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import testtime as tt
from scripts import load_script


@pytest.fixture
def low_rank() -> ModuleType:
    return load_script("benchmarks/low_rank.py")


def test_paths_add_nothing_and_learn_alone(low_rank: ModuleType) -> None:
    net = tt.vit(size=16, channels=1, width=24, depth=2).describe(task="rotation")
    images = torch.rand(3, 1, 16, 16)
    expected = net(images)
    low_rank.add_paths(net, 2)
    torch.testing.assert_close(net(images), expected)
    adapter = tt.Online(net, update=low_rank.is_path, lr=0.1, copies=4)
    adapter.predict(images)
    learned = dict(adapter.network().named_parameters())
    moved = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, learned[name])}
    paths = {name for name, parameter in net.named_parameters() if low_rank.is_path(name, parameter)}
    assert moved == paths
    assert len(paths) == 2 * 4 * len(list(net.encoder.get_submodule("blocks").children()))


def test_the_quick_form_runs_without_data(
    low_rank: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["low_rank.py", "--quick", "--device", "cpu", "--out", str(out)])
    low_rank.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["update"] for row in rows] == ["none", "encoder+ssl", "norm", "norm", "low rank", "low rank"]
    assert all(len(row["errors"]) == 5 for row in rows)
    assert 0 == rows[0]["bytes"] < rows[2]["bytes"] < rows[4]["bytes"] < rows[1]["bytes"]
    assert capsys.readouterr().out.count("corrupted") == 6
