"""Layers with one set of parameters per replica, in plain torch (see replicas.py).

The batches of S replicas are concatenated, `(S·B, ...)`; parameters are stacked, `(S, *shape)`, and each layer applies
one set to every B images. `kernels` replaces these implementations where it has faster ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from testtime import kernels
from testtime.kernels import Convolution, ConvolutionForm
from testtime.networks.bare import CONSTANTS, is_bare, list_bare
from testtime.networks.resnet import AddingConv2d, BatchNormReLU, GroupNormReLU, PreActivationBlock, ZeroPadShortcut
from testtime.networks.stacked_norms import ActiveBatchNorm, BatchNorm, ChannelNorm, GroupNorm, LayerNorm
from testtime.networks.stacking import Stacking


class _Conv2d(nn.Module):
    """Convolution, with an optional shortcut."""

    def __init__(self, layer: nn.Conv2d, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)  # (S, outputs, inputs / groups, k, k)
        self.form = _read_form(layer)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y = kernels.take_over("convolve", x, self.weight, self.bias, self.form, shortcut)
        if y is not None:
            return y
        weight, count = self.weight.to(x.dtype), len(self.weight)
        biases = [None] * count if self.bias is None else self.bias.to(x.dtype)
        pieces = zip(x.chunk(count), weight, biases, strict=True)
        y = _concatenate([F.conv2d(piece, w, b, *self.form) for piece, w, b in pieces])
        return y if shortcut is None else y + shortcut


class Linear(nn.Module):
    """A linear layer."""

    def __init__(self, layer: nn.Linear, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _apply_linear(x, self.weight, self.bias)


class _MultiheadAttention(nn.Module):
    """Self-attention without masks, as in vision transformers."""

    def __init__(self, layer: nn.MultiheadAttention, stack: Stacking) -> None:
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = stack(layer.in_proj_weight), stack(layer.in_proj_bias)
        self.out_proj = Linear(layer.out_proj, stack)
        self.num_heads, self.batch_first = layer.num_heads, True
        self._qkv_same_embed_dim = False  # so that torch's fused encoder layer does not read the stacked parameters

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
        masks = [options.get(name) for name in ("attn_mask", "key_padding_mask")]
        if not (query is key is value) or masks != [None, None] or options.get("is_causal") or query.dim() != 3:
            raise ValueError("Replicas of attention are those of self-attention without masks.")
        qkv = _apply_linear(query, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (N, heads, T, d) each
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None


class _Shortcut(nn.Module):
    """The parameter-free shortcut of a strided block."""

    def __init__(self, layer: ZeroPadShortcut, stack: Stacking) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.take_over("halve", x, self.layer.extra) if self.layer.stride == 2 else None
        return self.layer(x) if y is None else y


class _Branch(nn.Sequential):
    """Layers that end with global average pooling and a linear layer."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # torch calls the argument `input`
        *body, pool, flatten, linear = self
        for layer in body:
            x = layer(x)
        if isinstance(linear, Linear) and not (linear._forward_pre_hooks or linear._forward_hooks):
            y = kernels.take_over("pool_linear", x, linear.weight, linear.bias)
            if y is not None:
                return y
        return linear(flatten(pool(x)))


class _PreActivationBlock(nn.Module):
    """The block of the CIFAR networks."""

    def __init__(self, block: PreActivationBlock, stack: Stacking) -> None:
        super().__init__()
        self.norm1, self.conv1 = stack_layers(block.norm1, stack), stack_layers(block.conv1, stack)
        self.norm2, self.conv2 = stack_layers(block.norm2, stack), stack_layers(block.conv2, stack)
        self.shortcut = stack_layers(block.shortcut, stack)

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.norm1.fork(x) if isinstance(self.norm1, GroupNorm) else (self.norm1(x), x)
        return self.conv2(self.norm2(self.conv1(y)), self.shortcut(x))

    def convolutions(self) -> list[Convolution]:
        """Return its convolutions with the norms before them; none unless images are independent there."""
        pairs: list[tuple[Any, Any]] = [(self.norm1, self.conv1), (self.norm2, self.conv2)]
        known = (isinstance(norm, (GroupNorm, ActiveBatchNorm)) and not norm._forward_hooks for norm, _ in pairs)
        forms = [norm.form if plain else None for (norm, _), plain in zip(pairs, known, strict=True)]
        return [Convolution(conv.weight, form, conv.form) for (_, conv), form in zip(pairs, forms, strict=True) if form]


class _Blocks(nn.Sequential):
    """A sequence of these blocks, which may be computed as one chain, except for a strided first convolution."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # torch calls the argument `input`
        first, *_ = blocks = [block for block in self if isinstance(block, _PreActivationBlock)]
        strided = not isinstance(first.shortcut, nn.Identity)
        known = kernels.has_any("convolve_chain", x.device)
        layers = [layer for block in blocks for layer in block.convolutions()] if known else []
        rows = {len(tensor) for layer in layers if layer.norm for tensor in (layer.weight, layer.norm.weight)}
        fits = len(layers) == 2 * len(blocks) and len(rows) == 1
        chain = kernels.find("convolve_chain", x, layers[strided:]) if fits else None
        if chain is None:
            return super().forward(x)
        if strided:
            return chain(first.conv1(first.norm1(x)), layers[1:], first.shortcut(x))
        return chain(x, layers)


def _apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply linear layers with weights `(S, outputs, inputs)` to x `(S·B, ..., inputs)`.

    A batched product even for a single set, because that of one replica must be rounded as among others.
    """
    count, outputs, inputs = weight.shape
    rows = x.reshape(count, -1, inputs)  # (S, B·…, inputs)
    weight = weight.to(x.dtype).transpose(1, 2)
    y = rows @ weight if bias is None else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), rows, weight)
    return y.view(*x.shape[:-1], outputs)


def _read_form(layer: nn.Conv2d) -> ConvolutionForm:
    stride, dilation = (_pair(value) for value in (layer.stride, layer.dilation))
    padding = layer.padding if isinstance(layer.padding, str) else _pair(layer.padding)
    return ConvolutionForm(stride, padding, dilation, layer.groups)


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return first, second


def _concatenate(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


_STACKED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv2d: _Conv2d,
    AddingConv2d: _Conv2d,
    nn.GroupNorm: GroupNorm,
    GroupNormReLU: GroupNorm,
    nn.BatchNorm1d: BatchNorm,
    nn.BatchNorm2d: BatchNorm,
    BatchNormReLU: ActiveBatchNorm,
    nn.LayerNorm: LayerNorm,
    nn.Linear: Linear,
    NonDynamicallyQuantizableLinear: Linear,  # of MultiheadAttention
    nn.MultiheadAttention: _MultiheadAttention,
    PreActivationBlock: _PreActivationBlock,
    ZeroPadShortcut: _Shortcut,
}


_KNOWN = tuple(_STACKED)
_PARAMETERS = frozenset({"weight", "bias", "in_proj_weight", "in_proj_bias"})
_OWN = (GroupNormReLU, BatchNormReLU, AddingConv2d, PreActivationBlock, ZeroPadShortcut)
_LEAST_SHARE = 0.2  # of the multiplications: with less, stacked layers cost what the kernels gain


def find_unknown_layer(module: nn.Module) -> str | None:
    """Return why a module cannot be stacked layer by layer, or None if it can."""
    for name, layer in module.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if _find_form(layer) is None:
            changing = {name for name, _ in layer.named_buffers(recurse=False)} - getattr(layer, CONSTANTS, frozenset())
            known = not isinstance(layer, _KNOWN) and not changing
            if tensors and not (known and all(map(is_bare, tensors))):
                return f"{name or 'the module itself'} ({type(layer).__name__}) has parameters of its own"
            continue
        if isinstance(layer, nn.MultiheadAttention):
            plain = layer.batch_first and layer._qkv_same_embed_dim and not layer.add_zero_attn
            if not plain or layer.bias_k is not None:
                return f"{name} is not plain self-attention"
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            return f"{name} pads with {layer.padding_mode!r}"
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and (
            layer.momentum is None or not layer.track_running_stats
        ):
            return f"{name} does not track statistics by a moving average"
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) != 1:
            return f"{name} normalises over several axes"
    return None


def _find_form(layer: nn.Module) -> Callable[..., nn.Module] | None:
    """Return the stacked form of a layer; None if there is none."""
    if not _PARAMETERS.issuperset(name for name, _ in layer.named_parameters(recurse=False)):
        return None  # a hook computes the weight, as that of torch.nn.utils.spectral_norm
    if type(layer) not in _STACKED and isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
        return next((form for form in (LayerNorm, ChannelNorm) if _is_like(layer, form)), None)
    return _STACKED.get(type(layer))


@torch.no_grad()
def _is_like(layer: nn.LayerNorm, form: type[LayerNorm]) -> bool:
    """Whether a kind of LayerNorm that other libraries define, mostly over channels, computes what a form does."""
    (channels,) = layer.normalized_shape
    shape = (2, channels, 3, 5) if form is ChannelNorm else (2, 3, channels)
    device = next((tensor.device for tensor in layer.parameters()), None)
    x = torch.arange(math.prod(shape), dtype=torch.float32, device=device).sin().view(shape)
    try:
        y = layer.forward(x)  # without hooks
        return y.shape == x.shape and torch.allclose(y, form(layer, Stacking(1))(x), rtol=1e-4, atol=1e-5)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False


def is_accelerated(module: nn.Module, inputs: Tensor | None) -> bool:
    """Return whether kernels make a single replica of a module faster than the module itself.

    They were written for the layers of this package; in other models it depends on how much they can compute.

    Args:
        module: The module.
        inputs: An example of its inputs `(N, ...)`, if there is one.
    """
    if any(isinstance(layer, _OWN) for layer in module.modules()):
        return True
    return inputs is not None and _measure_share(module, inputs) >= _LEAST_SHARE


@torch.no_grad()
def _measure_share(module: nn.Module, inputs: Tensor) -> float:
    """Return the share of a module's multiplications that are convolutions for which there is a kernel."""
    fast, total = 0, 0

    def count(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal fast, total
        assert isinstance(layer, (nn.Conv2d, nn.Linear))
        number = output.numel() * layer.weight[0].numel()
        total += number
        if (
            given
            and isinstance(layer, nn.Conv2d)
            and kernels.accelerates(given[0], layer.weight, layer.bias, _read_form(layer))
        ):
            fast += number

    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        module(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return fast / max(total, 1)


def stack_layers(module: nn.Module, stack: Stacking) -> nn.Module:
    """Replace every layer with parameters by its stacked form, and stack those outside of layers; code is unchanged."""
    form = _find_form(module)
    if form is not None:
        if id(module) not in stack.layers:
            stack.layers[id(module)] = module, form(module, stack.choose(module)).eval()
        return stack.layers[id(module)][1]
    if _is_group(module):
        return _Blocks(OrderedDict((name, stack_layers(child, stack)) for name, child in module.named_children()))
    if _is_branch(module):
        return _Branch(OrderedDict((name, stack_layers(child, stack)) for name, child in module.named_children()))
    if id(module) not in stack.bare and list_bare(module):
        chosen = stack.choose_bare(module)
        for tensors, name, tensor in list_bare(module):
            tensors[name] = chosen(tensor)
        stack.bare[id(module)] = module
    for name, child in module._modules.items():  # not named_children, which skips repeated layers
        module._modules[name] = None if child is None else stack_layers(child, stack)
    return module


def _is_group(module: nn.Module) -> bool:
    blocks = list(module.children())
    return type(module) is nn.Sequential and bool(blocks) and all(type(one) is PreActivationBlock for one in blocks)


def _is_branch(module: nn.Module) -> bool:
    *_, pool, flatten, linear = [None] * 3 + list(module._modules.values())
    return (
        type(module) is nn.Sequential
        and len(list(module.children())) == len(module)  # no layer twice
        and type(pool) is nn.AdaptiveAvgPool2d
        and pool.output_size in (1, (1, 1))
        and type(flatten) is nn.Flatten
        and (flatten.start_dim, flatten.end_dim) == (1, -1)
        and type(linear) is nn.Linear
    )
