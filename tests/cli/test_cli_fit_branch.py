"""`testtime fit-branch`: the result, held-out images, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from command_line import Run
from PIL import Image
from safetensors.torch import load_file

from testtime.data import open as open_set
from testtime.networks import load

SHORT = ["--epochs", "1", "--batch", "16", "--limit", "48", "--device", "cpu"]
MODEL = """
import torch, testtime as tt
from torch import nn

def make():
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()
    return tt.split(model, size=16, mean=(0.5,), std=(0.25,))
"""


def test_the_branch_of_a_network_is_trained_and_nothing_else(run: Run, network: Path, tmp_path: Path) -> None:
    arguments = ["fit-branch", "-c", network, *SHORT, "--copy", "--out", tmp_path]
    code, out, err = run(*arguments)
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'network.safetensors'}: rotation error ")
    before, after = load_file(network), load_file(tmp_path / "network.safetensors")
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != name.startswith("ssl."), name
    record, old = load(tmp_path / "network.safetensors").card.record, load(network).card.record
    assert {name: value for name, value in record.items() if name != "branch"} == old
    recipe = record["branch"]["configuration"]["recipe"]
    assert (recipe["start"], recipe["joint"], recipe["batch"]) == ("copy", False, 16)
    assert record["branch"]["held_out"]["images"] == 4  # a tenth of 48
    code, _, err = run(*arguments, "--seed", "1")
    assert code == 1
    assert "recipe.seed" in err


def test_held_out_images_are_those_of_the_data_set(run: Run, network: Path, tmp_path: Path) -> None:
    code, _, err = run("fit-branch", "-c", network, *SHORT, "--hold-out", "300", "--joint", "--out", tmp_path)
    assert code == 0, err
    configuration = json.loads((tmp_path / "record.json").read_text())["configuration"]
    assert configuration["data"]["held_out"] == 300
    assert configuration["held_out"]["hash"] == open_set("digits-held-out").fingerprint()[:16]
    assert configuration["data"]["count"] == 48
    code, _, err = run("fit-branch", "-c", network, *SHORT, "--hold-out", "0", "--out", tmp_path / "all")
    assert code == 0, err
    assert json.loads((tmp_path / "all/record.json").read_text())["configuration"]["held_out"] is None


def test_unreadable_pictures_are_named_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(8):
        Image.new("RGB", (40, 40), (number * 20, 0, 0)).save(pictures / f"{number}.png")
    (pictures / "8.png").write_bytes(b"")
    arguments = ["fit-branch", "-c", "cifar10-resnet26-gn-plain", "--data", pictures, "--epochs", "1", "--batch", "4"]
    code, _, err = run(*arguments, "--device", "cpu", "--out", tmp_path / "run")
    assert code == 1
    assert "8.png" in err
    assert not (tmp_path / "run").exists()
    code, _, err = run(*arguments, "--device", "cpu", "--on-bad-image", "skip", "--out", tmp_path / "run")
    assert code == 0, err
    assert "left out: " in err


def test_the_branch_of_a_model_is_trained(run: Run, tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    given = ["-m", f"{tmp_path / 'mine.py'}:make", "--weights"]
    fit = ["--data", "digits", *SHORT, "--out", tmp_path / "run"]
    torch.save({"weight": torch.ones(1)}, tmp_path / "wrong.pth")
    for file, said in (("none.pth", "no such file"), ("wrong.pth", "weight")):
        code, out, err = run("fit-branch", *given, tmp_path / file, *fit)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert file in err
        assert said in err
    assert not (tmp_path / "run").exists()
    code, _, err = run("fit-branch", *given[:2], *fit)
    assert code == 0, err
    code, out, err = run("predict", pictures, *given, tmp_path / "run" / "network.safetensors", "--device", "cpu")
    assert (code, err.count("\n")) == (0, 1)  # the branch is trained: the network's name, and no warning
    assert err.startswith("network: ")
    assert len(out.splitlines()) == 3
