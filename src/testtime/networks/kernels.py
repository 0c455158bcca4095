"""CUDA kernels, in Triton, for the two layers that cost the most when many replicas run as one network.

cuDNN's grouped convolutions are made for few wide groups; replicas of a small network are many narrow ones. Here a
program works for one replica, on a tile of its pixels, as a matrix product on the tensor cores. Images lie in memory
with their channels last, `(S·B, H, W, C)`, so that a pixel's channels are one short contiguous run.

- `convolve`: 3×3 convolution, forward; its gradient by the input is the same kernel with the taps reversed; its
  gradient by the weights sums pixel tiles in a fixed order (no atomics: results do not vary from run to run).
- `group_norm`: GroupNorm with or without the ReLU behind it; a program has one image in reach, so that the image comes
  from memory once. What the backward pass needs besides the input is two numbers for each group.

Weights stay float32 in memory and are rounded to the images' dtype as they are read. Products of bfloat16 images are
summed in float32; products of float32 images are taken in TF32, so exact float32 is not for `convolve` but for cuDNN.
"""

# pyright: reportIndexIssue=false
# (a kernel is launched as kernel[grid](...), which cannot be typed where triton is not installed)

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """3×3 convolution of x `(S·B, I, H, W)`, channels last, with weights `(S, O, I, 3, 3)` → `(S·B, O, h, w)`.

    The weights are best stored as `(S, 3, 3, I, O)` and shown permuted; others are copied into that order first.
    """
    if weight[0].stride() != (1, weight.shape[1], 3 * weight[0].numel() // 9, weight[0].numel() // 9):
        weight = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    return _Convolve.apply(x, weight, stride, padding)  # type: ignore[return-value]


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> Tensor:
    """GroupNorm of x `(S·B, C, H, W)`, channels last, with weight and bias `(S, C)`, then ReLU if asked."""
    return _GroupNorm.apply(x, groups, weight, bias, eps, relu)  # type: ignore[return-value]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        images, _, height, width = x.shape
        out = ((height + 2 * padding - 3) // stride + 1, (width + 2 * padding - 3) // stride + 1)
        y = _channels_last(x, images, weight.shape[1], *out)
        _launch_convolution(x, weight, y, stride, padding, transposed=False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _channels_last(x, *x.shape)
            _launch_convolution(grad, weight, grad_x, ctx.stride, ctx.padding, transposed=True)
        if ctx.needs_input_grad[1]:
            grad_weight = _launch_weight_gradient(x, grad, weight, ctx.stride, ctx.padding)
        return grad_x, grad_weight, None, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        images, channels, height, width = x.shape
        y = _channels_last(x, *x.shape)
        moments = torch.empty(images, 2, groups, dtype=torch.float32, device=x.device)
        block, warps = _norm_tile(height * width, channels)
        _norm_forward[(images,)](
            x, y, weight, bias, moments, images // len(weight), height * width, weight.stride(0), bias.stride(0), eps,
            C=channels, G=groups, BLOCK=block, RELU=relu, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.groups, ctx.relu = groups, relu
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, moments = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        images, channels, height, width = x.shape
        grad_x = _channels_last(x, *x.shape)
        sums = torch.empty(2, images, channels, dtype=torch.float32, device=x.device)
        block, warps = _norm_tile(height * width, channels)
        _norm_backward[(images,)](
            x, grad, grad_x, weight, bias, moments, sums, images // len(weight), height * width, images,
            weight.stride(0), bias.stride(0),
            C=channels, G=ctx.groups, BLOCK=block, RELU=ctx.relu, num_warps=warps,
        )  # fmt: skip
        grad_weight, grad_bias = sums.view(2, len(weight), -1, channels).sum(2)
        return grad_x, None, grad_weight, grad_bias, None, None


def _channels_last(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _norm_tile(pixels: int, channels: int) -> tuple[int, int]:
    block = min(triton.next_power_of_2(pixels), max(16, 16384 // channels))
    return block, 8 if block * channels >= 8192 else 4


def _launch_convolution(x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, transposed: bool) -> None:
    replicas, outputs, inputs = weight.shape[:3]
    if transposed:
        outputs, inputs = inputs, outputs
    per_replica = len(x) // replicas
    block_n = min(64, max(16, triton.next_power_of_2(outputs)))
    block_k = min(64, max(16, triton.next_power_of_2(inputs)))
    # Transposed with a stride, only every stride-th row and column can come from a given tap: pixels are taken by
    # their phase, so that a program knows which taps it needs at all.
    phases = stride if transposed else 1
    rows, columns = triton.cdiv(y.shape[2], phases), triton.cdiv(y.shape[3], phases)
    block_m, warps, stages = _TILES["convolution"]
    grid = (triton.cdiv(per_replica * rows * columns, block_m), triton.cdiv(outputs, block_n), replicas * phases**2)
    _convolution[grid](
        x, weight, y, per_replica, x.shape[2], x.shape[3], y.shape[2], y.shape[3], rows, columns, weight.stride(0),
        IN=inputs, OUT=outputs, STRIDE=stride, PADDING=padding, TRANSPOSED=transposed, PHASES=phases,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _launch_weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    replicas, outputs, inputs = weight.shape[:3]
    per_replica = len(x) // replicas
    pixels = per_replica * grad.shape[2] * grad.shape[3]
    block_m, warps, stages = _TILES["weight_gradient"] if x.element_size() == 2 else (64, 4, 2)
    block_i = min(64, max(16, triton.next_power_of_2(inputs)))
    block_o = min(64, max(16, triton.next_power_of_2(outputs)))
    tiles = triton.cdiv(inputs, block_i) * triton.cdiv(outputs, block_o)
    # Enough programs to fill the chip several times, but no more than there are tiles of pixels.
    splits = max(1, min(triton.cdiv(pixels, block_m), triton.cdiv(_PROGRAMS, replicas * 3 * tiles)))
    partial = torch.empty(splits, replicas, 3, 3, inputs, outputs, dtype=torch.float32, device=x.device)
    _weight_gradient[(splits, 3 * tiles, replicas)](
        x, grad, partial, per_replica, x.shape[2], x.shape[3], grad.shape[2], grad.shape[3], splits,
        IN=inputs, OUT=outputs, STRIDE=stride, PADDING=padding,
        BLOCK_M=block_m, BLOCK_I=block_i, BLOCK_O=block_o, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return (partial[0] if splits == 1 else partial.sum(0)).permute(0, 4, 3, 1, 2)


# Pixels in a tile, warps, stages of the loads' pipeline; measured on an H200.
_TILES = {"convolution": (128, 4, 3), "weight_gradient": (128, 4, 3)}
_PROGRAMS = 2048


@triton.jit
def _convolution(
    x_ptr, w_ptr, y_ptr, per_replica, in_h, in_w, out_h, out_w, rows, columns, w_stride,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, TRANSPOSED: tl.constexpr,
    PHASES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M output pixels by BLOCK_N output channels of one replica; filters lie as (S, 3, 3, I, O).

    Transposed, it is the gradient by the input: x is the gradient by the output, and an output pixel collects from the
    places whose window covered it.
    """
    replica = tl.program_id(2) // (PHASES * PHASES)
    phase_row = tl.program_id(2) // PHASES % PHASES
    phase_column = tl.program_id(2) % PHASES
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = place // columns % rows * PHASES + phase_row
    column = place % columns * PHASES + phase_column
    inside = (place < per_replica * rows * columns) & (row < out_h) & (column < out_w)
    image = replica * per_replica + place // (rows * columns)
    w_ptr += replica.to(tl.int64) * w_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for tap in tl.static_range(9):
        needed = True
        if TRANSPOSED:
            up = PADDING - tap // 3
            aside = PADDING - tap % 3
            if PHASES > 1:
                needed = ((phase_row + up + PHASES * 4) % PHASES == 0) & (
                    (phase_column + aside + PHASES * 4) % PHASES == 0
                )
            from_row = (row + up + PHASES * 4) // PHASES - 4
            from_column = (column + aside + PHASES * 4) // PHASES - 4
        else:
            from_row = row * STRIDE - PADDING + tap // 3
            from_column = column * STRIDE - PADDING + tap % 3
        if needed:
            valid = inside & (from_row >= 0) & (from_column >= 0) & (from_row < in_h) & (from_column < in_w)
            source = ((image * in_h + from_row) * in_w + from_column) * IN
            for start in tl.static_range(0, IN, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                patch = tl.load(
                    x_ptr + source[:, None] + k[None, :], mask=valid[:, None] & (k < IN)[None, :], other=0.0
                )
                if TRANSPOSED:  # here IN is what the filters give
                    at = tap * IN * OUT + channel[None, :] * IN + k[:, None]
                else:
                    at = tap * IN * OUT + k[:, None] * OUT + channel[None, :]
                filters = tl.load(w_ptr + at, mask=(k < IN)[:, None] & (channel < OUT)[None, :], other=0.0)
                total = tl.dot(patch, filters.to(patch.dtype), total)
    target = ((image * out_h + row) * out_w + column)[:, None] * OUT + channel[None, :]
    tl.store(y_ptr + target, total.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (channel < OUT)[None, :])


@triton.jit
def _weight_gradient(
    x_ptr, g_ptr, out_ptr, per_replica, in_h, in_w, out_h, out_w, splits,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One row of taps of one replica's filters, summed over every `splits`-th tile of BLOCK_M pixels."""
    replica = tl.program_id(2)
    tap_row = tl.program_id(1) % 3
    tile = tl.program_id(1) // 3
    tiles_o: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    i = tile // tiles_o * BLOCK_I + tl.arange(0, BLOCK_I)
    o = tile % tiles_o * BLOCK_O + tl.arange(0, BLOCK_O)
    known = (i < IN)[None, :]
    pixels = per_replica * out_h * out_w
    left = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    middle = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    right = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK_M, pixels, splits * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < pixels
        image = replica * per_replica + pixel // (out_h * out_w)
        row = pixel // out_w % out_h
        column = pixel % out_w
        at = ((image * out_h + row) * out_w + column) * OUT
        gradient = tl.load(g_ptr + at[:, None] + o[None, :], mask=inside[:, None] & (o < OUT)[None, :], other=0.0)
        from_row = row * STRIDE - PADDING + tap_row
        from_column = column * STRIDE - PADDING
        line = ((image * in_h + from_row) * in_w + from_column) * IN
        good = inside & (from_row >= 0) & (from_row < in_h)
        valid = good & (from_column >= 0) & (from_column < in_w)
        patch = tl.load(x_ptr + line[:, None] + i[None, :], mask=valid[:, None] & known, other=0.0)
        left = tl.dot(tl.trans(patch), gradient, left)
        valid = good & (from_column + 1 >= 0) & (from_column + 1 < in_w)
        patch = tl.load(x_ptr + (line + IN)[:, None] + i[None, :], mask=valid[:, None] & known, other=0.0)
        middle = tl.dot(tl.trans(patch), gradient, middle)
        valid = good & (from_column + 2 >= 0) & (from_column + 2 < in_w)
        patch = tl.load(x_ptr + (line + 2 * IN)[:, None] + i[None, :], mask=valid[:, None] & known, other=0.0)
        right = tl.dot(tl.trans(patch), gradient, right)
    base = ((tl.program_id(0).to(tl.int64) * tl.num_programs(2) + replica) * 9 + tap_row * 3) * IN * OUT
    place = base + i[:, None] * OUT + o[None, :]
    mask = (i < IN)[:, None] & (o < OUT)[None, :]
    tl.store(out_ptr + place, left, mask=mask)
    tl.store(out_ptr + place + IN * OUT, middle, mask=mask)
    tl.store(out_ptr + place + 2 * IN * OUT, right, mask=mask)


@triton.jit
def _spread(values, C: tl.constexpr, G: tl.constexpr):
    """Sums over each group's channels, given to every channel: (C,) → (C,)."""
    sums = tl.sum(tl.reshape(values, (G, C // G)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (G, C // G)), (C,))


@triton.jit
def _norm_forward(
    x_ptr, y_ptr, w_ptr, b_ptr, moments_ptr, per_replica, pixels, w_stride, b_stride, eps,
    C: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """One image: mean and variance in two passes over it (the second finds it in the cache), then the result."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, C)
    x_ptr += image * pixels * C
    y_ptr += image * pixels * C
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = pixel[:, None] * C + channel[None, :]
        total += tl.sum(tl.load(x_ptr + at, mask=(pixel < pixels)[:, None], other=0.0).to(tl.float32), axis=0)
    count = pixels * (C // G)
    mean = _spread(total, C, G) / count
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = pixel[:, None] * C + channel[None, :]
        inside = (pixel < pixels)[:, None]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        off = tl.where(inside, x - mean[None, :], 0.0)
        total += tl.sum(off * off, axis=0)
    scale = 1.0 / tl.sqrt(_spread(total, C, G) / count + eps)
    replica = tl.program_id(0) // per_replica
    weight = tl.load(w_ptr + replica * w_stride + channel) * scale
    bias = tl.load(b_ptr + replica * b_stride + channel) - mean * weight
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = pixel[:, None] * C + channel[None, :]
        inside = (pixel < pixels)[:, None]
        y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * weight[None, :] + bias[None, :]
        if RELU:
            y = tl.where(y > 0, y, tl.where(y == y, 0.0, y))  # as torch: not-a-number stays
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    group = channel // (C // G)
    first = channel % (C // G) == 0
    tl.store(moments_ptr + image * 2 * G + group, mean, mask=first)
    tl.store(moments_ptr + image * 2 * G + G + group, scale, mask=first)


@triton.jit
def _norm_backward(
    x_ptr, g_ptr, out_ptr, w_ptr, b_ptr, moments_ptr, sums_ptr, per_replica, pixels, images, w_stride, b_stride,
    C: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """One image: its gradient by the input, and its share of the gradients by scale and shift."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, C)
    group = channel // (C // G)
    x_ptr += image * pixels * C
    g_ptr += image * pixels * C
    out_ptr += image * pixels * C
    mean = tl.load(moments_ptr + image * 2 * G + group)
    scale = tl.load(moments_ptr + image * 2 * G + G + group)
    replica = tl.program_id(0) // per_replica
    weight = tl.load(w_ptr + replica * w_stride + channel)
    bias = tl.load(b_ptr + replica * b_stride + channel)
    sum_grad = tl.zeros((C,), dtype=tl.float32)
    sum_product = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = pixel[:, None] * C + channel[None, :]
        inside = (pixel < pixels)[:, None]
        grad = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        unit = (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        if RELU:
            grad = tl.where(unit * weight[None, :] + bias[None, :] > 0, grad, 0.0)
        sum_grad += tl.sum(grad, axis=0)
        sum_product += tl.sum(grad * unit, axis=0)
    tl.store(sums_ptr + image * C + channel, sum_product)
    tl.store(sums_ptr + (images + image) * C + channel, sum_grad)
    count = pixels * (C // G)
    shift = _spread(weight * sum_grad, C, G) / count
    slope = _spread(weight * sum_product, C, G) / count
    for start in range(0, pixels, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        at = pixel[:, None] * C + channel[None, :]
        inside = (pixel < pixels)[:, None]
        grad = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        unit = (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        if RELU:
            grad = tl.where(unit * weight[None, :] + bias[None, :] > 0, grad, 0.0)
        result = (grad * weight[None, :] - shift[None, :] - unit * slope[None, :]) * scale[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)
