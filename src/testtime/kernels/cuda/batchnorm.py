"""BatchNorm for replicas in Triton: statistics per replica; scale, shift and ReLU in one pass.

A replica's images are a matrix of pixels, (B·H·W, C). Sums over the pixels are taken in pieces, in a fixed order.
"""

# pyright: reportIndexIssue=false
# (kernels are launched as kernel[grid](...), which cannot be typed without triton installed)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from testtime.kernels.cuda import gradient_buffer
from testtime.kernels.cuda.gradient_buffer import GradientBuffer
from testtime.kernels.cuda.layout import channels_last, check_images, check_rows

_NUMBERS = 8192  # elements per tile
_PROGRAMS = 512  # programs that a sum over pixels is divided among
_WARPS = 8


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
    """Apply BatchNorm to x `(S·B, C, H, W)`, then ReLU if `relu`; statistics and parameters are `(S, C)`.

    In training mode, it uses the statistics of each replica's images and updates the running ones, float32, in place.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    mean, variance = running_mean, running_var
    if training:
        mean, variance = moments(x.detach(), running_mean, running_var, momentum)
    rest = eps, training, relu, gradient_buffer.current()
    return _BatchNorm.apply(x, mean, variance, weight, bias, *rest)  # type: ignore[return-value]


class _BatchNorm(torch.autograd.Function):
    """`follows`: whether the statistics are computed from x, so that gradients flow through them."""

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
        buffer: GradientBuffer | None,
    ) -> Tensor:
        check_images(x, len(weight))
        check_rows(x, mean, variance, weight, bias)
        y = channels_last(x, *x.shape)
        apply(x, y, mean, variance, weight, bias, eps, relu)
        ctx.save_for_backward(x, mean, variance, weight, bias)
        ctx.eps, ctx.follows, ctx.relu = eps, follows, relu
        ctx.buffer, ctx.shares = buffer, None
        if buffer is not None and all(ctx.needs_input_grad[3:5]):
            shares = [buffer.reserve(parameter, 1) for parameter in (weight, bias)]
            ctx.shares = None if None in shares else shares
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight, bias = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        learns = any(ctx.needs_input_grad[3:5])
        given = x, grad, mean, variance, weight, bias, ctx.eps, ctx.relu
        sums = grad_x = of_weight = of_bias = None
        if ctx.shares is not None and ctx.buffer.collects:
            sums = [ctx.buffer.rows(share)[0] for share in ctx.shares]
        elif ctx.follows or learns:
            sums = torch.empty(2, *weight.shape, dtype=torch.float32, device=x.device).unbind()
            of_weight, of_bias = sums if learns else (None, None)
        if sums is not None:
            gradient_sums(*given, *sums)
        if ctx.needs_input_grad[0]:
            grad_x = channels_last(x, *x.shape)
            input_gradient(*given, grad_x, sums if ctx.follows else None)
        return grad_x, None, None, of_weight, of_bias, None, None, None, None


def moments(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float) -> Tensor:
    """Return mean and variance of each channel over a replica's images, and update the running ones, `(S, C)` each.

    Values are summed relative to the running mean, so that a mean far from zero costs no precision.

    Args:
        x: Images `(S·B, C, H, W)`.
        running_mean: Updated in place.
        running_var: Updated in place.
        momentum: Weight of the new statistics in the running ones.

    Returns:
        float32 `(2, S, C)`.
    """
    replicas, channels = running_mean.shape
    pixels = _pixels(x, replicas)
    block, pieces = _split(pixels, channels, replicas)
    partial = torch.empty(pieces, 2, replicas, channels, dtype=torch.float32, device=x.device)
    _sum_moments[(pieces, replicas)](
        x, running_mean, partial, pixels, pieces, C=channels, BLOCK=block, num_warps=_WARPS
    )
    found = torch.empty(2, replicas, channels, dtype=torch.float32, device=x.device)
    part = min(channels, 16)
    _finish_moments[(channels // part, replicas)](
        partial, found, running_mean, running_var, pieces, pixels, momentum,
        C=channels, PART=part, ROWS=_NUMBERS // part, num_warps=_WARPS,
    )  # fmt: skip
    return found


def apply(
    x: Tensor, y: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, relu: bool
) -> None:
    """Normalise x by mean and variance, scale and shift it by weight and bias, `(S, C)` each, and write it to y."""
    channels, pixels = x.shape[1], _pixels(x, len(weight))
    block = _block(pixels, channels)
    _apply[(triton.cdiv(pixels, block), len(weight))](
        x, y, mean, variance, weight, bias, pixels, weight.stride(0), bias.stride(0), eps,
        C=channels, RELU=relu, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


def gradient_sums(
    x: Tensor,
    grad: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    relu: bool,
    of_weight: Tensor,
    of_bias: Tensor,
) -> None:
    """Compute the gradients w.r.t. weight and bias, `(S, C)` each.

    Args:
        x: The input `(S·B, C, H, W)`.
        grad: The gradient w.r.t. the output.
        mean: The mean `(S, C)`.
        variance: The variance `(S, C)`.
        weight: The scale.
        bias: The shift.
        eps: Added to the variance.
        relu: Whether ReLU follows.
        of_weight: Output: sums of the gradient times the normalised input over a replica's pixels.
        of_bias: Output: sums of the gradient.
    """
    channels, replicas = x.shape[1], len(weight)
    pixels = _pixels(x, replicas)
    block, pieces = _split(pixels, channels, replicas)
    partial = torch.empty(pieces, 2, replicas, channels, dtype=torch.float32, device=x.device)
    _sum_gradients[(pieces, replicas)](
        x, grad, mean, variance, weight, bias, partial, pixels, pieces, weight.stride(0), bias.stride(0), eps,
        C=channels, RELU=relu, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    part = min(channels, 16)
    _finish_sums[(channels // part, replicas)](
        partial, of_bias, of_weight, pieces, C=channels, PART=part, ROWS=_NUMBERS // part, num_warps=_WARPS
    )


def input_gradient(
    x: Tensor,
    grad: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    relu: bool,
    out: Tensor,
    sums: Sequence[Tensor] | None,
) -> None:
    """Compute the gradient w.r.t. x; the first arguments as for `gradient_sums`.

    Args:
        x: The input.
        grad: The gradient w.r.t. the output.
        mean: The mean.
        variance: The variance.
        weight: The scale.
        bias: The shift.
        eps: Added to the variance.
        relu: Whether ReLU follows.
        out: Output: the gradient.
        sums: The gradients w.r.t. weight and bias, if the statistics are computed from x; None if they are fixed.
    """
    channels, pixels = x.shape[1], _pixels(x, len(weight))
    block = _block(pixels, channels)
    of_weight, of_bias = (mean, mean) if sums is None else sums
    _gradient[(triton.cdiv(pixels, block), len(weight))](
        x, grad, out, mean, variance, weight, bias, of_weight, of_bias, pixels,
        weight.stride(0), bias.stride(0), eps,
        C=channels, RELU=relu, FOLLOWS=sums is not None, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


def _pixels(x: Tensor, replicas: int) -> int:
    return len(x) // replicas * x.shape[2] * x.shape[3]


def _block(pixels: int, channels: int) -> int:
    return min(triton.next_power_of_2(pixels), max(8, _NUMBERS // channels))


def _split(pixels: int, channels: int, replicas: int) -> tuple[int, int]:
    """Return pixels per tile, and programs that a replica's tiles are divided among."""
    block = _block(pixels, channels)
    return block, max(1, min(triton.cdiv(pixels, block), _PROGRAMS // replicas))


@triton.jit
def _read(ptr, pixel, channel, pixels, C: tl.constexpr):
    at = pixel[:, None] * C + channel[None, :]
    return tl.load(ptr + at, mask=(pixel < pixels)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _write(ptr, values, pixel, channel, pixels, C: tl.constexpr):
    at = pixel[:, None] * C + channel[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=(pixel < pixels)[:, None])


@triton.jit
def _behind_relu(grad, unit, weight, bias, RELU: tl.constexpr):
    """Propagate a gradient back through the ReLU."""
    if RELU:
        grad = tl.where(unit * weight[None, :] + bias[None, :] > 0, grad, 0.0)
    return grad


@triton.jit
def _sum_moments(x_ptr, about_ptr, out_ptr, pixels, pieces, C: tl.constexpr, BLOCK: tl.constexpr):
    replica = tl.program_id(1)
    channel = tl.arange(0, C)
    x_ptr += replica.to(tl.int64) * pixels * C
    about = tl.load(about_ptr + replica * C + channel)
    total = tl.zeros((C,), dtype=tl.float32)
    square = tl.zeros((C,), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, pieces * BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        off = _read(x_ptr, pixel, channel, pixels, C) - about[None, :]
        off = tl.where((pixel < pixels)[:, None], off, 0.0)
        total += tl.sum(off, axis=0)
        square += tl.sum(off * off, axis=0)
    at = out_ptr + (tl.program_id(0) * 2 * tl.num_programs(1) + replica) * C + channel
    tl.store(at, total)
    tl.store(at + tl.num_programs(1) * C, square)


@triton.jit
def _sum_pieces(partial_ptr, own, pieces, replicas, C: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    """Sum both quantities over the pieces, for some channels of one replica."""
    first = tl.zeros((PART,), dtype=tl.float32)
    second = tl.zeros((PART,), dtype=tl.float32)
    for start in range(0, pieces, ROWS):
        row = start + tl.arange(0, ROWS)
        at = partial_ptr + row[:, None] * (2 * replicas * C) + own[None, :]
        inside = (row < pieces)[:, None]
        first += tl.sum(tl.load(at, mask=inside, other=0.0), axis=0)
        second += tl.sum(tl.load(at + replicas * C, mask=inside, other=0.0), axis=0)
    return first, second


@triton.jit
def _finish_sums(
    partial_ptr, first_ptr, second_ptr, pieces, C: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    own = tl.program_id(1) * C + tl.program_id(0) * PART + tl.arange(0, PART)
    first, second = _sum_pieces(partial_ptr, own, pieces, tl.num_programs(1), C, PART, ROWS)
    tl.store(first_ptr + own, first)
    tl.store(second_ptr + own, second)


@triton.jit
def _finish_moments(
    partial_ptr, out_ptr, mean_ptr, variance_ptr, pieces, pixels, momentum,
    C: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Turn the sums of the pieces into statistics and update the running ones, for some channels of one replica."""
    replicas = tl.num_programs(1)
    own = tl.program_id(1) * C + tl.program_id(0) * PART + tl.arange(0, PART)
    total, square = _sum_pieces(partial_ptr, own, pieces, replicas, C, PART, ROWS)
    off = total / pixels
    variance = square / pixels - off * off
    variance = tl.where(variance < 0, 0.0, variance)  # negative by rounding; NaN is preserved
    running = tl.load(mean_ptr + own)
    tl.store(out_ptr + own, running + off)
    tl.store(out_ptr + replicas * C + own, variance)
    tl.store(mean_ptr + own, running + momentum * off)
    running = tl.load(variance_ptr + own)
    spread = variance * pixels / tl.maximum(pixels - 1, 1)
    tl.store(variance_ptr + own, running + momentum * (spread - running))


@triton.jit
def _apply(
    x_ptr, y_ptr, mean_ptr, variance_ptr, w_ptr, b_ptr, pixels, w_stride, b_stride, eps,
    C: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    replica = tl.program_id(1)
    channel = tl.arange(0, C)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = replica.to(tl.int64) * pixels * C
    own = replica * C + channel
    scale = tl.load(w_ptr + replica * w_stride + channel) / tl.sqrt(tl.load(variance_ptr + own) + eps)
    shift = tl.load(b_ptr + replica * b_stride + channel) - tl.load(mean_ptr + own) * scale
    y = _read(x_ptr + before, pixel, channel, pixels, C) * scale[None, :] + shift[None, :]
    if RELU:
        y = tl.where(y > 0, y, tl.where(y == y, 0.0, y))  # preserves NaN, as torch does
    _write(y_ptr + before, y, pixel, channel, pixels, C)


@triton.jit
def _sum_gradients(
    x_ptr, g_ptr, mean_ptr, variance_ptr, w_ptr, b_ptr, out_ptr, pixels, pieces, w_stride, b_stride, eps,
    C: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    replica = tl.program_id(1)
    channel = tl.arange(0, C)
    before = replica.to(tl.int64) * pixels * C
    own = replica * C + channel
    mean, scale = tl.load(mean_ptr + own), 1.0 / tl.sqrt(tl.load(variance_ptr + own) + eps)
    weight = tl.load(w_ptr + replica * w_stride + channel)
    bias = tl.load(b_ptr + replica * b_stride + channel)
    total = tl.zeros((C,), dtype=tl.float32)
    product = tl.zeros((C,), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, pieces * BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        unit = (_read(x_ptr + before, pixel, channel, pixels, C) - mean[None, :]) * scale[None, :]
        grad = _behind_relu(_read(g_ptr + before, pixel, channel, pixels, C), unit, weight, bias, RELU)
        total += tl.sum(grad, axis=0)
        product += tl.sum(grad * unit, axis=0)
    at = out_ptr + (tl.program_id(0) * 2 * tl.num_programs(1) + replica) * C + channel
    tl.store(at, total)
    tl.store(at + tl.num_programs(1) * C, product)


@triton.jit
def _gradient(
    x_ptr, g_ptr, out_ptr, mean_ptr, variance_ptr, w_ptr, b_ptr, of_w_ptr, of_b_ptr, pixels, w_stride, b_stride, eps,
    C: tl.constexpr, RELU: tl.constexpr, FOLLOWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    replica = tl.program_id(1)
    channel = tl.arange(0, C)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = replica.to(tl.int64) * pixels * C
    own = replica * C + channel
    mean, scale = tl.load(mean_ptr + own), 1.0 / tl.sqrt(tl.load(variance_ptr + own) + eps)
    weight = tl.load(w_ptr + replica * w_stride + channel)
    bias = tl.load(b_ptr + replica * b_stride + channel)
    unit = (_read(x_ptr + before, pixel, channel, pixels, C) - mean[None, :]) * scale[None, :]
    grad = _behind_relu(_read(g_ptr + before, pixel, channel, pixels, C), unit, weight, bias, RELU)
    if FOLLOWS:
        shift = tl.load(of_b_ptr + own) / pixels
        slope = tl.load(of_w_ptr + own) / pixels
        grad = grad - shift[None, :] - unit * slope[None, :]
    _write(out_ptr + before, grad * (weight * scale)[None, :], pixel, channel, pixels, C)
