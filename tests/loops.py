"""What the plain loops of the methods' tests have in common."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from adapters import pictures
from testtime import Card, YNet

LR = 0.05
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
SHARP: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}  # where logits are several times as large, see `sharpen`
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def make_batches(count: int = 4, size: int = 6) -> list[Tensor]:
    """Batches of images that are not all alike: four patches of any colour, with some noise."""
    patches = [
        pictures(size, seed=100 + seed, size=2).repeat_interleave(8, 2).repeat_interleave(8, 3) for seed in range(count)
    ]
    return [0.8 * patch + 0.2 * pictures(size, seed=seed) for seed, patch in enumerate(patches)]


def use_batch_statistics(net: YNet) -> YNet:
    """A copy that normalises with the statistics of the batch, and tracks none."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return net


def list_norms(net: YNet) -> list[nn.Parameter]:
    """The affine parameters of encoder and classifier, in order."""
    layers = [layer for part in (net.encoder, net.classifier) for layer in part.modules()]
    return [p for layer in layers if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) for p in layer.parameters()]


def sharpen(net: YNet, factor: float = 12.0) -> YNet:
    """The network with larger logits, so that some of its answers are certain."""
    last = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in last:
            layer.weight.mul_(factor)
    return net


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def plain_network(classes: int = 2) -> YNet:
    """One norm without anything else: the logits are the normalised channels of a single pixel."""
    card = Card(size=1, mean=(0.0,) * classes, std=(1.0,) * classes)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return YNet(nn.Sequential(nn.GroupNorm(1, classes)), head, nn.Flatten(), card, channels=classes).eval()
