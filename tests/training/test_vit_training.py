"""Training a vision transformer: AdamW, warm-up, and tasks whose targets are not classes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from models import pictures
from pictures import smooth_pictures
from testtime import (
    CropFlip,
    Draws,
    Fixed,
    Jigsaw,
    Masked,
    Online,
    Recipe,
    Rotation,
    YNet,
    fit_branch,
    resnet26,
    train,
    vit,
)
from testtime import data as datasets
from testtime import training as trainings
from testtime.cli import commands
from testtime.diagnosis.measure import diagnose
from testtime.networks.checkpoint import load
from testtime.tasks import describe
from testtime.training.loop import train_together
from testtime.training.pool import shuffle

SHORT = Recipe.vit(epochs=3, batch=8, lr=0.003, warmup=1)
TASKS = {"masked": Masked(patch=2), "rotation": Rotation("all"), "jigsaw": Jigsaw()}


def small(task: str = "masked", seed: int = 0) -> YNet:
    outputs = TASKS[task].outputs
    net = vit(3, size=8, patch=2, width=8, depth=2, heads=1, channels=1, outputs=outputs, seed=seed)
    return net.describe(task=describe(TASKS[task]))


def same(one: YNet, other: YNet) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("task", list(TASKS))
def test_training_is_the_loop_written_out(task: str) -> None:
    images, labels = pictures(16)
    trained = train(small(task), images, labels, SHORT)
    net, number = small(task).train(), 0
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003, weight_decay=0.05)
    for epoch, lr in enumerate((0.0015, 0.003, 0.0015)):  # warm-up, then half a cosine
        optimizer.param_groups[0]["lr"] = lr
        for chosen in shuffle(16, 0, epoch, torch.device("cpu")).split(8):
            draws = Draws.of(0, chosen).purpose("train").fold(number)
            batch = CropFlip(padding=1)(images[chosen], draws.copies(1))[:, 0]
            views, targets = TASKS[task].views(batch, draws)
            losses = TASKS[task].loss(net.self_supervise(views), targets)
            optimizer.zero_grad()
            (F.cross_entropy(net(batch), labels[chosen]) + losses.mean()).backward()
            optimizer.step()
            number += 1
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    assert trained.card.task == ({"name": "masked", "patch": 2} if task == "masked" else task)


@pytest.mark.parametrize("together", [False, True])
def test_a_training_stopped_anywhere_goes_on_bit_for_bit(together: bool, tmp_path: Path) -> None:
    images, labels = pictures(16)

    def run(place: Path, stop: int | None = None) -> list[YNet]:
        def progress(done: int, total: int, text: str) -> None:
            if stop is not None and done >= stop:
                raise KeyboardInterrupt

        nets = [small(), small(seed=1)] if together else [small()]
        folders = [place / str(number) for number in range(len(nets))]
        return train_together(nets, images, labels, SHORT, folders=folders, progress=progress)

    whole = run(tmp_path / "whole")
    for stop in (1, 3, 5):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", stop)
    assert all(same(one, other) for one, other in zip(run(tmp_path / "parts"), whole, strict=True))


def test_the_schedule_rises_then_falls_and_scales() -> None:
    recipe = Recipe.vit(lr=1.0)
    rates = [recipe.lr_at(epoch) for epoch in range(300)]
    assert rates[:11] == pytest.approx([(epoch + 1) / 11 for epoch in range(11)])
    assert rates[155] == pytest.approx(0.5)
    assert rates[299] == pytest.approx((1 + math.cos(math.pi * 289 / 290)) / 2)
    assert recipe.over(30).warmup == 1
    assert recipe.over(1).warmup == 0
    assert "optimizer" not in Recipe().describe()
    assert Recipe.vit().describe()["optimizer"] == "adamw"
    for wrong in ({"optimizer": "adam"}, {"warmup": -1}, {"warmup": 150}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Recipe(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", list(TASKS))
def test_a_branch_alone_is_trained_and_resumed(task: str, tmp_path: Path) -> None:
    images, _ = pictures(24)
    given: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "batch": 8, "epochs": 4}
    net, before = small(task), small(task)
    fit_branch(net, images, folder=tmp_path / "whole", **given)
    about = net.card.record["branch"]
    assert about["chance"] == pytest.approx({"masked": 1.0, "rotation": 0.75, "jigsaw": 23 / 24}[task])
    epochs = about["epochs"]
    if task != "jigsaw":  # 24 classes take more than a few images
        assert epochs[-1]["task"] < epochs[0]["task"]
    assert about["held_out"]["error"] == min(entry["held_out_error"] for entry in epochs)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name]) != name.startswith("ssl."), name

    def stop(done: int, total: int, text: str) -> None:
        if done >= 5:
            raise KeyboardInterrupt

    parts = small(task)
    with pytest.raises(KeyboardInterrupt):
        fit_branch(parts, images, folder=tmp_path / "parts", progress=stop, **given)
    assert same(fit_branch(small(task), images, folder=tmp_path / "parts", **given), net)
    with pytest.raises(ValueError, match="needs a decoder"):
        fit_branch(small("masked"), images, start="copy")


@pytest.mark.parametrize("task", ["masked", "rotation"])
def test_learning_from_a_stream_lowers_the_tasks_loss(task: str) -> None:
    outputs = TASKS[task].outputs
    net = vit(3, size=16, width=24, depth=2, heads=2, channels=1, outputs=outputs)
    net.describe(augment={"name": "crop-flip", "padding": 1, "flip": False})
    train(net, smooth_pictures(200, 16, 16, 1), torch.arange(200) % 3, replace(SHORT, epochs=8, batch=20, lr=0.01))
    epochs = net.card.record["epochs"]
    assert epochs[-1]["task"] < 0.85 * epochs[0]["task"]
    shifted = 255 - smooth_pictures(40, 16, 16, 1)
    unadapted, adapted = Fixed(net).predict(shifted), Online(net, lr=0.01, copies=8).predict(shifted)
    assert adapted.loss_before[20:].mean() < 0.995 * unadapted.loss_before[20:].mean()  # of images not seen before
    assert (adapted.loss_after < adapted.loss_before).float().mean() > 0.8
    gated = Online(net, lr=0.01, copies=8, threshold=float(unadapted.confidence.median())).predict(shifted)
    assert torch.equal(gated.adapted, gated.confidence < float(unadapted.confidence.median()))
    assert 0 < gated.adapted.float().mean() < 1


@pytest.mark.parametrize("task", ["masked", "jigsaw"])
def test_other_tasks_are_diagnosed(task: str) -> None:
    images, labels = pictures(48)
    test_set = datasets.TensorSet("bars", images, labels, ("low", "middle", "high"))
    net = train(small(task), images, labels, SHORT)
    found = diagnose(net, test_set, trial=32)
    views, targets = TASKS[task].probe(images)
    with torch.no_grad():
        outputs = net.self_supervise(views)
    assert found.task_loss.value == pytest.approx(float(TASKS[task].loss(outputs, targets).mean()), rel=1e-4)
    assert found.task_error.value == pytest.approx(float(TASKS[task].error(outputs, targets).mean()), rel=1e-4)


def test_the_command_line_trains_it(tmp_path: Path) -> None:
    words = ["train", "--network", "vit", "--task", "masked", "--depth", "2", "--width", "12", "--epochs", "1"]
    commands.app([*words, "--limit", "64", "--statistics", "8", "--out", str(tmp_path)], standalone_mode=False)
    net = load(tmp_path / "network.safetensors")
    assert net.card.task == "masked"
    assert net.card.architecture["depth"] == 2
    assert net.card.record["configuration"]["recipe"]["optimizer"] == "adamw"
    assert net.statistics is not None


def test_what_prepare_refuses() -> None:
    setup = trainings.prepare("digits", task="jigsaw", limit=32)
    assert (setup.net.card.task, setup.net.card.architecture["outputs"]) == ("jigsaw", 24)
    for network, given, said in (
        ("resnet26", {"task": "masked"}, "needs a network with a decoder"),
        ("vit", {"norm": "batch"}, "`norm` is not supported by vit"),
        ("resnet26", {"patch": 4}, "`patch` is not supported by resnet26"),
        ("vit", {"task": "inpainting"}, "`task` must be named one of"),
    ):
        with pytest.raises(ValueError, match=said):
            trainings.prepare("digits", network, limit=32, **given)  # type: ignore[arg-type]
    net = resnet26(depth=8, channels=1, size=16)
    with pytest.raises(ValueError, match="'masked' needs a decoder"):
        train(net, *pictures(16), Recipe(epochs=1, batch=8, drops=(), task=Masked(patch=2)))
