"""The vision transformer on a GPU: as on the CPU, recorded against eager, resumed against whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import close, pictures, same
from testtime import Draws, Jigsaw, Masked, Online, Recipe, Streams, YNet, resnet26, train, vit
from testtime.training import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = "cuda"
SHORT = Recipe.vit(epochs=3, batch=16, warmup=1, lr=0.003)
GIVEN: dict[str, Any] = {"lr": 0.02, "copies": 8}


def network(outputs: int | None = None, size: int = 16) -> YNet:
    return vit(size=size, width=48, depth=4, outputs=outputs, seed=1).eval()


@pytest.mark.parametrize("task", [Masked(), Masked(0.4, 2), Jigsaw(), Jigsaw(3)])
def test_views_are_those_of_the_cpu(task: Any) -> None:
    images, numbers = pictures(9, size=12), torch.arange(9)
    here, there = (task.views(images.to(device), Draws.of(3, numbers.to(device))) for device in ("cpu", GPU))
    for one, other in zip((*here, *task.probe(images)), (*there, *task.probe(images.to(GPU))), strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [None, 4])
@pytest.mark.parametrize("kind", ["online", "streams", "streams of norms"])
def test_a_recorded_step_is_the_eager_one_and_that_of_the_cpu(
    kind: str, outputs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(device: str) -> list[Any]:
        net, more = network(outputs).to(device), {"update": "norm"} if "norms" in kind else {}
        given: dict[str, Any] = {**GIVEN, **more, "precision": "fp32"}
        adapter = Online(net, **given) if kind == "online" else Streams(net, 3, **given)
        return [adapter.predict(pictures(3, seed=call).to(device)) for call in range(3)]

    recorded, expected = answer(GPU), answer("cpu")
    monkeypatch.setattr("testtime.adaptation.learner.can_record", lambda device: False)
    for one, eager, other in zip(recorded, answer(GPU), expected, strict=True):
        assert close(one, eager, 1e-4)
        assert torch.allclose(one.logits.cpu(), other.logits, atol=1e-3)
        assert torch.allclose(one.loss_after.cpu(), other.loss_after, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_stream_saved_and_loaded_goes_on_bit_for_bit(precision: Any, tmp_path: Path) -> None:
    net = network(size=32).to(GPU)
    whole, parts, again = (Online(net, precision=precision, **GIVEN) for _ in range(3))
    images = [pictures(4, size=32, seed=call).to(GPU) for call in range(2)]
    expected = [whole.predict(one) for one in images]
    parts.predict(images[0])
    parts.save(tmp_path / "state")
    again.load(tmp_path / "state")
    assert same(again.predict(images[1]), expected[1])


def learn(recipe: Recipe, folder: Path | None = None, progress: Any = None) -> YNet:
    images, labels = pictures(64), torch.arange(64) % 10
    return train(network().to(GPU), images.to(GPU), labels.to(GPU), recipe, folder=folder, progress=progress)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("method", ["joint", "robust"])
def test_training_stopped_continues_bit_for_bit(precision: Any, method: Any, tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    recipe = replace(SHORT, precision=precision, method=method)
    whole = learn(recipe).state_dict()
    with pytest.raises(KeyboardInterrupt):
        learn(recipe, tmp_path, stop)
    resumed = learn(recipe, tmp_path).state_dict()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_training_from_a_graph_is_training_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = learn(SHORT)
    monkeypatch.setattr(Trainer, "_record", lambda self, inputs: None)
    plain, start = learn(SHORT), network()
    for (name, one), other in zip(replayed.state_dict().items(), plain.state_dict().values(), strict=True):
        moved = float((other.cpu() - start.state_dict()[name]).abs().max())
        assert float((one - other).abs().max()) <= 0.05 * moved + 1e-6, name


def test_jigsaw_streams_are_recorded() -> None:
    net = resnet26(depth=8, size=16, outputs=24).eval().describe(task="jigsaw")
    answers = [
        Streams(net.to(device), 3, precision="fp32", **GIVEN).predict(pictures(3).to(device)) for device in (GPU, "cpu")
    ]
    assert torch.allclose(answers[0].logits.cpu(), answers[1].logits, atol=1e-3)
