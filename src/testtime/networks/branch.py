"""A self-supervised branch for a model that has none: a copy of its classifier, or a fresh head on its features."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from testtime.networks.parts import Back
from testtime.networks.traced import find_last_layer, is_last_layer

Kind = Literal["copy", "head"]
_WIDTH = 256
"""Width of a fresh head."""


class Pool(nn.Module):
    """The mean over some dimensions, counted from the end, so that the rest is `(N, C)`."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, features: Tensor) -> Tensor:
        return features.mean(self.dims)


class Residual(nn.Module):
    """A module whose input is added to its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def copy_classifier(classifier: nn.Module, outputs: int, features: Tensor | None, seed: int) -> nn.Module | None:
    """Return a copy of a classifier with a new last layer; None if that gives something else than `(N, outputs)`.

    Args:
        classifier: From features to logits.
        outputs: Outputs of the copy.
        features: Features to test the copy on; None: it is not tested.
        seed: Seed of the new layer.
    """
    branch = copy.deepcopy(classifier)
    if isinstance(branch, fx.GraphModule):
        name = find_last_layer(branch)
    else:
        name = None if features is None else _find_last_called(branch, features)
    if name is None:
        return None
    layer = branch.get_submodule(name)
    branch.set_submodule(name, _make_last(layer, outputs, seed))
    if isinstance(branch, fx.GraphModule):
        branch.recompile()
    if isinstance(branch, Back):
        branch.out_features = outputs
    if features is not None:
        try:
            with torch.no_grad():
                if _run_quietly(branch, features).shape != (len(features), outputs):
                    return None
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
    return branch


def make_head(features: Tensor, outputs: int, seed: int) -> nn.Sequential:
    """Return a fresh head: pooling or the mean of the tokens, a linear layer, a residual MLP, a linear layer.

    Args:
        features: What it is for, `(N, C)`, `(N, C, H, W)`, or with the channels last `(N, T, C)`, `(N, H, W, C)`.
        outputs: Outputs of the head.
        seed: Seed of its weights.
    """
    shape = features.shape[1:]
    # Of four dimensions the two sides of an image are the ones that are equal.
    is_first = len(shape) == 3 and (shape[1] == shape[2] or shape[0] != shape[1])
    dims = (-2, -1) if is_first else tuple(range(-len(shape), -1))
    channels = shape[0] if is_first else shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        expand, reduce = nn.Linear(_WIDTH, 2 * _WIDTH, **kind), nn.Linear(2 * _WIDTH, _WIDTH, **kind)
        head = nn.Sequential(
            *([Pool(dims)] if dims else []),
            nn.LayerNorm(channels, **kind),
            nn.Linear(channels, _WIDTH, **kind),
            Residual(nn.Sequential(nn.LayerNorm(_WIDTH, **kind), expand, nn.GELU(), reduce)),
            nn.Linear(_WIDTH, outputs, **kind),
        )
    return head.to(features.device, features.dtype)


def _find_last_called(part: nn.Module, features: Tensor) -> str | None:
    names: list[str] = []
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: names.append(name))
        for name, layer in part.named_modules()
        if is_last_layer(layer)
    ]
    try:
        with torch.no_grad():
            part(features)
    finally:
        for hook in hooks:
            hook.remove()
    return names[-1] if names else None


def _run_quietly(part: nn.Module, features: Tensor) -> Tensor:
    # `forward`, since calling a traced model also prints the location of an error
    return part.forward(features) if isinstance(part, fx.GraphModule) else part(features)


def _make_last(layer: nn.Module, outputs: int, seed: int) -> nn.Module:
    """Return a new layer like a linear layer or a 1×1 convolution, with another number of outputs."""
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bias = layer.bias is not None
        if isinstance(layer, nn.Conv2d):
            fresh = nn.Conv2d(layer.in_channels, outputs, 1, bias=bias, device="cpu", dtype=torch.float32)
        else:
            fresh = nn.Linear(layer.in_features, outputs, bias, device="cpu", dtype=torch.float32)
    return fresh.to(layer.weight.device, layer.weight.dtype)
