"""`testtime train`: every method, resumed after a kill, over two processes."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest
import torch
from command_line import TINY, Run, start, wait_for
from safetensors.torch import load_file

from testtime.networks import load


def test_training_shows_plain_progress_in_a_pipe_and_refuses_other_settings(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*TINY, "--out", tmp_path)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'network.safetensors'}: epoch 3, loss ")
    assert re.fullmatch(r"train  9/9  .*epoch 3, loss [^\n]*\n", err)
    assert "\x1b" not in err
    code, _, err = run(*TINY, "--lr", "0.2", "--seed", "1", "--out", tmp_path)
    assert code == 1
    assert re.search(r"recipe\.lr: 0\.1 .*0\.2", err)
    assert re.search(r"recipe\.seed: 0 .*1", err)


@pytest.mark.parametrize(
    ("method", "extra"),
    [("plain", ["--weight-decay", "0.01"]), ("alp", ["--precision", "bf16"]), ("uda", ["--target", "digits"])],
)
def test_every_method_trains(run: Run, tmp_path: Path, method: str, extra: list[str]) -> None:
    arguments = [*TINY, "--limit", "16", "--epochs", "1", "--method", method, *extra]
    code, _, err = run(*arguments, "--out", tmp_path)
    assert code == 0, err
    recipe = json.loads((tmp_path / "record.json").read_text())["configuration"]["recipe"]
    assert (recipe["method"], recipe["weight_decay"]) == (method, 0.01 if method == "plain" else 5e-4)


def test_a_killed_training_is_resumed_bit_for_bit(run: Run, tmp_path: Path) -> None:
    arguments = [*TINY, "--limit", "128", "--epochs", "4"]
    process = start(*arguments, "--out", str(tmp_path / "killed"))
    try:
        wait_for(tmp_path / "killed" / "checkpoint.safetensors", process)
    finally:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "network.safetensors").exists()
    for name in ("killed", "whole"):
        assert run(*arguments, "--out", tmp_path / name)[0] == 0
    killed, whole = (load_file(tmp_path / name / "network.safetensors") for name in ("killed", "whole"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    assert not list((tmp_path / "killed").glob(".*"))


@pytest.mark.slow
def test_two_processes_train_as_one(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTTIME_KERNELS", "off")  # custom kernels round more, and the large first steps amplify it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = [
        start(*TINY, "--out", str(tmp_path / "two"), WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank,
              MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in "01"
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in together]
    assert [process.returncode for process in together] == [0, 0], outputs
    assert outputs[1] == ("", "")  # the first process speaks for both
    assert run(*TINY, "--out", tmp_path / "one")[0] == 0
    two, one = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("two", "one"))
    assert two["hardware"]["processes"] == 2
    assert two["configuration"] == one["configuration"]
    for key, slack in (("loss", 0), ("main", 0), ("task", 0), ("train_error", 1 / 48), ("test_error", 2 / 500)):
        curves = [[entry[key] for entry in record["epochs"]] for record in (two, one)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-4, abs=slack), key  # rounding may tip an image or two
    networks = [load_file(tmp_path / name / "network.safetensors") for name in ("two", "one")]
    for name, tensor in networks[1].items():
        torch.testing.assert_close(networks[0][name], tensor, rtol=0, atol=1e-3)


def test_statistics_of_training_images_are_stored_with_the_network(run: Run, tmp_path: Path) -> None:
    for count in (0, 24):
        assert run(*TINY, "--epochs", "1", "--statistics", count, "--out", tmp_path)[0] == 0
        statistics = load(tmp_path / "network.safetensors").statistics
        assert (0 if statistics is None else statistics.about["images"]) == count


def test_the_robust_recipe_and_held_out_images_are_recorded(run: Run, tmp_path: Path) -> None:
    extra = ["--recipe", "robust", "--consistency", "3", "--severity", "1.5", "--width", "2"]
    extra += ["--hold-out", "300", "--statistics", "20"]
    code, out, err = run(*TINY, "--limit", "16", "--epochs", "1", *extra, "--out", tmp_path)
    assert code == 0, err
    for shown in (out, err, run("info", tmp_path / "network.safetensors")[1]):
        assert re.search(r", held out \d", shown)
        assert not re.search(r", test \d", shown)
    configuration = json.loads((tmp_path / "record.json").read_text())["configuration"]
    recipe = configuration["recipe"]
    assert (recipe["method"], recipe["consistency"], recipe["severity"]) == ("robust", 3, 1.5)
    assert configuration["network"]["architecture"]["width"] == 2
    assert (configuration["data"]["held_out"], configuration["test"]["name"]) == (300, "digits-held-out")
    statistics = load(tmp_path / "network.safetensors").statistics
    assert statistics is not None
    assert statistics.about["unseen"]["images"] == 20
    assert statistics.about["unseen"]["set"] == "digits-held-out"
