"""`testtime info`: what a checkpoint holds, of any making."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EVIL, Run, assert_tame

from testtime import YNet, collect, resnet26
from testtime.evaluation.predict_files import format_summary, summarise


def test_info_counts_the_parameters_and_names_the_training(run: Run, network: Path) -> None:
    code, out, _ = run("info", network, "--json")
    assert code == 0
    summary = json.loads(out)
    net = resnet26(10, depth=8, channels=1, size=16)
    counts = {
        part: sum(p.numel() for p in getattr(net, part).parameters()) for part in ("encoder", "classifier", "ssl")
    }
    assert summary["parameters"] == counts | {"total": sum(counts.values())}
    assert summary["classes"] == list("0123456789")
    assert summary["training"]["recipe"]["method"] == "joint"
    assert summary["training"]["epochs"] == 1
    code, out, _ = run("info", network)
    assert code == 0
    for text in ("resnet26", f"{counts['encoder']:,}", "rotation", "joint, 1 epochs", "digits[48]", "mean 0.5"):
        assert text in out


@pytest.mark.parametrize(
    "record",
    [
        {"epochs": 3},
        {"epochs": "many"},
        {"epochs": [1]},
        {"epochs": [{"loss": "low", "test_error": []}], "configuration": 3, "seconds": "long", "hardware": "fast"},
        {"epochs": [{}], "configuration": {"recipe": [], "data": {"count": "all", "name": "\x1b[31m\nerror: x"}}},
    ],
)
def test_info_reads_odd_training_records(record: dict[str, Any], run: Run, tmp_path: Path) -> None:
    resnet26(depth=8, channels=1, size=8).describe(record=record).save(tmp_path / "net")
    code, out, err = run("info", tmp_path / "net")
    assert (code, err) == (0, "")
    assert all(line.isprintable() and not line.startswith("error") for line in out.splitlines())


def test_info_reads_networks_that_only_their_owner_can_build(run: Run, tmp_path: Path) -> None:
    net = YNet(torch.nn.BatchNorm2d(3), torch.nn.Linear(5, 2), torch.nn.Linear(5, 4))
    net.save(tmp_path / "own.safetensors")
    code, out, _ = run("info", tmp_path / "own.safetensors")
    assert code == 0
    assert "custom" in out
    assert "encoder 6, classifier 12, ssl 24" in out
    assert "no record" in out


def test_summaries_are_printable(network: Path) -> None:
    summary = summarise(network)
    plain = format_summary(summary).count("\n")
    summary |= {"file": EVIL, "classes": [EVIL], "task": EVIL, "architecture": {"name": EVIL, EVIL: EVIL}}
    summary["augment"] = {"name": EVIL, EVIL: EVIL}
    summary["training"]["recipe"] = {"method": EVIL, "batch": EVIL}
    summary["training"]["data"] |= {"name": EVIL}
    summary["training"]["hardware"] = {"device": EVIL}
    assert format_summary(summary).count("\n") == plain
    assert_tame(format_summary(summary))


def test_info_prints_settings_and_statistics(run: Run, tmp_path: Path) -> None:
    net = resnet26(depth=8, channels=1, size=8)
    code, out, _ = run("info", saved(net, tmp_path / "plain"), "--json")
    assert code == 0
    assert json.loads(out)["statistics"] is None
    assert json.loads(out)["settings"] == {}
    net.describe(settings={"ttt": {"lr": 0.002, EVIL[:-1]: EVIL}})
    collect(net, torch.rand(5, 1, 8, 8))
    assert net.statistics is not None
    net.statistics.about["set"] = EVIL
    code, out, _ = run("info", saved(net, tmp_path / "net"), "--json")
    counted = sum(p.numel() for part in (net.encoder, net.classifier) for p in part.parameters())
    assert json.loads(out)["settings"]["ttt"]["lr"] == 0.002
    assert json.loads(out)["statistics"]["images"] == 5
    assert json.loads(out)["statistics"]["parameters"] == counted
    code, out, _ = run("info", tmp_path / "net")
    assert code == 0
    assert_tame(out)
    assert re.search(r"^settings +ttt: lr 0.002", out, re.MULTILINE)
    assert re.search(rf"^statistics +5 images .* {counted:,} parameters", out, re.MULTILINE)


def saved(net: YNet, path: Path) -> Path:
    net.save(path)
    return path
