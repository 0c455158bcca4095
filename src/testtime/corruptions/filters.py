"""Filters whose weights are rounded so that sums are exact.

The weights of a weighted mean of 8-bit pixels are rounded to multiples of 2⁻¹⁶ that sum to 1. Sums are then exact in
floating point in any order, so results are bit-identical for an image alone or in a batch, whole or in parts, on CPU or
GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Border = Literal["edge", "reflect"]

# Lines up to this length are filtered by one matrix; longer ones in blocks, each by a part of the matrix.
_DENSE = 512
_BLOCK_VALUES = 1 << 22
_PLANE_VALUES = 1 << 25  # pixels smoothed at once


def round_weights(weights: Array, bits: int = 16) -> Array:
    """Round weights to multiples of 2⁻ᵇⁱᵗˢ along the last axis, with a single rounding of their sum.

    Cumulative sums are rounded and differenced: rounding each weight would bias many small equal weights alike.

    Args:
        weights: Non-negative, `(..., K)`.
        bits: Fractional bits.
    """
    return np.diff(np.round(np.cumsum(weights, -1) * 2.0**bits), axis=-1, prepend=0) / 2.0**bits


def gaussian_weights(sigma: float, radius: int) -> Array:
    """Return a Gaussian sampled at the integers from -radius to radius, normalised to sum 1, `(2·radius + 1,)`."""
    if sigma <= 0:
        return np.ones(1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return weights / weights.sum()


def mirror_index(size: int, pad: int) -> npt.NDArray[np.int64]:
    """Return the indices of padding that mirrors without repeating the edge, for any width, `(size + 2·pad,)`."""
    if size == 1:
        return np.zeros(1 + 2 * pad, np.int64)
    index = np.arange(-pad, size + pad) % (2 * size - 2)
    return np.minimum(index, 2 * size - 2 - index)


def gaussian_rows(size: int, rows: slice, sigma: float, truncate: float, border: Border) -> tuple[slice, Array]:
    """Return some rows of the matrix of a Gaussian filter on a line of `size` pixels.

    Args:
        size: Pixels in the line.
        rows: Pixels of the filtered line.
        sigma: Standard deviation in pixels.
        truncate: Truncate the kernel at this many standard deviations.
        border: "edge" repeats the outermost pixel, "reflect" mirrors the line, repeating the outermost pixel.

    Returns:
        The source pixels, and their weights, `(rows, source pixels)` in multiples of 2⁻¹⁸, so that two passes over
        16-bit integers are exact.
    """
    radius = int(truncate * sigma + 0.5)
    weights = gaussian_weights(sigma, radius)
    window = slice(max(0, rows.start - radius), min(size, rows.stop + radius))
    positions = np.arange(rows.start, rows.stop)[:, None] + np.arange(-radius, radius + 1)
    if border == "edge":
        positions = positions.clip(0, size - 1)
    else:
        positions %= 2 * size
        positions = np.minimum(positions, 2 * size - 1 - positions)
    count, length = len(positions), window.stop - window.start
    positions += np.arange(count)[:, None] * length - window.start
    matrix = np.bincount(positions.ravel(), np.tile(weights, count), count * length).astype(np.float64)
    return window, round_weights(matrix.reshape(count, length), bits=18)


@functools.lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, truncate: float, border: Border) -> Tensor:
    """Return the Gaussian filter of a line as a matrix, float64 `(size, size)`; see `gaussian_rows`."""
    return torch.from_numpy(gaussian_rows(size, slice(0, size), sigma, truncate, border)[1])


def _gaussian_blocks(size: int, sigma: float, truncate: float, border: Border) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the filter in parts: pixels of the filtered line, their source pixels, and the matrix."""
    if size <= _DENSE:
        yield slice(0, size), slice(0, size), gaussian_matrix(size, sigma, truncate, border)
        return
    taps = 2 * int(truncate * sigma + 0.5) + 1
    step = max(1, min(max(64, taps), _DENSE, _BLOCK_VALUES // taps))
    for start in range(0, size, step):
        rows = slice(start, min(start + step, size))
        window, matrix = gaussian_rows(size, rows, sigma, truncate, border)
        yield rows, window, torch.from_numpy(matrix)


def smooth(images: Tensor, sigma: float, truncate: float, border: Border) -> Tensor:
    """Blur the last two axes of integer-valued images with a Gaussian, exactly, in float64.

    Args:
        images: Integers of magnitude below 2¹⁶, `(..., H, W)`.
        sigma: Standard deviation in pixels.
        truncate: Truncate the kernel at this many standard deviations.
        border: "edge" or "reflect", as in `gaussian_rows`.

    Returns:
        Float64 `(..., H, W)`.
    """
    if int(truncate * sigma + 0.5) == 0:
        return images.to(torch.float64)
    height, width = images.shape[-2:]
    planes = images.reshape(-1, height, width)
    result = torch.empty(planes.shape, dtype=torch.float64, device=images.device)
    together = max(1, _PLANE_VALUES // (height * width))
    for part, done in zip(planes.split(together), result.split(together), strict=True):
        across = torch.empty_like(done)
        for columns, window, matrix in _gaussian_blocks(width, sigma, truncate, border):
            across[..., columns] = part[..., window].to(torch.float64) @ matrix.to(images.device).T
        for rows, window, matrix in _gaussian_blocks(height, sigma, truncate, border):
            done[:, rows] = matrix.to(images.device) @ across[:, window]
    return result.view(images.shape)


@functools.lru_cache(maxsize=64)
def box_taps(size: int, to: int) -> tuple[Tensor, Tensor]:
    """Return the taps of Pillow's box filter from `size` pixels to `to` pixels.

    Returns:
        The source pixels of each pixel of the result, int64 `(to, K)`, and their weights, float32 `(to, K)`.
    """
    ratio = size / to
    centre = (np.arange(to) + 0.5) * ratio
    reach = max(ratio, 1) / 2
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), size)
    positions = first[:, None] + np.arange((last - first).max())
    offset = (positions - centre[:, None] + 0.5) / max(ratio, 1)
    inside = (positions < last[:, None]) & (offset > -0.5) & (offset <= 0.5)
    weights = round_weights(inside / inside.sum(1, keepdims=True))
    return torch.from_numpy(np.minimum(positions, size - 1)), torch.from_numpy(weights.astype(np.float32))


@functools.lru_cache(maxsize=64)
def _box_matrix(size: int, to: int) -> Tensor:
    positions, weights = box_taps(size, to)
    zeros = torch.zeros((to, size), dtype=torch.float64, device="cpu")
    return zeros.scatter_add_(1, positions, weights.to(torch.float64))


def box_filter(images: Tensor, axis: Literal[-2, -1], to: int) -> Tensor:
    """Resize one axis of images with Pillow's box filter.

    Args:
        images: Float pixels, integers from 0 to 255, `(..., H, W)`.
        axis: The axis.
        to: Its length in the result.

    Returns:
        Float pixels, exact.
    """
    size = images.shape[axis]
    if size <= _DENSE:  # float64: torch may be set to multiply float32 matrices at lower precision
        matrix, wide = _box_matrix(size, to).to(images.device), images.to(torch.float64)
        return (wide @ matrix.T if axis == -1 else matrix @ wide).to(images.dtype)
    positions, weights = (taps.to(images.device) for taps in box_taps(size, to))
    shape = (-1,) if axis == -1 else (-1, 1)
    result = images.index_select(axis, positions[:, 0]).mul_(weights[:, 0].view(shape))
    for tap in range(1, positions.shape[1]):
        result += images.index_select(axis, positions[:, tap]).mul_(weights[:, tap].view(shape))
    return result
