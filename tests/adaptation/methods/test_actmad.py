"""ActMAD: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from adapters import COUNT, network, pictures
from loops import CLOSE, make_batches, plain_network
from models import VisionTransformer
from testtime import Episodic, Online, Streams, YNet, collect, resnet26, split
from testtime.networks.resnet import GroupNormReLU

LR = 0.01
SGD = {"lr": LR, "optimizer": torch.optim.SGD}


def actmad(net: YNet, batches: list[Tensor]) -> Iterator[tuple[Tensor, float]]:
    """Mirza et al. 2023: a step that brings the moments of each layer's outputs to those of training; with the loss."""
    statistics, model = net.statistics, copy.deepcopy(net).eval()
    assert statistics is not None
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> object:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            outputs[name] = nn.GroupNorm.forward(layer, *inputs) if isinstance(layer, GroupNormReLU) else output

        return hook

    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) and not name.startswith("ssl"):
            layer.register_forward_hook(note(name))  # type: ignore[arg-type]
    moving = [*model.encoder.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.SGD(moving, lr=LR)
    for batch in batches:
        model(batch)
        loss = torch.zeros(())
        for name, output in outputs.items():
            loss = loss + (output.mean((0, 2, 3)) - statistics.means[name]).abs().mean() / 2
            loss = loss + (output.var((0, 2, 3), correction=0) - statistics.variances[name]).abs().mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield model(batch).detach(), float(loss.detach())


@pytest.mark.parametrize("norm", ["batch", "group", "resnet", "resnet, batch", "no branch"])
def test_actmad(norm: str) -> None:
    net = resnet26(depth=8, size=16, seed=1, norm="batch").eval() if norm == "resnet, batch" else network(norm)
    collect(net, pictures(20, seed=9))
    batches = make_batches(3)
    adapter = Online(net, method="actmad", **SGD)
    for batch, (expected, loss) in zip(batches, actmad(net, batches), strict=True):
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits, expected, **CLOSE)
        torch.testing.assert_close(found.loss_before, torch.full((len(batch),), loss), **CLOSE)
        assert found.loss_after.mean() < found.loss_before.mean()


def test_images_above_the_threshold_do_not_count_in_the_moments() -> None:
    net, images = collect(network(), pictures(20, seed=9)), make_batches(1, 8)[0]
    confidence = Online(net, method="actmad", steps=0).predict(images).confidence
    threshold = float(confidence.sort().values[4:6].mean())
    wanted = confidence < threshold
    found = Online(net, method="actmad", threshold=threshold, **SGD).predict(images)
    assert torch.equal(found.adapted, wanted)
    expected, _ = next(actmad(net, [images[wanted]]))
    torch.testing.assert_close(found.logits[wanted], expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:The method 'actmad' needs several images")
@pytest.mark.parametrize("norm", ["group", "resnet"])
def test_actmad_in_streams_of_single_images(norm: str) -> None:
    net, calls = collect(network(norm), pictures(20, seed=9)), [pictures(seed=seed) for seed in range(2)]
    streams = Streams(net, COUNT, method="actmad", **SGD)
    alone = [actmad(net, [call[row : row + 1] for call in calls]) for row in range(COUNT)]
    for call in calls:
        torch.testing.assert_close(streams(call), torch.cat([next(one)[0] for one in alone]), **CLOSE)


@pytest.mark.filterwarnings("ignore:The method 'actmad' needs several images")
def test_episodes_of_single_images_share_an_encoder_that_does_not_learn() -> None:
    net, images = collect(network(), pictures(20, seed=9)), pictures()
    given = {"method": "actmad", "share": "image", "update": ["classifier.*"], **SGD}
    together, alone = (Episodic(net, parallel=parallel, **given)(images) for parallel in (COUNT, 1))
    torch.testing.assert_close(together, alone, **CLOSE)


def test_a_relu_in_place_does_no_harm() -> None:
    net, batches = collect(network("batch"), pictures(20, seed=9)), make_batches(2)
    expected = [Online(net, method="actmad", **SGD)(batch) for batch in batches]
    for layer in net.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = True
    assert all(torch.equal(Online(net, method="actmad", **SGD)(b), e) for b, e in zip(batches, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The method 'actmad' needs several images")
def test_replicas_of_a_network_that_cannot_be_stacked_run_one_by_one() -> None:
    convolution, norm, act = nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.PReLU(8)
    model = nn.Sequential(convolution, norm, act, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    net = collect(split(model, "2").eval(), pictures(20, seed=9))
    with pytest.raises(ValueError, match="one replica"):
        Streams(net, COUNT, method="actmad").predict(pictures())
    check_streams(net)


@pytest.mark.filterwarnings("ignore:The method 'actmad' needs several images")
def test_replicas_of_a_transformer() -> None:
    net = collect(split(VisionTransformer(), "block1").eval(), pictures(20, seed=9))
    together = Streams(net, COUNT, method="actmad", lr=1e-4)
    torch.testing.assert_close(together(pictures()), check_streams(net), **CLOSE)


def check_streams(net: YNet) -> Tensor:
    """One stream at a time is an episode; returns the logits."""
    alone = Episodic(net, method="actmad", share="image", parallel=1, lr=1e-4).predict(pictures())
    assert (alone.loss_after < alone.loss_before).all()
    streams = Streams(net, COUNT, together=1, method="actmad", lr=1e-4)
    torch.testing.assert_close(streams(pictures()), alone.logits, **CLOSE)
    return alone.logits


def test_without_statistics_it_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"tt\.collect"):
        Online(network(), method="actmad").predict(pictures())


def test_a_step_computed_by_hand() -> None:
    """One image with outputs 1 and -1, training had 0 and 0; a single pixel has variance 0, as in training."""
    net = collect(plain_network(), torch.full((1, 2, 1, 1), 0.5))
    adapter = Online(net, method="actmad", **SGD)
    with pytest.warns(UserWarning, match="several images"):
        found = adapter.predict(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    assert float(found.loss_before) == pytest.approx(0.5, abs=1e-4)  # (|1| + |-1|) / 2 / 2
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.bias, torch.tensor([-LR / 4, LR / 4]), **CLOSE)  # sign / 2 / 2
    torch.testing.assert_close(learned.weight, torch.tensor([1 - LR / 4, 1 - LR / 4]), **CLOSE)
