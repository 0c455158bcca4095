"""CUDA kernels for what costs the most when many replicas run as one network.

cuDNN's grouped convolutions are made for few wide groups; replicas of a small network are many narrow ones. Here a
program works for one replica, on a tile of its pixels, as a matrix product on the tensor cores. Images lie in memory
with their channels last, `(S·B, H, W, C)`.

- `convolve`: 3×3 convolution of up to 64 channels, with something added to the result if asked. Its gradient by the
  input is the same kernel with the taps reversed; its gradient by the filters sums tiles of pixels in a fixed order
  (no atomics: results do not vary from run to run).
- `group_norm`: GroupNorm with or without the ReLU behind it; a program has one image, which comes from memory once.
  What the backward pass needs besides the input is two numbers for each group.
- `batch_norm`: BatchNorm with the statistics of each replica's images, with or without the ReLU behind it.
- `pool_linear`, `halve`: the ends of a network and of its residual blocks.
- `settle`, `put_back`: the end of an episode.
- `Gathering`: what a backward pass has left to sum, summed in one launch.
- `make_views`, `turn`, `normalise`: from pixels to what the first layer reads.
- `mix`: the hash of randomness.py in one launch.

Filters stay float32 in memory and are rounded to the images' dtype as they are read. Products of bfloat16 images are
summed in float32; products of float32 images are taken in TF32, so exact float32 is not for `convolve` but for cuDNN.

The modules here have them all, in Triton. convolution.cu has the case that matters most, as many channels in as
out and stride 1, in CUDA C++, where a tile can stay in shared memory for all nine taps; native.py compiles it with
NVRTC, which comes with torch. tests/extras/test_emulated_kernels.py runs it on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from testtime.kernels import batch, ends, gathering, native, tiles
from testtime.kernels.gathering import Gathering
from testtime.kernels.keeping import put_back, settle
from testtime.kernels.views import make_views, normalise, turn
from testtime.pointers import check

__all__ = [
    "Gathering",
    "batch_norm",
    "convolve",
    "fork_group_norm",
    "group_norm",
    "halve",
    "make_views",
    "mix",
    "normalise",
    "pool_linear",
    "put_back",
    "settle",
    "turn",
]


def convolve(x: Tensor, weight: Tensor, stride: int, padding: int, plus: Tensor | None = None) -> Tensor:
    """3×3 convolution of x `(S·B, I, H, W)`, channels last, with weights `(S, O, I, 3, 3)` → `(S·B, O, h, w)`.

    The weights are best stored as `(S, 3, 3, I, O)` and shown permuted; others are copied into that order first.

    Args:
        x: Images, bfloat16 or float32.
        weight: Filters, float32.
        stride: Of rows and columns.
        padding: Zeros around the image.
        plus: Added to the result, of its shape.
    """
    outputs, inputs = weight.shape[1:3]
    if weight.stride()[1:] != (1, outputs, 3 * inputs * outputs, inputs * outputs):
        weight = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    return _Convolve.apply(x, weight, stride, padding, plus, gathering.current())  # type: ignore[return-value]


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> Tensor:
    """GroupNorm of x `(S·B, C, H, W)`, channels last, with weight and bias `(S, C)`, then ReLU if asked."""
    return fork_group_norm(x, groups, weight, bias, eps, relu)[0]


def fork_group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """As `group_norm`, and x itself for another use: on the way back, the gradients of both are added in one launch."""
    return _GroupNorm.apply(x, groups, weight, bias, eps, relu, gathering.current())  # type: ignore[return-value]


def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> Tensor:
    """BatchNorm of x `(S·B, C, H, W)`, channels last, then ReLU if asked; statistics and parameters are `(S, C)`.

    In training it uses the statistics of each replica's images and lets the running ones, float32, follow them.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    mean, variance = running_mean, running_var
    if training:
        mean, variance = batch.moments(x.detach(), running_mean, running_var, momentum)
    rest = eps, training, relu, gathering.current()
    return _BatchNorm.apply(x, mean, variance, weight, bias, *rest)  # type: ignore[return-value]


def pool_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Means over the pixels of x `(S·B, C, H, W)` through linear layers, weight `(S, O, C)`; float32 `(S·B, O)`."""
    return _PoolLinear.apply(x, weight, bias, gathering.current())  # type: ignore[return-value]


def halve(x: Tensor, extra: int) -> Tensor:
    """Means of 2×2 pixels of x `(N, C, H, W)`, with `extra` channels of zeros behind its own."""
    return _Halve.apply(x, extra)  # type: ignore[return-value]


def mix(state: Tensor, factor: int = 1, plus: int = 0) -> Tensor:
    """Stafford's finaliser of int64 numbers times a factor plus something, as randomness.py defines it."""
    return tiles.mix(state, factor, plus)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: int,
        padding: int,
        plus: Tensor | None,
        gathered: Gathering | None,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        images, channels, height, width = x.shape
        _check_images(x, len(weight))
        check(weight.permute(0, 3, 4, 2, 1), (len(weight), 3, 3, channels, weight.shape[1]), "rows", device=x.device)
        out = ((height + 2 * padding - 3) // stride + 1, (width + 2 * padding - 3) // stride + 1)
        y = channels_last(x, images, weight.shape[1], *out)
        if plus is not None:
            plus = plus.contiguous(memory_format=torch.channels_last)
            check(plus, y.shape, "channels_last", x.dtype, x.device)
        kind = native if native.convolves(x, weight, stride, padding) else tiles
        kind.convolve(x, weight, y, stride, padding, plus, transposed=False)
        ctx.gathered, ctx.share = gathered, None
        if gathered is not None and ctx.needs_input_grad[1]:
            kind = native if native.gives_gradient(x, weight, stride, padding) else tiles
            ctx.share = gathered.reserve(weight, kind.gradient_rows(x, y, weight))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        given = x, weight, ctx.stride, ctx.padding
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            kind = native if native.gives_gradient(*given) else tiles
            rest = weight, ctx.stride, ctx.padding
            if ctx.share is not None and ctx.gathered.collects:
                parts = ctx.gathered.rows(ctx.share)
                with ctx.gathered.beside(x, grad):
                    kind.filter_gradient(x, grad, *rest, parts)
            else:
                replicas, outputs, inputs = weight.shape[:3]
                shape = kind.gradient_rows(x, grad, weight), replicas, 3, 3, inputs, outputs
                parts = torch.empty(shape, dtype=torch.float32, device=x.device)
                kind.filter_gradient(x, grad, *rest, parts)
                grad_weight = (parts[0] if len(parts) == 1 else parts.sum(0)).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[0]:
            grad_x = channels_last(x, *x.shape)
            kind = native if native.convolves(*given) else tiles
            kind.convolve(grad, weight, grad_x, ctx.stride, ctx.padding, None, transposed=True)
        return grad_x, grad_weight, None, None, grad if ctx.needs_input_grad[4] else None, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        groups: int,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        relu: bool,
        gathered: Gathering | None,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        _check_images(x, len(weight))
        _check_rows(x, weight, bias)
        y = channels_last(x, *x.shape)
        moments = tiles.norm_forward(x, y, groups, weight, bias, eps, relu)
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.groups, ctx.relu = groups, relu
        ctx.gathered, ctx.shares = gathered, None
        if gathered is not None and all(ctx.needs_input_grad[2:4]):
            shares = [gathered.reserve(parameter, len(x) // len(weight)) for parameter in (weight, bias)]
            ctx.shares = None if None in shares else shares
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, moments = ctx.saved_tensors
        grad, plus = (None if one is None else one.contiguous(memory_format=torch.channels_last) for one in grads)
        grad = torch.zeros_like(x) if grad is None else grad
        grad_x = channels_last(x, *x.shape)
        given = x, grad, grad_x, ctx.groups, weight, bias, moments, ctx.relu, plus
        of_weight = of_bias = None
        if ctx.shares is not None and ctx.gathered.collects:
            tiles.norm_backward(*given, *(ctx.gathered.rows(share) for share in ctx.shares))
        else:
            parts = torch.empty(2, len(x) // len(weight), *weight.shape, dtype=torch.float32, device=x.device)
            tiles.norm_backward(*given, *parts)
            if any(ctx.needs_input_grad[2:4]):
                of_weight, of_bias = parts.sum(1)
        return grad_x, None, of_weight, of_bias, None, None, None


class _BatchNorm(torch.autograd.Function):
    """`follows`: whether the statistics are those of x itself, and so change with it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        follows: bool,
        relu: bool,
        gathered: Gathering | None,
    ) -> Tensor:
        _check_images(x, len(weight))
        _check_rows(x, mean, variance, weight, bias)
        y = channels_last(x, *x.shape)
        batch.apply(x, y, mean, variance, weight, bias, eps, relu)
        ctx.save_for_backward(x, mean, variance, weight, bias)
        ctx.eps, ctx.follows, ctx.relu = eps, follows, relu
        ctx.gathered, ctx.shares = gathered, None
        if gathered is not None and all(ctx.needs_input_grad[3:5]):
            shares = [gathered.reserve(parameter, 1) for parameter in (weight, bias)]
            ctx.shares = None if None in shares else shares
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight, bias = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        learns = any(ctx.needs_input_grad[3:5])
        given = x, grad, mean, variance, weight, bias, ctx.eps, ctx.relu
        sums = grad_x = of_weight = of_bias = None
        if ctx.shares is not None and ctx.gathered.collects:
            sums = [ctx.gathered.rows(share)[0] for share in ctx.shares]
        elif ctx.follows or learns:
            sums = torch.empty(2, *weight.shape, dtype=torch.float32, device=x.device).unbind()
            of_weight, of_bias = sums if learns else (None, None)
        if sums is not None:
            batch.gradient_sums(*given, *sums)
        if ctx.needs_input_grad[0]:
            grad_x = channels_last(x, *x.shape)
            batch.input_gradient(*given, grad_x, sums if ctx.follows else None)
        return grad_x, None, None, of_weight, of_bias, None, None, None, None


class _PoolLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gathered: Gathering | None) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        replicas, outputs = bias.shape
        _check_images(x, replicas)
        check(weight, (replicas, outputs, x.shape[1]), "rows", device=x.device)
        check(bias, (replicas, outputs), "rows", device=x.device)
        y, means = ends.pool_linear(x, weight, bias)
        ctx.save_for_backward(means, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.gathered, ctx.shares = gathered, None
        if gathered is not None and all(ctx.needs_input_grad[1:3]):
            shares = [gathered.reserve(parameter, len(x) // len(weight)) for parameter in (weight, bias)]
            ctx.shares = None if None in shares else shares
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        means, weight = ctx.saved_tensors
        grad_x = channels_last(means, *ctx.shape, dtype=ctx.dtype)
        of_weight = of_bias = None
        if ctx.shares is not None and ctx.gathered.collects:
            parts = [ctx.gathered.rows(share) for share in ctx.shares]
            ends.pool_linear_backward(grads[0].contiguous(), grad_x, means, weight, *parts)
        else:
            rows = len(means) // len(weight)
            parts = [means.new_empty(rows, *weight.shape), means.new_empty(rows, *weight.shape[:2])]
            ends.pool_linear_backward(grads[0].contiguous(), grad_x, means, weight, *parts)
            of_weight, of_bias = (part.sum(0) for part in parts)
        return grad_x, of_weight, of_bias, None


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: int) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        images, channels, height, width = ctx.shape = x.shape
        y = channels_last(x, images, channels + extra, height // 2, width // 2)
        ends.halve(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = channels_last(grads[0], *ctx.shape)
        ends.halve_backward(grads[0].contiguous(memory_format=torch.channels_last), grad_x)
        return grad_x, None


def _check_images(x: Tensor, replicas: int) -> None:
    """Check that x is as many images for each replica, in numbers that the kernels know."""
    if x.dtype not in (torch.bfloat16, torch.float32) or len(x) % replicas:
        raise ValueError(f"The kernels have no form for {x.dtype} images {tuple(x.shape)} of {replicas} replicas.")


def _check_rows(x: Tensor, *parameters: Tensor) -> None:
    """Check parameters or statistics `(S, C)` of a norm of x."""
    for parameter in parameters:
        check(parameter, (len(parameters[0]), x.shape[1]), "rows", device=x.device)


def channels_last(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of a shape, channels last, with another's device and, unless given, dtype."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)
