"""S independent copies of a network as one network.

A batch for each replica goes in, `(S, B, C, H, W)`, an answer for each comes out, `(S, B, K)`; replica s sees and
changes its own parameters only. Every parameter and buffer of the network is held once, stacked to `(S, *shape)`, so
one optimizer step moves all replicas and a row of the tensors is one replica.

Where the layers allow it, the replicas' channels stand one behind the other, `(B, S·C, H, W)`, and the copies become
one wide network: convolutions with S times the groups, GroupNorm with S times the groups, BatchNorm as it is, linear
layers as batched products. A part with a layer that is not known here, or whose own code does not treat channels
alike, goes through `torch.func.vmap` instead. Which of the two is right is tried out on real numbers, not guessed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from testtime.networks.ynet import YNet

log = logging.getLogger(__name__)

Part = Literal["encoder", "classifier", "ssl"]
PARTS: tuple[Part, ...] = ("encoder", "classifier", "ssl")


class Replicas:
    """`count` copies of a `YNet` that answer, learn and are reset side by side.

    Args:
        net: The network to copy; it is not changed and shares no memory with the copies.
        count: How many copies, S.
        parts: Which parts each replica has for itself. The others are held once and serve all: adaptation never
            changes the classifier, so a copy of it for each replica would be waste.
        example: An image batch `(N, C, H, W)` of the size to come, for trying out the wide form. Without it a part
            whose containers are not all known goes through vmap.
    """

    def __init__(
        self, net: YNet, count: int, parts: Sequence[Part] = PARTS, example: Tensor | None = None
    ) -> None:
        if count < 1:
            raise ValueError(f"`count` must be at least 1, got {count}.")
        self.count = count
        self._normalise = copy.deepcopy(net).normalise
        self.parts: dict[Part, nn.Module] = {}
        features = None
        for name in PARTS:
            module = copy.deepcopy(getattr(net, name)).eval()
            inputs = features
            if name == "encoder" and example is not None:
                with torch.no_grad():
                    inputs = net.normalise(example[:2])
                    features = module(inputs)
            self.parts[name] = _replicate(module, count, inputs, name) if name in parts else _Shared(module)
        self.tensors: dict[str, Tensor] = {}
        for name in parts:
            inner = self.parts[name].inner
            for key, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
                self.tensors[f"{name}.{key}"] = tensor
        self._origin = {name: tensor[:1].clone() for name, tensor in self.tensors.items()}

    def encode(self, images: Tensor) -> Tensor:
        """Features `(S, B, ...)` of images `(S, B, C, H, W)`."""
        return self.parts["encoder"](self._normalise(images))

    def classify(self, features: Tensor) -> Tensor:
        """Class logits `(S, B, K)` of features `(S, B, ...)`."""
        return self.parts["classifier"](features)

    def supervise(self, features: Tensor) -> Tensor:
        """The task's outputs `(S, B, outputs)` of features `(S, B, ...)`."""
        return self.parts["ssl"](features)

    def __call__(self, images: Tensor) -> Tensor:
        """Class logits `(S, B, K)` of images `(S, B, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """The task's outputs `(S, B, outputs)` of views `(S, B, C, H, W)`."""
        return self.supervise(self.encode(views))

    def train_norms(self, training: bool) -> None:
        """Let BatchNorm use and track the statistics of what it sees (True), or only the tracked ones (False).

        Nothing else has a mode here: dropout, whose noise would not be a function of the sample, stays off.
        """
        for part in self.parts.values():
            for module in part.modules():
                if isinstance(module, (_BatchNorm, nn.modules.batchnorm._BatchNorm)):
                    module.training = training

    def parameters(self, parts: Iterable[Part]) -> dict[str, Tensor]:
        """The stacked parameters `(S, ...)` of some parts by name, without buffers."""
        prefixes = tuple(f"{part}." for part in parts)
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and name.startswith(prefixes)
        }

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all stacked tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor], rows: Tensor) -> None:
        """Put the replicas where `rows`, bool `(S,)`, is true back to a snapshot; the others keep every bit."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.where(_over(rows, tensor), snapshot[name], tensor))

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Put all replicas, or those where `rows` is true, back to the network they were made of."""
        if rows is not None:
            return self.restore(self._origin, rows)
        for name, tensor in self.tensors.items():
            tensor.copy_(self._origin[name].expand_as(tensor))

    def read(self, index: int) -> dict[str, Tensor]:
        """A copy of one replica's tensors, by their names in the network."""
        return {name: tensor[index].detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def load(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Set one replica to tensors that `read` gave.

        Raises:
            ValueError: A tensor is missing or has another shape; nothing was changed.
        """
        for name, tensor in self.tensors.items():
            if name not in state:
                raise ValueError(f"Tensor {name!r} is missing.")
            if state[name].shape != tensor.shape[1:]:
                raise ValueError(f"Tensor {name!r} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape[1:])}.")
        for name, tensor in self.tensors.items():
            tensor[index] = state[name]

    def copy(self, source: int, target: int) -> None:
        """Set one replica to the present state of another."""
        self.load(target, self.read(source))

    def finite(self) -> Tensor:
        """Which replicas have only finite numbers in their own tensors, bool `(S,)`."""
        sums = [tensor.flatten(1).sum(1) for tensor in self.tensors.values() if tensor.is_floating_point()]
        return torch.stack(sums).isfinite().all(0)


class _Shared(nn.Module):
    """A part that is held once and serves all replicas."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class _Wide(nn.Module):
    """A part whose replicas stand side by side in the channels."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.count = count
        self.inner = _widen(module, count)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1).flatten(1, 2)  # (S, B, C, ...) → (B, S·C, ...)
        return self.inner(x).unflatten(1, (self.count, -1)).transpose(0, 1)


class _Mapped(nn.Module):
    """A part whose replicas go through `torch.func.vmap`."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.template = [module]  # in a list: its own tensors are only placeholders and not part of the state
        self.inner = copy.deepcopy(module)
        for owner in self.inner.modules():
            for tensors in (owner._parameters, owner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = _stack(tensor, count)

    def forward(self, x: Tensor) -> Tensor:
        for own, inner in zip(self.template[0].modules(), self.inner.modules(), strict=True):
            own.training = inner.training
        state = dict(self.inner.named_parameters()) | dict(self.inner.named_buffers())

        def one(tensors: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(self.template[0], tensors, batch)

        return vmap(one, randomness="different")(state, x)


def _stack(tensor: Tensor, count: int) -> Tensor:
    stacked = tensor.detach().unsqueeze(0).repeat(count, *[1] * tensor.dim())
    return nn.Parameter(stacked) if isinstance(tensor, nn.Parameter) else stacked


def _over(rows: Tensor, tensor: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (tensor.dim() - 1))


def _replicate(module: nn.Module, count: int, inputs: Tensor | None, name: str) -> nn.Module:
    reason = _unknown_layer(module)
    if reason is None and inputs is not None:
        reason = _wide_is_wrong(module, inputs)
    if reason is None:
        return _Wide(module, count)
    log.info("replicas of the %s go through vmap: %s", name, reason)
    return _Mapped(module, count)


def _wide_is_wrong(module: nn.Module, inputs: Tensor) -> str | None:
    """Compare two different replicas in the wide form with the module itself; say what differs, if anything."""
    wide = _Wide(copy.deepcopy(module), 2).to(inputs.device)
    pair = [copy.deepcopy(module), copy.deepcopy(module)]
    with torch.no_grad():
        for name, stacked in wide.inner.named_parameters():
            # Different but tame weights, without chance: the second replica has half the first one's.
            stacked[1].mul_(0.5)
            pair[1].get_parameter(name).mul_(0.5)
        try:
            together = wide(torch.stack([inputs, inputs.flip(0)]))
            alone = torch.stack([pair[0](inputs), pair[1](inputs.flip(0))])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return f"side by side it fails with {error}"
    if together.shape != alone.shape:
        return f"side by side its shape is {tuple(together.shape)}, not {tuple(alone.shape)}"
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max() + 1e-6)):
        return "side by side its replicas touch each other"
    return None


class _Conv2d(nn.Module):
    def __init__(self, layer: nn.Conv2d, count: int) -> None:
        super().__init__()
        self.weight = _stack(layer.weight, count)
        self.bias = None if layer.bias is None else _stack(layer.bias, count)
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.groups = layer.groups * count

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return F.conv2d(x, self.weight.flatten(0, 1), bias, self.stride, self.padding, self.dilation, self.groups)


class _GroupNorm(nn.Module):
    def __init__(self, layer: nn.GroupNorm, count: int) -> None:
        super().__init__()
        self.weight, self.bias = _affine(layer, count)
        self.groups, self.eps = layer.num_groups * count, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, *_flat(self.weight, self.bias), eps=self.eps)


class _BatchNorm(nn.Module):
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: nn.BatchNorm2d | nn.BatchNorm1d, count: int) -> None:
        super().__init__()
        self.weight, self.bias = _affine(layer, count)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, _stack(buffer, count))
        self.eps, self.momentum = layer.eps, layer.momentum

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked += 1
        mean, variance = self.running_mean.view(-1), self.running_var.view(-1)  # views: they are updated in place
        weight, bias = _flat(self.weight, self.bias)
        return F.batch_norm(x, mean, variance, weight, bias, self.training, self.momentum or 0.0, self.eps)


class _LayerNorm(nn.Module):
    def __init__(self, layer: nn.LayerNorm, count: int) -> None:
        super().__init__()
        self.weight, self.bias = _affine(layer, count)
        self.count, self.eps = count, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (self.count, -1))  # (..., S, C)
        y = F.layer_norm(y, y.shape[-1:], eps=self.eps)
        y = y if self.weight is None else y * self.weight
        y = y if self.bias is None else y + self.bias
        return y.flatten(-2)


class _Linear(nn.Module):
    def __init__(self, layer: nn.Linear, count: int) -> None:
        super().__init__()
        self.weight, self.bias = _affine(layer, count)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        count, _, inputs = self.weight.shape
        rows = x.reshape(-1, count, inputs).transpose(0, 1)  # (S, M, inputs)
        y = rows @ self.weight.transpose(1, 2)
        if self.bias is not None:
            y = y + self.bias.unsqueeze(1)
        return y.transpose(0, 1).reshape(*x.shape[:-1], -1)


def _affine(layer: nn.Module, count: int) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    stacked = [_stack(t, count) if t is not None else None for t in (layer.weight, layer.bias)]
    return stacked[0], stacked[1]  # type: ignore[return-value]  # a stacked Parameter is a Parameter


def _flat(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.flatten() for tensor in tensors]


_WIDE: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv2d: _Conv2d,
    nn.GroupNorm: _GroupNorm,
    nn.BatchNorm1d: _BatchNorm,
    nn.BatchNorm2d: _BatchNorm,
    nn.LayerNorm: _LayerNorm,
    nn.Linear: _Linear,
}
# Layers without parameters that treat every channel alike.
_CHANNELWISE = (
    nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid,
    nn.Tanh, nn.Softplus,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d, nn.Upsample,
)  # fmt: skip


def _unknown_layer(module: nn.Module) -> str | None:
    """Why a module cannot take the wide form by its layers, or None if they are all known."""
    for name, layer in module.named_modules():
        if next(layer.children(), None) is not None:
            if any(True for _ in layer.parameters(recurse=False)):
                return f"{name or 'the module'} has parameters of its own"
            continue
        if type(layer) in _CHANNELWISE or hasattr(layer, "replicate"):
            continue
        if type(layer) not in _WIDE:
            return f"{name} is a {type(layer).__name__}"
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            return f"{name} pads with {layer.padding_mode!r}"
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and (
            layer.momentum is None or not layer.track_running_stats
        ):
            return f"{name} does not track statistics by a moving average"
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) != 1:
            return f"{name} normalises over several axes"
    return None


def _widen(module: nn.Module, count: int) -> nn.Module:
    """The wide form of a module: every layer with parameters is replaced, all other code is kept."""
    if type(module) in _WIDE:
        return _WIDE[type(module)](module, count).eval()
    if hasattr(module, "replicate"):
        return module.replicate(count)  # type: ignore[operator]  # a layer that brings its own wide form
    for name, child in module.named_children():
        setattr(module, name, _widen(child, count))
    return module
