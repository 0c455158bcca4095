"""Training on a GPU: recorded steps against steps taken one by one, resumed against whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from testtime import YNet, resnet26
from testtime.data import TensorSet
from testtime.randomness import Draws
from testtime.training import Recipe, Trainer, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def learn_some(norm: Any, recipe: Recipe, folder: Path | None = None, progress: Any = None, **given: Any) -> YNet:
    labels = torch.arange(64) % 10
    images = Draws.of(0, torch.arange(64)).integers(100, 3, 32, 32)
    images += 150 * (torch.arange(32) // 3 == labels[:, None])[:, None, :, None]  # a bar whose height is the class
    net = resnet26(depth=8, norm=norm, seed=1).cuda()
    return train(net, images.to(torch.uint8).cuda(), labels.cuda(), recipe, folder=folder, progress=progress, **given)


SHORT = Recipe(epochs=3, batch=16, lr=0.01, drops=(2,), attack_steps=2)


def test_images_that_are_read_on_the_way_train_as_those_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by a stream of their own, while the step before is still running; bit for bit."""
    images = Draws.of(0, torch.arange(512)).integers(256, 3, 32, 32).to(torch.uint8)
    source = TensorSet("pictures", images, torch.arange(512) % 10, tuple("abcdefghij"))
    recipe = replace(SHORT, batch=32, precision="bf16")
    held = train(resnet26(depth=14, seed=1).cuda(), source, recipe=recipe)
    monkeypatch.setattr("testtime.training.pool._resident_bytes", lambda device: 0)
    read = train(resnet26(depth=14, seed=1).cuda(), source, recipe=recipe)
    assert all(map(torch.equal, held.state_dict().values(), read.state_dict().values()))


@pytest.mark.parametrize("method", ["plain", "joint", "robust", "alp", "uda"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_training_from_a_graph_is_training_step_by_step(
    norm: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(SHORT, method=method)
    target: dict[str, Any] = (
        {"target": Draws.of(0, torch.arange(40)).uniform(3, 32, 32).cuda()} if method == "uda" else {}
    )
    replayed = learn_some(norm, recipe, **target)
    monkeypatch.setattr(Trainer, "_replica_fits", lambda self: False)
    monkeypatch.setattr(Trainer, "_record", lambda self, inputs: None)
    plain = learn_some(norm, recipe, **target)
    # With Batch Normalization, weights changed by a millionth at the start end up to 0.08 of the way apart.
    bound = 0.05 if norm == "group" else 0.1
    start = resnet26(depth=8, norm=norm, seed=1).state_dict()
    for (name, one), other in zip(replayed.state_dict().items(), plain.state_dict().values(), strict=True):
        moved = float((other.cpu() - start[name]).abs().max())
        assert float((one - other).abs().max()) <= bound * moved + 1e-6, name


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("changes", [{}, {"method": "robust", "schedule": "cosine"}])
def test_training_stopped_on_the_gpu_continues_bit_for_bit(
    norm: Any, precision: Any, changes: Any, tmp_path: Path
) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    recipe = replace(SHORT, precision=precision, **changes)
    whole = learn_some(norm, recipe).state_dict()
    with pytest.raises(KeyboardInterrupt):
        learn_some(norm, recipe, tmp_path, stop)
    resumed = learn_some(norm, recipe, tmp_path).state_dict()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def test_training_in_less_than_float32_learns_what_it_does() -> None:
    exact, *others = (
        [entry["loss"] for entry in net.card.record["epochs"]]
        for net in (
            learn_some("group", replace(SHORT, epochs=30, lr=0.05, drops=(), precision=precision))
            for precision in ("fp32", "tf32", "bf16")
        )
    )
    assert exact[-1] < 0.8 * exact[0]
    for losses in others:
        assert losses != exact
        assert abs(losses[0] - exact[0]) < 0.05
        assert abs(losses[-1] - exact[-1]) < 0.3
