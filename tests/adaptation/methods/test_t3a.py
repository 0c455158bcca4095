"""T3A: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adapters import COUNT, network, pictures
from loops import CLOSE, SHARP, entropy, make_batches, plain_network, sharpen
from models import VisionTransformer
from testtime import Card, Episodic, Online, Streams, YNet, split
from testtime.adaptation.methods import METHODS
from testtime.adaptation.objectives import Prototypes


def t3a(net: YNet, batches: list[Tensor], most: int = 20) -> Iterator[Tensor]:
    """Iwasawa and Matsuo 2021: of each class the most certain features, whose mean direction classifies."""
    linear = [
        layer for part in (net.encoder, net.classifier) for layer in part.modules() if isinstance(layer, nn.Linear)
    ][-1]
    supports = [(weight, *judge(linear(weight)[None])) for weight in linear.weight]
    for batch in batches:
        features = embed(net, linear, batch)
        supports += [(feature, *judge(linear(feature)[None])) for feature in features]
        prototypes = []
        for label in range(len(linear.weight)):
            own = sorted((one for one in supports if one[1] == label), key=lambda one: one[2])[:most]
            total = sum((F.normalize(feature, dim=0) for feature, _, _ in own), torch.zeros(features.shape[1]))
            prototypes.append(F.normalize(total, dim=0))
        yield features @ torch.stack(prototypes).T


def judge(logits: Tensor) -> tuple[int, float]:
    return int(logits.argmax()), float(entropy(logits))


def embed(net: YNet, linear: nn.Linear, batch: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = linear.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    net(batch)
    handle.remove()
    return seen[0]


@torch.no_grad()
@pytest.mark.parametrize("norm", ["batch", "group", "resnet", "no branch"])
def test_t3a(norm: str) -> None:
    net, batches = network(norm), make_batches(4, 40)  # more images of a class than supports
    adapter = Online(net, method="t3a")
    for batch, expected in zip(batches, t3a(net, batches), strict=True):
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits, expected, **CLOSE)
        torch.testing.assert_close(found.loss_before, entropy(net(batch)), **CLOSE)
        assert found.adapted.all()
        once = Episodic(net, method="t3a").predict(batch)  # a call is an episode
        torch.testing.assert_close(once.logits, next(t3a(net, [batch])), **CLOSE)


@torch.no_grad()
def test_images_above_the_threshold_are_no_supports() -> None:
    net, images = sharpen(network()), make_batches(1, 20)[0]
    confidence = Online(net, method="t3a", steps=0).predict(images).confidence
    threshold = float(confidence.sort().values[9:11].mean())
    wanted = confidence < threshold
    found = Online(net, method="t3a", threshold=threshold).predict(images)
    assert torch.equal(found.adapted, wanted)
    torch.testing.assert_close(found.logits[wanted], next(t3a(net, [images[wanted]])), **SHARP)


@torch.no_grad()
def test_few_supports() -> None:
    class Two(Prototypes):
        supports = 2

    net, batches = sharpen(network()), make_batches(3, 30)
    adapter = Online(net, method=replace(METHODS["t3a"], objective=Two))
    for batch, expected in zip(batches, t3a(net, batches, 2), strict=True):
        torch.testing.assert_close(adapter(batch), expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("together", [None, 2])
def test_t3a_in_streams(together: int | None) -> None:
    net, calls = network(), [pictures(seed=seed) for seed in range(4)]
    streams = Streams(net, COUNT, method="t3a", together=together)
    alone = [t3a(net, [call[row : row + 1] for call in calls]) for row in range(COUNT)]
    for call in calls:
        torch.testing.assert_close(streams(call), torch.cat([next(one) for one in alone]), **CLOSE)


@torch.no_grad()
def test_streams_of_a_network_that_cannot_be_stacked() -> None:
    net, images = split(VisionTransformer(), "block1").eval(), pictures()
    alone = [Online(net, method="t3a")(image) for image in images.split(1)]
    torch.testing.assert_close(Streams(net, COUNT, method="t3a")(images), torch.cat(alone), **CLOSE)


def test_a_stream_stores_only_its_supports() -> None:
    streams = Streams(network(), COUNT, method="t3a")
    streams.predict(pictures())
    state = streams.state_dict()
    stored = {name for name, tensor in state.items() if name.startswith("learner/") and tensor.numel()}
    assert stored == {"learner/objective/features", "learner/objective/entropy", "learner/shape"}
    assert state["learner/objective/features"].shape == (COUNT, 10, 20, 64)


def test_supports_are_saved_reset_and_put_back() -> None:
    net, batches = network(), make_batches(2)
    adapter, other = (Online(net, method="t3a") for _ in range(2))
    first = adapter(batches[0])
    other.load_state_dict(adapter.state_dict())
    assert torch.equal(adapter(batches[1]), other(batches[1]))
    before = adapter.state_dict()
    assert adapter.predict(torch.full_like(batches[0], float("nan"))).rolled_back.all()
    after = adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "objective" in name)
    adapter.reset()
    assert torch.equal(adapter(batches[0]), first)


def test_an_update_computed_by_hand() -> None:
    """Two classes with weights along the axes; the image lies between them, nearer the first."""
    linear = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))
    card = Card(size=1, mean=(0.0, 0.0), std=(1.0, 1.0))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    net = YNet(nn.Identity(), head, None, card, channels=2).eval()
    image = torch.tensor([0.8, 0.6]).view(1, 2, 1, 1)
    found = Online(net, method="t3a").predict(image)
    torch.testing.assert_close(found.logits_before, torch.tensor([[0.8, 0.6]]))
    # The first prototype becomes (1, 0) + (0.8, 0.6) = (1.8, 0.6), of length 1.8973666.
    torch.testing.assert_close(found.logits, torch.tensor([[(0.8 * 1.8 + 0.6 * 0.6) / 1.8973666, 0.6]]))


def test_a_network_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="linear layer"):
        Online(plain_network(), method="t3a").predict(torch.rand(1, 2, 1, 1))


def test_a_method_with_a_gradient_needs_parameters() -> None:
    with pytest.raises(ValueError, match='got "none"'):
        Online(network(), method="tent", update="none")
