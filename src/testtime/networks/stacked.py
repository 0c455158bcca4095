"""Layers that have another set of parameters for every B images: the tall form of a network (see replicas.py).

Convolution, GroupNorm, BatchNorm, LayerNorm and linear. Convolution and the first two norms have kernels of ours on
CUDA (testtime/kernels), convolution and GroupNorm on a CPU (testtime/cpu); where those do not fit, plain torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime import cpu
from testtime.networks.resnet import AddingConv2d, BatchNormReLU, GroupNormReLU, PreActivationBlock, ZeroPadShortcut
from testtime.randomness import has_triton

# A convolution of no more images of a replica, each with no more numbers in its patches, is a matrix product on a CPU.
_FEW, _SMALL = 3, 16_384
# On CUDA, replicas are convolved at once where their filters have no more channels and their results fewer numbers; on
# a CPU, filters of more inputs have our form for any stride only where replicas are alike: otherwise torch's is up to
# three times as fast (256 to 512 channels on 8×8), and no slower for fewer.
_NARROW, _LARGE = 64, 2**20
LARGEST = 2**30
"""Tensors of as many elements or more are not for CUDA kernels of ours."""
# Winograd's form takes a third of torch's time up to so many channels, for any images. With more, the filters are large
# and so are their transforms: it takes half of torch's time from so many pixels of a replica on, with fewer no less.
_WIDE, _MANY = 128, 1024


class Stacking:
    """Makes stacked tensors `(S, *shape)` of a module's tensors; what was one tensor in two places stays one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made: dict[int, tuple[Tensor, Any]] = {}
        self.layers: dict[int, tuple[nn.Module, nn.Module]] = {}

    def __call__(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in self.made:
            stacked = tensor.detach().unsqueeze(0).repeat(self.count, *[1] * tensor.dim())
            if isinstance(tensor, nn.Parameter):
                stacked = nn.Parameter(stacked, requires_grad=False)
            self.made[id(tensor)] = tensor, stacked  # the original as well: its id must not be given away
        return self.made[id(tensor)][1]


class _Conv2d(nn.Module):
    """Convolution with its own filters for every B images."""

    def __init__(self, layer: nn.Conv2d, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)  # (S, outputs, inputs / groups, k, k)
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.padding: Any = layer.padding  # a pair or "same"
        # A 3×3 convolution without anything special, the same in rows and columns: what our kernels know.
        self.square = (
            layer.kernel_size == (3, 3)
            and layer.bias is None
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and not isinstance(layer.padding, str)
            and layer.stride[0] == layer.stride[1]
            and layer.padding[0] == layer.padding[1]
        )
        self.compiled = (
            layer.in_channels == layer.out_channels
            and layer.in_channels in cpu.CHANNELS
            and self.square
            and layer.stride == layer.padding == (1, 1)
            and layer.weight.dtype == torch.float32
        )

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if _kernels_fit(self, x):
            from testtime import kernels

            return kernels.convolve(x, self.weight, self.stride[0], self.padding[0], shortcut)
        if _cpu_fits(self, x) and self._has_enough_pixels(x):
            return cpu.convolve(x, [cpu.Convolution(self.weight)], shortcut)
        y = self._convolve(x)
        return y if shortcut is None else y + shortcut

    def _convolve(self, x: Tensor) -> Tensor:
        count = len(self.weight)
        rest = self.stride, self.padding, self.dilation
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if x.is_cuda and count > 1 and self._is_narrow(x):
            # One launch for all: replicas side by side in the channels, as groups.
            wide = x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)
            flat = None if bias is None else bias.flatten()
            wide = F.conv2d(wide, weight.flatten(0, 1), flat, *rest, self.groups * count)
            return wide.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)
        if self._compiles_strided(x):
            return cpu.convolve_strided(x, weight, self.stride[0], self.padding[0])
        patch = x.shape[1] * x.shape[2] * x.shape[3] * weight.shape[-2] * weight.shape[-1]
        few = not x.is_cuda and count > 1 and 0 < len(x) <= _FEW * count and patch <= _SMALL
        if few and self.groups == 1 and not isinstance(self.padding, str):
            return self._multiply(x, weight, bias)
        if x.is_cpu and weight.shape[2] > _WIDE and weight.numel() > x.numel():
            x = x.contiguous()  # with channels last torch rearranges the filters, and their gradients, which costs more
        biases = [None] * count if bias is None else bias
        pieces = zip(x.chunk(count), weight, biases, strict=True)
        return _concatenate([F.conv2d(piece, w, b, *rest, self.groups) for piece, w, b in pieces])

    def _is_narrow(self, x: Tensor) -> bool:
        """Whether a replica's convolution is too small to fill a GPU; many wide groups are slow in cuDNN."""
        count, outputs, inputs = self.weight.shape[:3]
        images = len(x) // count * (x.shape[2] // self.stride[0]) * (x.shape[3] // self.stride[1])
        return max(outputs, inputs) <= _NARROW and images * outputs < _LARGE

    def _has_enough_pixels(self, x: Tensor) -> bool:
        """Whether Winograd's form is faster on a CPU than torch's."""
        count, channels = self.weight.shape[:2]
        return channels <= _WIDE or len(x) // count * x.shape[2] * x.shape[3] >= _MANY

    def _compiles_strided(self, x: Tensor) -> bool:
        """Whether to use the compiled form for any stride on a CPU: where it exists and torch's is not faster."""
        fits = self.square and self.weight.shape[1] % 16 == 0 and _kernels_take(x, max(self.weight.shape[1:3]))
        fits = fits and min(x.shape[2:]) + 2 * self.padding[0] >= 3
        narrow = self.weight.shape[2] <= _NARROW or self.weight.stride(0) == 0
        return fits and narrow and cpu.available()

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution as matrix products: for few images of many replicas, where calls cost more than copies."""
        patches = F.unfold(x, weight.shape[-2:], self.dilation, self.padding, self.stride)  # (S·B, inputs·k·k, P)
        y = weight.flatten(2).unsqueeze(1) @ patches.unflatten(0, (len(weight), -1))  # (S, B, outputs, P)
        y = y if bias is None else y + bias[:, None, :, None]
        sides = zip(x.shape[-2:], self.padding, self.dilation, weight.shape[-2:], self.stride, strict=True)
        shape = [(side + 2 * pad - gap * (k - 1) - 1) // step + 1 for side, pad, gap, k, step in sides]
        return y.flatten(0, 1).unflatten(2, shape).contiguous(memory_format=torch.channels_last)


class _GroupNorm(nn.Module):
    """GroupNorm, with ReLU behind it or not, with its own scale and shift for every B images."""

    def __init__(self, layer: nn.GroupNorm, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)
        self.groups, self.eps, self.relu = layer.num_groups, layer.eps, isinstance(layer, GroupNormReLU)
        self.compiled = layer.affine and layer.num_channels % 16 == 0 and layer.weight.dtype == torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return self.fork(x)[0]

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and x for another use, whose gradient is added on the way back."""
        if _kernels_fit(self, x):
            from testtime import kernels

            return kernels.fork_group_norm(x, self.groups, self.weight, self.bias, self.eps, self.relu)
        return self._normalise(x), x

    def _normalise(self, x: Tensor) -> Tensor:
        if _cpu_fits(self, x):
            return cpu.group_norm(x, self.whole())
        if x.is_cuda or self.weight is None:
            y = _scale(F.group_norm(x, self.groups, eps=self.eps), self.weight, self.bias)
        else:  # on a CPU, torch's own scale and shift save two passes over the images
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            if not x.requires_grad:
                x = x.contiguous()  # with channels last, torch crashes in backward where x wants no gradient
            pieces = zip(x.chunk(len(weight)), weight, bias, strict=True)
            y = _concatenate([F.group_norm(piece, self.groups, w, b, self.eps) for piece, w, b in pieces])
        return F.relu_(y) if self.relu else y

    def whole(self) -> cpu.GroupNorm:
        return cpu.GroupNorm(self.groups, self.weight, self.bias, self.eps, self.relu)


class BatchNorm(nn.Module):
    """BatchNorm, with ReLU behind it or not, with its own statistics for every B images."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: nn.BatchNorm2d | nn.BatchNorm1d, stack: Stacking, relu: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, stack(buffer))
        self.eps, self.momentum, self.relu = layer.eps, layer.momentum or 0.0, relu

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.running_mean)
        if self.training:
            self.num_batches_tracked += 1
        statistics = self.running_mean, self.running_var
        if self._kernel_fits(x):
            from testtime import kernels

            rest = self.training, self.momentum, self.eps, self.relu
            return kernels.batch_norm(x, *statistics, self.weight, self.bias, *rest)
        wide = x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)  # (B, S·C, ...)
        mean, variance = (tensor.view(-1) for tensor in statistics)  # views: they are updated in place
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        wide = F.batch_norm(wide, mean, variance, weight, bias, self.training, self.momentum, self.eps)
        y = wide.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)
        return F.relu_(y) if self.relu else y

    def _kernel_fits(self, x: Tensor) -> bool:
        """Whether there is a CUDA kernel of ours for these inputs; torch refuses a channel of a single number."""
        if not x.is_cuda or not has_triton() or self.weight is None or x.dim() != 4:
            return False
        count, channels = self.running_mean.shape
        sizes = channels <= 1024 and channels & (channels - 1) == 0 and count * channels < x.numel() < count * 2**30
        return sizes and self.weight.dtype == torch.float32


class _BatchNormReLU(nn.Sequential):
    """BatchNorm and the ReLU behind it; its tensors have the names of the layer's own."""

    def __init__(self, layer: BatchNormReLU, stack: Stacking) -> None:
        norm = layer[0]
        assert isinstance(norm, nn.BatchNorm2d)
        super().__init__(BatchNorm(norm, stack, relu=True))


class _LayerNorm(nn.Module):
    """LayerNorm over the last axis with its own scale and shift for every B images."""

    def __init__(self, layer: nn.LayerNorm, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)
        self.eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return _scale(y, self.weight, self.bias, axis=-1)


class _Linear(nn.Module):
    """A linear layer with its own weights for every B images."""

    def __init__(self, layer: nn.Linear, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        count, outputs, inputs = self.weight.shape
        rows = x.reshape(count, -1, inputs)  # (S, B·…, inputs)
        weight = self.weight.to(x.dtype).transpose(1, 2)
        if self.bias is None:
            y = rows @ weight
        else:
            y = torch.baddbmm(self.bias.to(x.dtype).unsqueeze(1), rows, weight)
        return y.view(*x.shape[:-1], outputs)

    def takes_means(self, x: Tensor) -> bool:
        """Whether a CUDA kernel of ours takes the means over x as well."""
        if not x.is_cuda or not has_triton() or self.bias is None or x.dim() != 4 or x.numel() == 0:
            return False
        outputs, channels = self.weight.shape[1:]
        sizes = channels & (channels - 1) == 0 and channels <= 1024 and outputs * channels <= 16_384
        return sizes and self.weight.dtype == torch.float32 and x.dtype in (torch.float32, torch.bfloat16)


class _Shortcut(nn.Module):
    """The shortcut of a strided block."""

    def __init__(self, layer: ZeroPadShortcut, stack: Stacking) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        halves = self.layer.stride == 2 and x.shape[-2] % 2 == x.shape[-1] % 2 == 0
        if x.is_cuda and has_triton() and halves and x.dtype in (torch.float32, torch.bfloat16):
            from testtime import kernels

            return kernels.halve(x, self.layer.extra)
        return self.layer(x)


class _Branch(nn.Sequential):
    """Layers that end with the mean over all pixels and a linear layer."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # torch calls the argument `input`
        *body, pool, flatten, linear = self
        for layer in body:
            x = layer(x)
        if isinstance(linear, _Linear) and linear.takes_means(x):
            from testtime import kernels

            return kernels.pool_linear(x, linear.weight, linear.bias)
        return linear(flatten(pool(x)))


class _PreActivationBlock(nn.Module):
    """The block of the CIFAR networks."""

    def __init__(self, block: PreActivationBlock, stack: Stacking) -> None:
        super().__init__()
        self.norm1, self.conv1 = heighten(block.norm1, stack), heighten(block.conv1, stack)
        self.norm2, self.conv2 = heighten(block.norm2, stack), heighten(block.conv2, stack)
        self.shortcut = heighten(block.shortcut, stack)

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.norm1.fork(x) if isinstance(self.norm1, _GroupNorm) else (self.norm1(x), x)
        return self.conv2(self.norm2(self.conv1(y)), self.shortcut(x))

    def pairs(self) -> list[tuple[Any, Any]]:
        """The norms and the convolutions behind them."""
        return [(self.norm1, self.conv1), (self.norm2, self.conv2)]


class _Blocks(nn.Sequential):
    """Some of those blocks; on a CPU all but the first half of the first, if that is strided, is one compiled chain."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # torch calls the argument `input`
        first, *_ = blocks = [block for block in self if isinstance(block, _PreActivationBlock)]
        strided = not isinstance(first.shortcut, nn.Identity)
        pairs = [pair for block in blocks for pair in block.pairs()][strided:]
        if not all(_has_compiled_form(norm, conv, x) for norm, conv in pairs):
            return super().forward(x)
        chain = [cpu.Convolution(conv.weight, norm.whole()) for norm, conv in pairs]
        if strided:
            return cpu.convolve(first.conv1(first.norm1(x)), chain, first.shortcut(x))
        return cpu.convolve(x, chain)


def _has_compiled_form(norm: nn.Module, conv: nn.Module, x: Tensor) -> bool:
    if not isinstance(norm, _GroupNorm) or not isinstance(conv, _Conv2d) or not norm.compiled:
        return False
    return conv.weight.shape[1] <= _WIDE and _cpu_fits(conv, x)  # of more channels, a chain's filters fill the memory


def _concatenate(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scale(x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: int = 1) -> Tensor:
    """x `(S·B, ...)` times weight plus bias, `(S, C)` each, along the channel axis."""
    if weight is None:
        return x
    shape = [len(weight), 1] + [1] * (x.dim() - 1)
    shape[axis if axis < 0 else axis + 1] = -1
    y = x.unflatten(0, (len(weight), -1)) * weight.to(x.dtype).view(shape)
    y = y if bias is None else y + bias.to(x.dtype).view(shape)
    return y.flatten(0, 1)


def _kernels_fit(layer: _Conv2d | _GroupNorm, x: Tensor) -> bool:
    """Whether a layer has a CUDA kernel of ours for these inputs."""
    if not x.is_cuda or not has_triton() or x.numel() >= LARGEST:
        return False
    if isinstance(layer, _GroupNorm):
        channels = x.shape[1]
        return layer.weight is not None and channels <= 1024 and channels & (channels - 1) == 0
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return layer.square and not exact and max(layer.weight.shape[1:3]) <= 64


def _cpu_fits(layer: _Conv2d | _GroupNorm, x: Tensor) -> bool:
    """Whether a layer has a compiled form on the CPU for these inputs."""
    return layer.compiled and _kernels_take(x, layer.weight.shape[1]) and cpu.available()


def _kernels_take(x: Tensor, channels: int) -> bool:
    """Whether images x, with so many channels at most on their way, are what compiled forms on the CPU know."""
    fits = x.is_cpu and x.dtype == torch.float32 and x.dim() == 4 and x.numel() > 0
    return fits and channels * x.shape[2] * x.shape[3] < cpu.LARGEST


_TALL: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv2d: _Conv2d,
    AddingConv2d: _Conv2d,
    nn.GroupNorm: _GroupNorm,
    GroupNormReLU: _GroupNorm,
    nn.BatchNorm1d: BatchNorm,
    nn.BatchNorm2d: BatchNorm,
    BatchNormReLU: _BatchNormReLU,
    nn.LayerNorm: _LayerNorm,
    nn.Linear: _Linear,
    PreActivationBlock: _PreActivationBlock,
    ZeroPadShortcut: _Shortcut,
}


def unknown_layer(module: nn.Module) -> str | None:
    """Why a module cannot take the tall form by its layers, or None if all with parameters are known."""
    for name, layer in module.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if type(layer) not in _TALL:
            if tensors:
                return f"{name or 'the module itself'} ({type(layer).__name__}) has parameters of its own"
            continue
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            return f"{name} pads with {layer.padding_mode!r}"
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and (
            layer.momentum is None or not layer.track_running_stats
        ):
            return f"{name} does not track statistics by a moving average"
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) != 1:
            return f"{name} normalises over several axes"
    return None


def heighten(module: nn.Module, stack: Stacking) -> nn.Module:
    """The tall form of a module: every layer with parameters is replaced, all other code is kept."""
    if type(module) in _TALL:
        if id(module) not in stack.layers:
            stack.layers[id(module)] = module, _TALL[type(module)](module, stack).eval()
        return stack.layers[id(module)][1]
    if _is_group(module):
        return _Blocks(OrderedDict((name, heighten(child, stack)) for name, child in module.named_children()))
    if _is_branch(module):
        return _Branch(OrderedDict((name, heighten(child, stack)) for name, child in module.named_children()))
    for name, child in module._modules.items():  # not named_children: a layer in two places must be replaced in both
        module._modules[name] = None if child is None else heighten(child, stack)
    return module


def _is_group(module: nn.Module) -> bool:
    blocks = list(module.children())
    return type(module) is nn.Sequential and bool(blocks) and all(type(one) is PreActivationBlock for one in blocks)


def _is_branch(module: nn.Module) -> bool:
    *_, pool, flatten, linear = [None] * 3 + list(module._modules.values())
    return (
        type(module) is nn.Sequential
        and len(list(module.children())) == len(module)  # no layer in two places
        and type(pool) is nn.AdaptiveAvgPool2d
        and pool.output_size in (1, (1, 1))
        and type(flatten) is nn.Flatten
        and (flatten.start_dim, flatten.end_dim) == (1, -1)
        and type(linear) is nn.Linear
    )
