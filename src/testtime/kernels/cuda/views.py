"""Views of images in one Triton kernel (drawn, padded, cropped, flipped and rotated), and normalisation in another."""

# pyright: reportIndexIssue=false
# (kernels are launched as kernel[grid](...), which cannot be typed without triton installed)

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from testtime.kernels.cuda.hash import GOLDEN, scramble


def make_views(
    images: Tensor, keys: Tensor, copies: int, padding: int, flip: bool, turns: int, words: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Apply `CropFlip`, then `Rotation`, with bit-identical results.

    Args:
        images: `(N, C, H, W)` of any dtype.
        keys: Keys of the draws `(N,)`.
        copies: Augmented copies per image.
        padding: Black pixels added on each side before the crop.
        flip: Whether to flip with probability 0.5.
        turns: 1 for one random rotation per copy; 4 for all rotations.
        words: `purpose_word` of crops, flips and rotations.

    Returns:
        Views `(N·copies·turns, C, side, side)` and their rotations, int64.
    """
    return _launch(images, keys, copies, padding, flip, turns, words)


def rotate(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return all four rotations of images `(N, C, H, W)`: views `(4·N, C, side, side)` and their rotations, int64."""
    return _launch(images, None, 1, 0, False, 4, (0, 0, 0))


def _launch(
    images: Tensor, keys: Tensor | None, copies: int, padding: int, flip: bool, turns: int, words: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    count, channels, height, width = images.shape
    side, made = min(height, width), count * copies * turns
    images = images.contiguous()
    views = torch.empty(made, channels, side, side, dtype=images.dtype, device=images.device)
    targets = torch.empty(made, dtype=torch.int64, device=images.device)
    if made == 0:
        return views, targets
    _make_views[(made, triton.cdiv(channels * side * side, 1024))](
        images, targets if keys is None else keys.contiguous(), views, targets,
        copies, channels, height, width, side, (height - side) // 2, (width - side) // 2,
        DRAW=keys is not None, PADDING=padding, FLIP=flip, TURNS=turns, GOLDEN=GOLDEN,
        CROP_WORD=words[0], FLIP_WORD=words[1], TURN_WORD=words[2],
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return views, targets


def normalise(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalise images `(N, C, H, W)`, uint8 or float32; the result is channels last.

    Args:
        images: Pixels; uint8 is divided by 255 first.
        mean: Per channel or for all, float32.
        std: Per channel or for all, float32.
        dtype: Dtype of the result.
    """
    count, channels, height, width = images.shape
    result = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    if count:
        _normalise[(count, triton.cdiv(channels * height * width, 1024))](
            images.contiguous(), mean.contiguous(), std.contiguous(), result, height * width,
            C=channels, MEANS=mean.numel(), STDS=std.numel(), BYTES=images.dtype == torch.uint8,
            BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return result


@triton.jit
def _integer(state, high):
    """Draw an integer below `high`; see `Draws.integers`."""
    return (((scramble(state) >> 33) & 0x7FFFFFFF) * high) >> 31


@triton.jit
def _make_views(
    x_ptr, keys_ptr, y_ptr, targets_ptr, copies, channels, height, width, side, top, left,
    DRAW: tl.constexpr, PADDING: tl.constexpr, FLIP: tl.constexpr, TURNS: tl.constexpr, GOLDEN: tl.constexpr,
    CROP_WORD: tl.constexpr, FLIP_WORD: tl.constexpr, TURN_WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of pixels of one view: each computes its source position."""
    view = tl.program_id(0)
    copy = view // TURNS
    image = copy // copies
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < channels * side * side
    channel = place // (side * side)
    row = place // side % side
    column = place % side
    turns = (view % TURNS).to(tl.int64)
    down = tl.full((), PADDING, tl.int64)
    right = tl.full((), PADDING, tl.int64)
    flipped = tl.full((), 0, tl.int64)
    if DRAW:
        key = tl.load(keys_ptr + image)
        key = scramble(key + scramble(((copy % copies).to(tl.int64) + 1) * GOLDEN))
        state = scramble(key + CROP_WORD) + GOLDEN
        down = _integer(state, 2 * PADDING + 1)
        right = _integer(state + GOLDEN, 2 * PADDING + 1)
        if FLIP:
            flipped = _integer(scramble(key + FLIP_WORD) + GOLDEN, 2)
        if TURNS == 1:
            turns = _integer(scramble(key + TURN_WORD) + GOLDEN, 4)
    end = side - 1
    # A rotation by 90° counterclockwise takes the pixel at (row, column) from (column, end - row).
    from_row = tl.where(turns == 0, row, tl.where(turns == 1, column, tl.where(turns == 2, end - row, end - column)))
    from_column = tl.where(turns == 0, column, tl.where(turns == 1, end - row, tl.where(turns == 2, end - column, row)))
    from_row = from_row + top
    from_column = from_column + left
    from_column = tl.where(flipped == 1, width - 1 - from_column, from_column)
    from_row = from_row + (down - PADDING).to(tl.int32)
    from_column = from_column + (right - PADDING).to(tl.int32)
    seen = inside & (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    source = ((image.to(tl.int64) * channels + channel) * height + from_row) * width + from_column
    pixel = tl.load(x_ptr + source, mask=seen, other=0)
    tl.store(y_ptr + view.to(tl.int64) * channels * side * side + place, pixel, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(targets_ptr + view, turns)


@triton.jit
def _normalise(
    x_ptr, mean_ptr, std_ptr, y_ptr, pixels,
    C: tl.constexpr, MEANS: tl.constexpr, STDS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64) * pixels * C
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < pixels * C
    channel = place % C
    x = tl.load(x_ptr + image + channel * pixels + place // C, mask=inside, other=0).to(tl.float32)
    if BYTES:
        x = tl.div_rn(x, tl.full((BLOCK,), 255.0, tl.float32))
    x = x - tl.load(mean_ptr + channel % MEANS)
    x = tl.div_rn(x, tl.load(std_ptr + channel % STDS))
    tl.store(y_ptr + image + place, x.to(y_ptr.dtype.element_ty), mask=inside)
