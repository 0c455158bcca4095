"""Filters pixel by pixel, as oracles for several tests."""

from __future__ import annotations

import math

import numpy as np


def mirrored(index: int, size: int) -> int:
    """An index folded into a line, mirrored at its outermost pixels without repeating them."""
    if size == 1:
        return 0
    index %= 2 * size - 2
    return min(index, 2 * size - 2 - index)


def naive_gaussian(pixels: np.ndarray, sigma: float, truncate: float, border: str) -> np.ndarray:
    radius = int(truncate * sigma + 0.5)
    bell = np.array([math.exp(-t * t / (2 * sigma**2)) for t in range(-radius, radius + 1)])
    bell /= bell.sum()
    for axis in (0, 1):
        pixels = np.apply_along_axis(
            lambda line: np.convolve(
                np.pad(line, radius, mode="edge" if border == "edge" else "symmetric"), bell, "valid"
            ),
            axis,
            pixels,
        )
    return pixels


def naive_zoom(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Cut out the middle, stretch it bilinearly so that its corners stay corners, trim to the size."""
    cut, first = [], []
    for size in pixels.shape:
        cut.append(math.ceil(size / factor))
        first.append((size - cut[-1]) // 2)
    middle = pixels[first[0] : first[0] + cut[0], first[1] : first[1] + cut[1]]
    shape = [round(length * factor) for length in cut]
    out = np.zeros(shape)
    for y in range(shape[0]):
        for x in range(shape[1]):
            fy, fx = y * (cut[0] - 1) / (shape[0] - 1), x * (cut[1] - 1) / (shape[1] - 1)
            y0, x0 = min(int(fy), cut[0] - 2), min(int(fx), cut[1] - 2)
            ty, tx = fy - y0, fx - x0
            top = middle[y0, x0] * (1 - tx) + middle[y0, x0 + 1] * tx
            bottom = middle[y0 + 1, x0] * (1 - tx) + middle[y0 + 1, x0 + 1] * tx
            out[y, x] = top * (1 - ty) + bottom * ty
    trim = [(length - size) // 2 for length, size in zip(shape, pixels.shape, strict=True)]
    return out[trim[0] : trim[0] + pixels.shape[0], trim[1] : trim[1] + pixels.shape[1]]
