"""Nothing depends on torch's global settings: dtype, device, gradient mode, autocast, number of threads."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import testtime as tt
from testtime import kernels
from testtime.kernels.cpu import build
from torch_defaults import DEFAULTS, threads

SOURCES = Path(tt.__file__).parent
IMAGES = tt.data.open("digits").images(torch.arange(6))
SETTINGS: dict[str, Any] = {"copies": 4, "lr": 0.05, "seed": 3}


if kernels.enabled() and build.available():  # torch's own sums depend on the threads
    DEFAULTS = DEFAULTS | {"2 threads": lambda: threads(2), "3 threads": lambda: threads(3)}


def answer(adapter: tt.Adapter) -> dict[str, Tensor]:
    """What an adapter says of some images, twice, and what it has learned."""
    first, second = adapter.predict(IMAGES), adapter.predict(IMAGES.flip(0))
    said = {"first": first.logits, "second": second.logits, "loss": second.loss_after, "confidence": first.confidence}
    return said | adapter.state_dict()


ADAPTERS: dict[str, Callable[[tt.YNet], tt.Adapter]] = {
    "fixed": lambda net: tt.Fixed(net, mirrored=True),
    "episodic": lambda net: tt.Episodic(net, steps=2, **SETTINGS),
    "episodic, side by side": lambda net: tt.Episodic(net, steps=2, parallel=3, task=tt.Rotation("all"), **SETTINGS),
    "resized crops": lambda net: tt.Episodic(net, steps=1, augment=tt.ResizedCropFlip(), **SETTINGS),
    "online": lambda net: tt.Online(net, **SETTINGS),
    "online, momentum": lambda net: tt.Online(
        net, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9), **SETTINGS
    ),
    "online, Adam": lambda net: tt.Online(net, optimizer=torch.optim.Adam, **SETTINGS),
    "online, a batch": lambda net: tt.Online(net, share="batch", **SETTINGS),
    "online, gated": lambda net: tt.Online(net, threshold=0.9, update="encoder", **SETTINGS),
    "bf16": lambda net: tt.Online(net, precision="bf16", **SETTINGS),
    "streams": lambda net: tt.Streams(net, len(IMAGES), **SETTINGS),
    "streams, few at a time": lambda net: tt.Streams(net, len(IMAGES), together=4, **SETTINGS),
}


def run(make: Callable[[tt.YNet], tt.Adapter]) -> dict[str, Tensor]:
    return answer(make(tt.load("digits-resnet8-gn-joint")))


# torch's own sums in bfloat16 depend on the threads
CASES = [(one, default) for one in ADAPTERS for default in DEFAULTS if one != "bf16" or "threads" not in default]


@pytest.mark.parametrize(("adapter", "default"), CASES)
def test_adapters(adapter: str, default: str) -> None:
    expected = run(ADAPTERS[adapter])
    with DEFAULTS[default]():
        found = run(ADAPTERS[adapter])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("method", ["joint", "plain", "alp", "uda"])
def test_training(method: Any, default: str) -> None:
    recipe = tt.Recipe(method=method, epochs=1, batch=8, lr=0.05, drops=())

    def train() -> str:
        net = tt.resnet26(depth=8, width=1, channels=1, size=16, seed=1)
        digits = tt.data.open("digits", split="train")
        images, labels = digits.images(torch.arange(24, device="cpu")), digits.labels[:24]
        target = images.flip(0) if method == "uda" else None
        return tt.train(
            net, images, labels, recipe=recipe, **({"target": target} if method == "uda" else {})
        ).fingerprint()

    expected = train()
    with DEFAULTS[default]():
        assert train() == expected


# Functions of torch that make tensors, and the place of a dtype among those of them that may make floats.
FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "logspace", "eye", "rand", "randn"}
FACTORIES |= {"randint", "randperm", "as_tensor", "scalar_tensor", "empty_strided"}


def test_whoever_makes_a_tensor_names_its_device_and_dtype() -> None:
    """A tensor made without them is of torch's defaults, which are the user's."""
    careless = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
                continue
            named = {keyword.arg for keyword in node.keywords}
            integer = node.func.attr in ("randint", "randperm") or (
                node.func.attr == "arange" and "dtype" not in named and not _may_be_float(node.args)
            )
            wanted = {"device"} if integer else {"device", "dtype"}
            if node.func.attr in FACTORIES and not wanted <= named:
                careless.append(f"{path.relative_to(SOURCES)}:{node.lineno} torch.{node.func.attr}")
    assert careless == []


def _may_be_float(arguments: list[ast.expr]) -> bool:
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, float) for one in arguments for node in ast.walk(one)
    )
