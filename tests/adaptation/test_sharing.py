"""Replicas share the layers that do not differ between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adapters import COUNT, close, network, pictures
from models import VisionTransformer
from testtime import Online, Streams, YNet, resnet26, split
from testtime.adaptation.adam import Adam

pytestmark = [
    pytest.mark.filterwarnings("ignore:The method .* needs several images"),
    pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics"),
]


def measure(net: YNet, **given: Any) -> int:
    """Bytes that a further stream adds to a saved state."""
    sizes = []
    for count in (1, 2):
        streams = Streams(net, count, **given)
        streams.predict(pictures(count))
        state = streams.state_dict().items()
        sizes.append(sum(tensor.nbytes for name, tensor in state if name.startswith("learner/")))
    return sizes[1] - sizes[0]


def test_a_stream_that_moves_norms_stores_only_these() -> None:
    net = resnet26(depth=8, size=16, norm="batch").eval()
    parts = (net.encoder, net.classifier)
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, nn.BatchNorm2d)]
    channels = sum(layer.num_features for layer in layers)
    # Scale, shift, mean and variance; two averages of Adam for scale and shift. Counts: of batches, and of their steps.
    assert measure(net, method="tent") == 4 * (4 + 4) * channels + (8 + 2 * 4) * len(layers)
    assert measure(net, method="tent") < sum(parameter.nbytes for parameter in net.parameters()) / 10


@pytest.mark.parametrize("norm", ["batch", "group", "resnet", "transformer"])
@pytest.mark.parametrize("update", ["norm", "norm-early"])
def test_streams_that_share_layers_are_as_if_alone(norm: str, update: str) -> None:
    torch.manual_seed(0)
    net = split(VisionTransformer(), "block1").eval() if norm == "transformer" else network(norm)
    given: dict[str, Any] = {"method": "tent", "update": update, "lr": 0.01, "optimizer": torch.optim.SGD}
    streams, alone = Streams(net, COUNT, **given), [Online(net, **given) for _ in range(COUNT)]
    for seed in range(3):
        images = pictures(seed=seed)
        found = streams.predict(images)
        for row, adapter in enumerate(alone):
            assert close(found[row : row + 1], adapter.predict(images[row : row + 1]), 1e-4)


@pytest.mark.parametrize("statistics", ["source", "batch", "running"])
def test_a_part_that_does_not_learn_has_statistics_of_each_stream(statistics: str) -> None:
    net = network("batch")
    given: dict[str, Any] = {"method": "tent", "update": "encoder", "statistics": statistics, "optimizer": Adam}
    streams, alone = Streams(net, COUNT, **given), [Online(net, **given, share="image") for _ in range(COUNT)]
    for seed in range(2):
        images = pictures(seed=seed)
        found = streams.predict(images)
        for row, adapter in enumerate(alone):
            assert close(found[row : row + 1], adapter.predict(images[row : row + 1]), 1e-3)


def test_what_a_stream_has_learned_is_a_whole_network() -> None:
    net = network("batch")
    adapter = Online(net, method="tent", lr=0.05)
    expected = adapter.predict(pictures())
    learned = adapter.network()
    changed = {name for name, tensor in learned.state_dict().items() if not torch.equal(tensor, net.state_dict()[name])}
    assert changed == {"encoder.1.weight", "encoder.1.bias", "classifier.0.weight", "classifier.0.bias"}
    again = Online(learned, method="norm").predict(pictures())
    torch.testing.assert_close(again.logits, expected.logits, rtol=1e-4, atol=1e-4)
