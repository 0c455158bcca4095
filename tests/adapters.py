"""Adapters of every kind for the tests: one of each mode and method, on a network of a few layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

import testtime.adaptation.adapters
from testtime import (
    Adapter,
    Auto,
    Calibration,
    Card,
    Episodic,
    Fixed,
    Guard,
    Online,
    Prediction,
    YNet,
    resnet26,
    vit,
)
from testtime.adaptation.streams import Streams
from testtime.randomness import Draws

DEVICE = os.environ.get("TESTTIME_TEST_DEVICE", "cpu")  # where networks and images are
COUNT = 3  # images in a call; also the number of streams
NAN, INF = float("nan"), float("inf")
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
if DEVICE != "cpu":
    testtime.adaptation.adapters.choose_precision = lambda device: "fp32"  # the contract is exact


def pictures(count: int = COUNT, seed: int = 0, size: int = 16) -> Tensor:
    return Draws.of(seed, torch.arange(count)).uniform(3, size, size).to(DEVICE)


def network(norm: str = "group", seed: int = 1) -> YNet:
    """A network of a few layers, as if trained jointly, for many tests in little time; "resnet" is the paper's.

    "vit" is a transformer with a decoder, for the task `Masked`.
    """
    if norm == "vit":
        return vit(size=16, width=24, depth=2, heads=2, outputs=None, seed=seed).eval().to(DEVICE)
    if norm == "resnet":
        return resnet26(depth=8, size=16, seed=seed).eval().to(DEVICE)

    def normalise(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)

    def branch(outputs: int) -> nn.Module:
        pool = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        return nn.Sequential(normalise(16), pool, nn.Linear(64, outputs))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), normalise(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
        augment = {"name": "crop-flip", "padding": 2}
        record = {"configuration": {}}
        card = Card(size=16, mean=(0.5,) * 3, std=(0.25,) * 3, augment=augment, record=record)
        if norm == "no branch":
            return YNet(nn.Sequential(*encoder, branch(10)), nn.Identity(), None, card).eval().to(DEVICE)
        return YNet(encoder, branch(10), branch(4), card).eval().to(DEVICE)


# Every adapter of the contract: what it is called → how it is made. `more` overrides settings.
def fixed(net: YNet, **more: Any) -> Adapter:
    return Fixed(net)


def make(kind: Callable[..., Adapter], *args: Any, **given: Any) -> Callable[..., Adapter]:
    def build(net: YNet, **more: Any) -> Adapter:
        return kind(net, *args, **{"lr": 0.01, "copies": 4, **given, **more})

    return build


ADAPTERS: dict[str, Callable[..., Adapter]] = {
    "fixed": fixed,
    "episodic": make(Episodic, steps=2),
    "episodic, batch norm, in parallel": make(Episodic, steps=2, parallel=2),
    "episodic, encoder, shared": make(Episodic, steps=2, update="encoder", share="batch"),
    "online": make(Online),
    "online, encoder, momentum": make(Online, update="encoder", optimizer=MOMENTUM),
    "online, batch norm, shared": make(Online, share="batch"),
    "online, patterns": make(Online, update=["encoder.0.*", "ssl.*"]),
    "online, loss not measured": make(Online, measure_loss=False),
    "online, guarded": make(Online, guard=Guard(momentum=0.9)),
    "auto, online": make(Auto, reference=1.0, calibration=Calibration(online=0.0)),
    "streams": make(Streams, COUNT),
    "streams, two at a time": make(Streams, COUNT, together=2),
    "tent, online, batch norm": make(Online, method="tent"),
    "tent, episodic": make(Episodic, method="tent"),
    "tent, online, no branch": make(Online, method="tent"),
    "tent, streams": make(Streams, COUNT, method="tent", steps=2),
    "cotta, online, batch norm": make(Online, method="cotta"),
    "cotta, episodic, no branch": make(Episodic, method="cotta"),
    "cotta, streams": make(Streams, COUNT, method="cotta"),
    "online, vit": make(Online),
    "streams, vit": make(Streams, COUNT),
    "lame, online": make(Online, method="lame"),
    "lame, episodic, batch norm": make(Episodic, method="lame"),
}
IDLE = [name for name in ADAPTERS if name.startswith(("fixed", "lame"))]  # nothing is learned
LEARNING = [name for name in ADAPTERS if name not in IDLE]
REMEMBERING = [name for name in LEARNING if "online" in name or "streams" in name]
CERTAIN = [*IDLE, *(name for name in ADAPTERS if name.startswith("tent"))]  # nothing is drawn
MEASURING = [name for name in ADAPTERS if "not measured" not in name]
SELF_SUPERVISED = [name for name in MEASURING if not name.startswith(("tent", "cotta", "lame"))]


def network_for(name: str) -> YNet:
    if "vit" in name:
        return network("vit")
    return network("batch" if "batch norm" in name else "no branch" if "no branch" in name else "group")


def adapter_for(name: str, net: YNet | None = None, **more: Any) -> Adapter:
    return ADAPTERS[name](net or network_for(name), **more)


def same(a: Prediction, b: Prediction) -> bool:
    """Bit for bit; NaN equals NaN."""
    return all(
        torch.equal(torch.nan_to_num(getattr(a, f.name).float()), torch.nan_to_num(getattr(b, f.name).float()))
        for f in fields(Prediction)
    )


def close(a: Prediction, b: Prediction, tolerance: float = 1e-5) -> bool:
    return all(
        torch.allclose(getattr(a, f.name).float(), getattr(b, f.name).float(), atol=tolerance, equal_nan=True)
        for f in fields(Prediction)
    )


def samples(start: int = 0, count: int = COUNT) -> Tensor:
    return torch.arange(start, start + count, device=DEVICE)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": MOMENTUM,
    "decay": functools.partial(torch.optim.SGD, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, eps=1e-3),
    "lbfgs": functools.partial(torch.optim.LBFGS, max_iter=3),
}
