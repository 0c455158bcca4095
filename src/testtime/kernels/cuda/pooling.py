"""Fused global pooling with a linear layer, and the 2×2 average pooling of shortcuts, in Triton."""

# pyright: reportIndexIssue=false
# (kernels are launched as kernel[grid](...), which cannot be typed without triton installed)

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from testtime.kernels.cuda import gradient_buffer
from testtime.kernels.cuda.gradient_buffer import GradientBuffer
from testtime.kernels.cuda.layout import channels_last, check_images
from testtime.kernels.pointers import check


def pool_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Average x `(S·B, C, H, W)` over its pixels and apply a linear layer `(S, O, C)`; float32 `(S·B, O)`."""
    return _PoolLinear.apply(x, weight, bias, gradient_buffer.current())  # type: ignore[return-value]


def halve(x: Tensor, extra: int) -> Tensor:
    """Average 2×2 pixels of x `(N, C, H, W)` and append `extra` channels of zeros."""
    return _Halve.apply(x, extra)  # type: ignore[return-value]


class _PoolLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, buffer: GradientBuffer | None) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        replicas, outputs = bias.shape
        check_images(x, replicas)
        check(weight, (replicas, outputs, x.shape[1]), "rows", device=x.device)
        check(bias, (replicas, outputs), "rows", device=x.device)
        y, means = _pool_linear_forward(x, weight, bias)
        ctx.save_for_backward(means, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.buffer, ctx.shares = buffer, None
        if buffer is not None and all(ctx.needs_input_grad[1:3]):
            shares = [buffer.reserve(parameter, len(x) // len(weight)) for parameter in (weight, bias)]
            ctx.shares = None if None in shares else shares
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        means, weight = ctx.saved_tensors
        grad_x = channels_last(means, *ctx.shape, dtype=ctx.dtype)
        of_weight = of_bias = None
        if ctx.shares is not None and ctx.buffer.collects:
            parts = [ctx.buffer.rows(share) for share in ctx.shares]
            _pool_linear_gradients(grads[0].contiguous(), grad_x, means, weight, *parts)
        else:
            rows = len(means) // len(weight)
            parts = [means.new_empty(rows, *weight.shape), means.new_empty(rows, *weight.shape[:2])]
            _pool_linear_gradients(grads[0].contiguous(), grad_x, means, weight, *parts)
            of_weight, of_bias = (part.sum(0) for part in parts)
        return grad_x, of_weight, of_bias, None


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: int) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        images, channels, height, width = ctx.shape = x.shape
        y = channels_last(x, images, channels + extra, height // 2, width // 2)
        _halve_forward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = channels_last(grads[0], *ctx.shape)
        _halve_gradient(grads[0].contiguous(memory_format=torch.channels_last), grad_x)
        return grad_x, None


def _pool_linear_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result `(S·B, O)` of `pool_linear`, and the means `(S·B, C)`."""
    images, channels, height, width = x.shape
    outputs = weight.shape[1]
    y = torch.empty(images, outputs, dtype=torch.float32, device=x.device)
    means = torch.empty(images, channels, dtype=torch.float32, device=x.device)
    _pool_linear[(images,)](
        x, weight, bias, y, means, images // len(weight), height * width, outputs, weight.stride(0), bias.stride(0),
        C=channels, **_tile(height * width, channels, outputs),
    )  # fmt: skip
    return y, means


def _pool_linear_gradients(
    grad: Tensor, grad_x: Tensor, means: Tensor, weight: Tensor, of_weight: Tensor, of_bias: Tensor
) -> None:
    """Compute the gradient w.r.t. x, and each image's w.r.t. weight and bias, `(B, S, O, C)` and `(B, S, O)`."""
    images, channels, height, width = grad_x.shape
    outputs = weight.shape[1]
    _pool_linear_backward[(images,)](
        grad, grad_x, means, weight, of_weight, of_bias, images // len(weight), height * width, outputs, len(weight),
        weight.stride(0), C=channels, **_tile(height * width, channels, outputs),
    )  # fmt: skip


def _tile(pixels: int, channels: int, outputs: int) -> dict[str, Any]:
    block = max(1, min(triton.next_power_of_2(pixels), 8192 // channels))
    rows = max(1, min(triton.next_power_of_2(outputs), 4096 // channels))
    return {"BLOCK": block, "ROWS": rows, "num_warps": 4}


def _halve_forward(x: Tensor, y: Tensor) -> None:
    """Write means of 2×2 pixels of x `(N, C, H, W)` to y `(N, O, H/2, W/2)`; additional channels are zero."""
    _halve[(len(y), triton.cdiv(y[0].numel(), 1024))](
        x, y, y.shape[3], x.shape[1], y.shape[1], y[0].numel(), BLOCK=1024, num_warps=4
    )


def _halve_gradient(grad: Tensor, grad_x: Tensor) -> None:
    """Write the gradient of `halve` w.r.t. x."""
    _halve_backward[(len(grad_x), triton.cdiv(grad_x[0].numel(), 1024))](
        grad, grad_x, grad_x.shape[3], grad_x.shape[1], grad.shape[1], grad[0].numel(), grad_x[0].numel(),
        BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def _pool_linear(
    x_ptr, w_ptr, b_ptr, y_ptr, means_ptr, per_replica, pixels, outputs, w_stride, b_stride,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One image."""
    image = tl.program_id(0).to(tl.int64)
    replica = image // per_replica
    channel = tl.arange(0, C)
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = (image * pixels + pixel)[:, None] * C + channel[None, :]
        total += tl.sum(tl.load(x_ptr + at, mask=(pixel < pixels)[:, None], other=0.0).to(tl.float32), axis=0)
    mean = total / pixels
    tl.store(means_ptr + image * C + channel, mean)
    for start in range(0, outputs, ROWS):
        output = start + tl.arange(0, ROWS)
        known = output < outputs
        at = replica * w_stride + output[:, None] * C + channel[None, :]
        weight = tl.load(w_ptr + at, mask=known[:, None], other=0.0)
        y = tl.sum(weight * mean[None, :], axis=1) + tl.load(b_ptr + replica * b_stride + output, mask=known, other=0.0)
        tl.store(y_ptr + image * outputs + output, y, mask=known)


@triton.jit
def _pool_linear_backward(
    g_ptr, out_ptr, means_ptr, w_ptr, of_w_ptr, of_b_ptr, per_replica, pixels, outputs, replicas, w_stride,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One image: its gradient w.r.t. the input, equal for all pixels, and its share of those w.r.t. weight and bias."""
    image = tl.program_id(0).to(tl.int64)
    replica = image // per_replica
    channel = tl.arange(0, C)
    mean = tl.load(means_ptr + image * C + channel)
    share = (image % per_replica * replicas + replica) * outputs
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, outputs, ROWS):
        output = start + tl.arange(0, ROWS)
        known = output < outputs
        grad = tl.load(g_ptr + image * outputs + output, mask=known, other=0.0)
        at = output[:, None] * C + channel[None, :]
        weight = tl.load(w_ptr + replica * w_stride + at, mask=known[:, None], other=0.0)
        total += tl.sum(weight * grad[:, None], axis=0)
        tl.store(of_w_ptr + share * C + at, grad[:, None] * mean[None, :], mask=known[:, None])
        tl.store(of_b_ptr + share + output, grad, mask=known)
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = (image * pixels + pixel)[:, None] * C + channel[None, :]
        value = tl.broadcast_to((total / pixels)[None, :], (BLOCK, C))
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=(pixel < pixels)[:, None])


@triton.jit
def _halve(x_ptr, y_ptr, width, inputs, outputs, size, BLOCK: tl.constexpr):
    """A block of elements of one image of y."""
    image = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = place % outputs
    column = place // outputs % width
    row = place // outputs // width
    known = (place < size) & (channel < inputs)
    # An image of x has four times the pixels of y, and its rows twice as many.
    x_ptr += image * (size // outputs) * 4 * inputs
    at = (row * 4 * width + column * 2) * inputs + channel
    total = tl.load(x_ptr + at, mask=known, other=0.0).to(tl.float32)
    total += tl.load(x_ptr + at + inputs, mask=known, other=0.0).to(tl.float32)
    total += tl.load(x_ptr + at + 2 * width * inputs, mask=known, other=0.0).to(tl.float32)
    total += tl.load(x_ptr + at + (2 * width + 1) * inputs, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + image * size + place, (total * 0.25).to(y_ptr.dtype.element_ty), mask=place < size)


@triton.jit
def _halve_backward(g_ptr, out_ptr, width, inputs, outputs, g_size, size, BLOCK: tl.constexpr):
    """A block of elements of one image of x."""
    image = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = place % inputs
    column = place // inputs % width
    row = place // inputs // width
    at = (row // 2 * (width // 2) + column // 2) * outputs + channel
    grad = tl.load(g_ptr + image * g_size + at, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + image * size + place, (grad * 0.25).to(out_ptr.dtype.element_ty), mask=place < size)
