"""3×3 convolution and its gradient w.r.t. the filters in Triton; the pixels of a row of taps are contiguous."""

# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false
# (kernels are launched as kernel[grid](...) and branch at compile time; neither can be typed without triton installed)

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


def _power(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def convolve(
    x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, plus: Tensor | None, transposed: bool
) -> None:
    """Write the convolution of x (+ plus) to y; transposed, x and y are the gradients w.r.t. output and input."""
    replicas, outputs, inputs = weight.shape[:3]
    if transposed:
        outputs, inputs = inputs, outputs
    per_replica = len(x) // replicas
    # Transposed with a stride, a tap reaches only every stride-th row and column: pixels are grouped by phase, so that
    # a program skips the taps that do not reach it.
    phases = stride if transposed else 1
    rows, columns = triton.cdiv(y.shape[2], phases), triton.cdiv(y.shape[3], phases)
    places = per_replica * rows * columns
    block_m = 64 if places < 4096 else 256 if inputs == 16 else 128
    programs = triton.cdiv(places, block_m), replicas * phases**2
    # With few programs, the outputs are divided among them too.
    few = programs[0] * programs[1] <= 64
    block_n = 16 if few else _power(outputs)
    # A row of taps is one product if a tap is too short for one; with few programs, as much of the row as fits, to hide
    # latency.
    block_k = _power(3 * inputs) if inputs < 16 and phases == 1 else _power(inputs)
    if few and inputs == block_m == 64 and phases == 1:
        block_k = 512 // x.element_size()
    _convolution[(*programs, triton.cdiv(outputs, block_n))](
        x, weight, y if plus is None else plus, y,
        per_replica, x.shape[2], x.shape[3], y.shape[2], y.shape[3], rows, columns, weight.stride(0),
        IN=inputs, OUT=outputs, STRIDE=stride, PADDING=padding, TRANSPOSED=transposed, PHASES=phases,
        PLUS=plus is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4,
    )  # fmt: skip


def gradient_rows(x: Tensor, y: Tensor, weight: Tensor) -> int:
    """Return the number of partial sums that `filter_gradient` writes; y is the convolution of x."""
    replicas, outputs, inputs = weight.shape[:3]
    pixels = len(y) // replicas * y.shape[2] * y.shape[3]
    # Enough programs to fill the GPU, but no more than tiles of pixels; wide sums are expensive to write.
    programs = replicas * (1 if _all_rows(weight) else 3)
    wanted = 1024 if inputs * outputs <= 512 else 512
    return max(1, min(triton.cdiv(pixels, _gradient_pixels(x)), triton.cdiv(wanted, programs)))


def filter_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: int, padding: int, parts: Tensor) -> None:
    """Write partial sums of the gradient w.r.t. the filters, `(rows, S, 3, 3, I, O)` in memory."""
    replicas, outputs, inputs = weight.shape[:3]
    all_rows, splits = _all_rows(weight), len(parts)
    warps, stages = 4, 1
    if x.element_size() == 4:
        stages = 2
    elif all_rows:
        warps, stages = (4, 3) if inputs <= 16 else (8, 2)
    _weight_gradient[(splits, 1 if all_rows else 3, replicas)](
        x, grad, parts, len(x) // replicas, x.shape[2], x.shape[3], grad.shape[2], grad.shape[3], splits,
        IN=inputs, OUT=outputs, STRIDE=stride, PADDING=padding, ALL_ROWS=all_rows,
        BLOCK_M=_gradient_pixels(x), BLOCK_K=_power(3 * inputs), BLOCK_O=_power(outputs),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _gradient_pixels(x: Tensor) -> int:
    """Return the pixels per tile of `filter_gradient`."""
    return 32 if x.element_size() == 4 else 64


def _all_rows(weight: Tensor) -> bool:
    """Whether the sums of all nine taps fit into a program's registers."""
    return _power(3 * weight.shape[2]) * _power(weight.shape[1]) <= 4096


@triton.jit
def _add_three_taps(
    total, x_ptr, w_ptr, source, first, good, channel, in_w, tap_row: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a row of taps as three products, with three loads in flight; `source` is the index of the first pixel."""
    k = tl.arange(0, BLOCK_K)
    left_valid = good & (first >= 0) & (first < in_w)
    middle_valid = good & (first + 1 >= 0) & (first + 1 < in_w)
    right_valid = good & (first + 2 >= 0) & (first + 2 < in_w)
    run = x_ptr + source[:, None] + k[None, :]
    left = tl.load(run, mask=left_valid[:, None], other=0.0)
    middle = tl.load(run + IN, mask=middle_valid[:, None], other=0.0)
    right = tl.load(run + 2 * IN, mask=right_valid[:, None], other=0.0)
    if TRANSPOSED:  # IN is the number of outputs of the filters
        at = (tap_row * 3 + 2) * IN * OUT + channel[None, :] * IN + k[:, None]
        next_tap = -IN * OUT
    else:
        at = tap_row * 3 * IN * OUT + k[:, None] * OUT + channel[None, :]
        next_tap = IN * OUT
    known = (channel < OUT)[None, :]
    left_filters = tl.load(w_ptr + at, mask=known, other=0.0)
    middle_filters = tl.load(w_ptr + at + next_tap, mask=known, other=0.0)
    right_filters = tl.load(w_ptr + at + 2 * next_tap, mask=known, other=0.0)
    total = tl.dot(left, left_filters.to(left.dtype), total)
    total = tl.dot(middle, middle_filters.to(left.dtype), total)
    return tl.dot(right, right_filters.to(left.dtype), total)


@triton.jit
def _add_row(
    total, x_ptr, w_ptr, source, first, good, channel, in_w, tap_row: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a row of taps, BLOCK_K of its 3·IN inputs at a time; `source` is the index of the first pixel."""
    for start in tl.static_range(0, 3 * IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        from_column = first[:, None] + (k // IN)[None, :]
        valid = good[:, None] & (from_column >= 0) & (from_column < in_w) & (k < 3 * IN)[None, :]
        patch = tl.load(x_ptr + source[:, None] + k[None, :], mask=valid, other=0.0)
        if TRANSPOSED:
            tap = (tap_row * 3 + 2 - k // IN)[:, None] * (IN * OUT)
            at = tap + channel[None, :] * IN + (k % IN)[:, None]
        else:
            at = tap_row * 3 * IN * OUT + k[:, None] * OUT + channel[None, :]
        filters = tl.load(w_ptr + at, mask=(k < 3 * IN)[:, None] & (channel < OUT)[None, :], other=0.0)
        total = tl.dot(patch, filters.to(patch.dtype), total)
    return total


@triton.jit
def _convolution(
    x_ptr, w_ptr, plus_ptr, y_ptr, per_replica, in_h, in_w, out_h, out_w, rows, columns, w_stride,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, TRANSPOSED: tl.constexpr,
    PHASES: tl.constexpr, PLUS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M output pixels of one replica; filters are stored as (S, 3, 3, I, O).

    Transposed, it is the gradient w.r.t. the input: x is the gradient w.r.t. the output, and each pixel sums over the
    windows that contain it.
    """
    replica = tl.program_id(1) // (PHASES * PHASES)
    phase_row = tl.program_id(1) // PHASES % PHASES
    phase_column = tl.program_id(1) % PHASES
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = place // columns % rows * PHASES + phase_row
    column = place % columns * PHASES + phase_column
    inside = (place < per_replica * rows * columns) & (row < out_h) & (column < out_w)
    image = replica * per_replica + place // (rows * columns)
    w_ptr += replica.to(tl.int64) * w_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PHASES == 1:
        if TRANSPOSED:  # the taps of a row from right to left, so that pixels are read from left to right
            first = column + PADDING - 2
        else:
            first = column * STRIDE - PADDING
        for tap_row in tl.static_range(3):
            if TRANSPOSED:
                from_row = row + PADDING - tap_row
            else:
                from_row = row * STRIDE - PADDING + tap_row
            good = inside & (from_row >= 0) & (from_row < in_h)
            source = ((image * in_h + from_row) * in_w + first) * IN
            # (Not for 64 channels in bfloat16: for tiles of 16 outputs, CUDA 12.8's assembler gets the addresses of the
            # second and third filters wrong.)
            if BLOCK_K == IN and IN <= 32:
                total = _add_three_taps(
                    total, x_ptr, w_ptr, source, first, good, channel, in_w, tap_row, IN, OUT, TRANSPOSED, BLOCK_K
                )
            else:
                total = _add_row(
                    total, x_ptr, w_ptr, source, first, good, channel, in_w, tap_row, IN, OUT, TRANSPOSED, BLOCK_K
                )
    else:
        k = tl.arange(0, BLOCK_K)
        for tap in tl.static_range(9):
            up = PADDING - tap // 3
            aside = PADDING - tap % 3
            # The offset makes the operands positive: Triton truncates quotients of negative numbers towards zero.
            down = (phase_row + up + PHASES * 4) % PHASES
            right = (phase_column + aside + PHASES * 4) % PHASES
            if down + right == 0:
                from_row = (row + up + PHASES * 4) // PHASES - 4
                from_column = (column + aside + PHASES * 4) // PHASES - 4
                valid = inside & (from_row >= 0) & (from_column >= 0) & (from_row < in_h) & (from_column < in_w)
                source = ((image * in_h + from_row) * in_w + from_column) * IN
                patch = tl.load(
                    x_ptr + source[:, None] + k[None, :], mask=valid[:, None] & (k < IN)[None, :], other=0.0
                )
                at = tap * IN * OUT + channel[None, :] * IN + k[:, None]
                filters = tl.load(w_ptr + at, mask=(k < IN)[:, None] & (channel < OUT)[None, :], other=0.0)
                total = tl.dot(patch, filters.to(patch.dtype), total)
    target = ((image * out_h + row) * out_w + column)[:, None] * OUT + channel[None, :]
    mask = inside[:, None] & (channel < OUT)[None, :]
    if PLUS:
        total += tl.load(plus_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + target, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _read_row(x_ptr, image, from_row, first, inside, k, in_h, in_w, IN: tl.constexpr):
    """Load the input of a row of three taps, (pixels, 3·IN): three adjacent pixels, zeros beyond the image."""
    from_column = first[:, None] + (k // IN)[None, :]
    good = inside & (from_row >= 0) & (from_row < in_h)
    valid = good[:, None] & (from_column >= 0) & (from_column < in_w) & (k < 3 * IN)[None, :]
    source = ((image * in_h + from_row) * in_w + first) * IN
    return tl.load(x_ptr + source[:, None] + k[None, :], mask=valid, other=0.0)


@triton.jit
def _weight_gradient(
    x_ptr, g_ptr, out_ptr, per_replica, in_h, in_w, out_h, out_w, splits,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, ALL_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One replica's filters, all nine taps or one row of them, summed over every `splits`-th tile of pixels."""
    replica = tl.program_id(2)
    tap_row = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)  # tap within the row, times IN, plus input channel
    o = tl.arange(0, BLOCK_O)
    pixels = per_replica * out_h * out_w
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    second = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    third = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK_M, pixels, splits * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < pixels
        image = replica * per_replica + pixel // (out_h * out_w)
        row = pixel // out_w % out_h
        column = pixel % out_w
        at = ((image * out_h + row) * out_w + column) * OUT
        gradient = tl.load(g_ptr + at[:, None] + o[None, :], mask=inside[:, None] & (o < OUT)[None, :], other=0.0)
        from_row = row * STRIDE - PADDING + tap_row
        first = column * STRIDE - PADDING
        patch = _read_row(x_ptr, image, from_row, first, inside, k, in_h, in_w, IN)
        if ALL_ROWS:
            below = _read_row(x_ptr, image, from_row + 1, first, inside, k, in_h, in_w, IN)
            last = _read_row(x_ptr, image, from_row + 2, first, inside, k, in_h, in_w, IN)
            second = tl.dot(tl.trans(below), gradient, second)
            third = tl.dot(tl.trans(last), gradient, third)
        total = tl.dot(tl.trans(patch), gradient, total)
    base = ((tl.program_id(0).to(tl.int64) * tl.num_programs(2) + replica) * 3 + tap_row) * 3 * IN * OUT
    place = out_ptr + base + k[:, None] * OUT + o[None, :]
    mask = (k < 3 * IN)[:, None] & (o < OUT)[None, :]
    tl.store(place, total, mask=mask)
    if ALL_ROWS:
        tl.store(place + 3 * IN * OUT, second, mask=mask)
        tl.store(place + 6 * IN * OUT, third, mask=mask)
