"""GroupNorm for replicas in Triton, optionally followed by ReLU; one program per image, which is read once.

Besides the input, the backward pass needs two values per group.
"""

# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false
# (kernels are launched as kernel[grid](...) and branch at compile time, which cannot be typed without triton installed)

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from testtime.kernels import NormForm
from testtime.kernels.cuda import gradient_buffer
from testtime.kernels.cuda.gradient_buffer import GradientBuffer
from testtime.kernels.cuda.layout import channels_last, check_images, check_rows


def group_norm(x: Tensor, norm: NormForm) -> Tensor:
    """Apply GroupNorm with parameters `(S, C)` to x `(S·B, C, H, W)`, then ReLU if `norm.relu`."""
    return fork_group_norm(x, norm)[0]


def fork_group_norm(x: Tensor, norm: NormForm) -> tuple[Tensor, Tensor]:
    """Return `group_norm(x)` and x; the backward pass adds the gradients of both in one launch."""
    given = norm.groups, norm.weight, norm.bias, norm.eps, norm.relu
    return _GroupNorm.apply(x, *given, gradient_buffer.current())  # type: ignore[return-value]


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
        buffer: GradientBuffer | None,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        check_images(x, len(weight))
        check_rows(x, weight, bias)
        y = channels_last(x, *x.shape)
        moments = norm_forward(x, y, groups, weight, bias, eps, relu)
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.groups, ctx.relu = groups, relu
        ctx.buffer, ctx.shares = buffer, None
        if buffer is not None and all(ctx.needs_input_grad[2:4]):
            shares = [buffer.reserve(parameter, len(x) // len(weight)) for parameter in (weight, bias)]
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
        if ctx.shares is not None and ctx.buffer.collects:
            norm_backward(*given, *(ctx.buffer.rows(share) for share in ctx.shares))
        else:
            parts = torch.empty(2, len(x) // len(weight), *weight.shape, dtype=torch.float32, device=x.device)
            norm_backward(*given, *parts)
            if any(ctx.needs_input_grad[2:4]):
                of_weight, of_bias = parts.sum(1)
        return grad_x, None, of_weight, of_bias, None, None, None


def norm_forward(x: Tensor, y: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> Tensor:
    """Write GroupNorm of x `(S·B, C, H, W)` to y; return mean and scale of each group, `(S·B, 2, groups)`."""
    images, channels, height, width = x.shape
    moments = torch.empty(images, 2, groups, dtype=torch.float32, device=x.device)
    _norm_forward[(images,)](
        x, y, weight, bias, moments, images // len(weight), height * width, weight.stride(0), bias.stride(0), eps,
        C=channels, G=groups, RELU=relu, **_norm_tile(height * width, channels),
    )  # fmt: skip
    return moments


def norm_backward(
    x: Tensor,
    grad: Tensor,
    grad_x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    moments: Tensor,
    relu: bool,
    plus: Tensor | None,
    of_weight: Tensor,
    of_bias: Tensor,
) -> None:
    """Compute the gradient w.r.t. x (+ plus), and each image's w.r.t. weight and bias, `(B, S, C)` in memory."""
    images, channels, height, width = x.shape
    _norm_backward[(images,)](
        x, grad, grad if plus is None else plus, grad_x, weight, bias, moments, of_weight, of_bias,
        images // len(weight), height * width, len(weight), weight.stride(0), bias.stride(0),
        C=channels, G=groups, RELU=relu, PLUS=plus is not None, **_norm_tile(height * width, channels),
    )  # fmt: skip


def _norm_tile(pixels: int, channels: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(pixels), max(16, 16384 // channels))
    warps = min(16, max(2, block * channels // 1024))
    return {"BLOCK": block, "ONCE": block >= pixels, "num_warps": triton.next_power_of_2(warps)}


@triton.jit
def _spread(values, C: tl.constexpr, G: tl.constexpr):
    """Sum over each group's channels and broadcast back to them: (C,) → (C,)."""
    sums = tl.sum(tl.reshape(values, (G, C // G)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (G, C // G)), (C,))


@triton.jit
def _read(ptr, pixel, channel, pixels, C: tl.constexpr):
    """Load a tile of an image, (pixels, channels), as float32; zeros beyond the image."""
    at = pixel[:, None] * C + channel[None, :]
    return tl.load(ptr + at, mask=(pixel < pixels)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _norm_forward(
    x_ptr, y_ptr, w_ptr, b_ptr, moments_ptr, per_replica, pixels, w_stride, b_stride, eps,
    C: tl.constexpr, G: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """One image: mean, variance, then the result. A small image is read once, a large one in tiles."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, C)
    tile = tl.arange(0, BLOCK)
    x_ptr += image * pixels * C
    y_ptr += image * pixels * C
    count = pixels * (C // G)
    if ONCE:
        x = _read(x_ptr, tile, channel, pixels, C)
        mean = _spread(tl.sum(x, axis=0), C, G) / count
        off = tl.where((tile < pixels)[:, None], x - mean[None, :], 0.0)
        variance = _spread(tl.sum(off * off, axis=0), C, G) / count
    else:
        total = tl.zeros((C,), dtype=tl.float32)
        for start in range(0, pixels, BLOCK):
            total += tl.sum(_read(x_ptr, start + tile, channel, pixels, C), axis=0)
        mean = _spread(total, C, G) / count
        total = tl.zeros((C,), dtype=tl.float32)
        for start in range(0, pixels, BLOCK):
            off = _read(x_ptr, start + tile, channel, pixels, C) - mean[None, :]
            off = tl.where((start + tile < pixels)[:, None], off, 0.0)
            total += tl.sum(off * off, axis=0)
        variance = _spread(total, C, G) / count
    scale = 1.0 / tl.sqrt(variance + eps)
    replica = tl.program_id(0) // per_replica
    weight = tl.load(w_ptr + replica * w_stride + channel) * scale
    bias = tl.load(b_ptr + replica * b_stride + channel) - mean * weight
    for start in range(0, pixels, BLOCK):
        if not ONCE:
            x = _read(x_ptr, start + tile, channel, pixels, C)
        y = x * weight[None, :] + bias[None, :]
        if RELU:
            y = tl.where(y > 0, y, tl.where(y == y, 0.0, y))  # preserves NaN, as torch does
        at = (start + tile)[:, None] * C + channel[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(start + tile < pixels)[:, None])
    group = channel // (C // G)
    leads = channel % (C // G) == 0
    tl.store(moments_ptr + image * 2 * G + group, mean, mask=leads)
    tl.store(moments_ptr + image * 2 * G + G + group, scale, mask=leads)


@triton.jit
def _norm_backward(
    x_ptr, g_ptr, plus_ptr, out_ptr, w_ptr, b_ptr, moments_ptr, of_w_ptr, of_b_ptr, per_replica, pixels, replicas,
    w_stride, b_stride,
    C: tl.constexpr, G: tl.constexpr, RELU: tl.constexpr, PLUS: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """One image: its gradient w.r.t. the input, and its share of the gradients w.r.t. scale and shift."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, C)
    tile = tl.arange(0, BLOCK)
    group = channel // (C // G)
    x_ptr += image * pixels * C
    g_ptr += image * pixels * C
    plus_ptr += image * pixels * C
    out_ptr += image * pixels * C
    mean = tl.load(moments_ptr + image * 2 * G + group)
    scale = tl.load(moments_ptr + image * 2 * G + G + group)
    replica = tl.program_id(0) // per_replica
    weight = tl.load(w_ptr + replica * w_stride + channel)
    bias = tl.load(b_ptr + replica * b_stride + channel)
    sum_grad = tl.zeros((C,), dtype=tl.float32)
    sum_product = tl.zeros((C,), dtype=tl.float32)
    if ONCE:
        grad = _read(g_ptr, tile, channel, pixels, C)
        unit = (_read(x_ptr, tile, channel, pixels, C) - mean[None, :]) * scale[None, :]
        if RELU:
            grad = tl.where(unit * weight[None, :] + bias[None, :] > 0, grad, 0.0)
        sum_grad += tl.sum(grad, axis=0)
        sum_product += tl.sum(grad * unit, axis=0)
    else:
        for start in range(0, pixels, BLOCK):
            grad = _read(g_ptr, start + tile, channel, pixels, C)
            unit = (_read(x_ptr, start + tile, channel, pixels, C) - mean[None, :]) * scale[None, :]
            if RELU:
                grad = tl.where(unit * weight[None, :] + bias[None, :] > 0, grad, 0.0)
            sum_grad += tl.sum(grad, axis=0)
            sum_product += tl.sum(grad * unit, axis=0)
    share = (image % per_replica * replicas + replica) * C + channel
    tl.store(of_w_ptr + share, sum_product)
    tl.store(of_b_ptr + share, sum_grad)
    count = pixels * (C // G)
    shift = _spread(weight * sum_grad, C, G) / count
    slope = _spread(weight * sum_product, C, G) / count
    for start in range(0, pixels, BLOCK):
        if not ONCE:
            grad = _read(g_ptr, start + tile, channel, pixels, C)
            unit = (_read(x_ptr, start + tile, channel, pixels, C) - mean[None, :]) * scale[None, :]
            if RELU:
                grad = tl.where(unit * weight[None, :] + bias[None, :] > 0, grad, 0.0)
        result = (grad * weight[None, :] - shift[None, :] - unit * slope[None, :]) * scale[None, :]
        if PLUS:
            result += _read(plus_ptr, start + tile, channel, pixels, C)
        at = (start + tile)[:, None] * C + channel[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=(start + tile < pixels)[:, None])
