"""The digital corruptions: contrast, elastic transform, pixelate, JPEG compression, and the extra saturation."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from testtime.corruptions.filters import box_filter, box_taps, smooth
from testtime.corruptions.strips import by_strips, skip, split_rows
from testtime.randomness import Draws
from testtime.threads import count_cpus

# fraction of the contrast that remains
CONTRAST = {"cifar": (0.75, 0.5, 0.4, 0.3, 0.15), "imagenet": (0.4, 0.3, 0.2, 0.1, 0.05)}
# (length and smoothness of the displacement, range of the affine map's points), as fractions of the image's size
ELASTIC = {
    "cifar": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "imagenet": ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
}
# Ratio of that size to the short side: the published code uses 244 for images of 224.
_ELASTIC_SIZE = {"cifar": 1.0, "imagenet": 244 / 224}
# size in between, as a fraction of the original
PIXELATE = {"cifar": (0.95, 0.9, 0.85, 0.75, 0.65), "imagenet": (0.6, 0.5, 0.4, 0.3, 0.25)}
_GRID_COPIES = 4  # float64 values per pixel while a grid is computed
# quality
JPEG = {"cifar": (80, 65, 58, 50, 40), "imagenet": (25, 18, 15, 10, 7)}
# (factor, summand) of the HSV saturation
SATURATE = {
    "cifar": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "imagenet": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
}


def contrast(images: Tensor, level: float) -> Tensor:
    """Move every channel towards its mean.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Fraction of the distance to the mean that remains.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    # Float64: sums of integers are exact in any order.
    mean = images.mean((2, 3), keepdim=True, dtype=torch.float64).to(torch.float32)
    return by_strips(images.shape, images.device, lambda rows: (images[:, :, rows] - mean) * level + mean)


def elastic_sizes(level: tuple[float, float, float], scale: str, side: int) -> tuple[float, float, float]:
    """Convert an elastic level to pixels, for images with a short side of `side`."""
    size = side * _ELASTIC_SIZE[scale]
    return level[0] * size, level[1] * size, level[2] * size


def elastic_transform(images: Tensor, level: tuple[float, float, float], draws: Draws) -> Tensor:
    """Apply a random affine map, then a smooth random displacement field.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Length and smoothness of the displacement, and range of the affine map's three points, in pixels.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    length, sigma, reach = level
    grid = _shear_grid(draws.purpose("points"), reach, images)
    images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=True)
    if length == 0:
        return images
    _fill_ripple_grid(grid, draws.purpose("field"), length, sigma)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def _shear_grid(draws: Draws, reach: float, images: Tensor) -> Tensor:
    """Return the `grid_sample` grid of the affine map, `(N, H, W, 2)`.

    Images are reflected at the centres of the outermost pixels.
    """
    count, _, height, width = images.shape
    grid = torch.empty((count, height, width, 2), dtype=images.dtype, device=images.device)
    for rows in split_rows(height, _GRID_COPIES * count * width, images.device):
        across, down = _affine_grid(draws, reach, height, width, rows)
        grid[:, rows, :, 0] = across * (2 / max(width - 1, 1)) - 1
        grid[:, rows, :, 1] = down * (2 / max(height - 1, 1)) - 1
    return grid


def _fill_ripple_grid(grid: Tensor, draws: Draws, length: float, sigma: float) -> None:
    """Write the `grid_sample` grid of the displacement field to `grid`.

    Images are reflected at the outer borders of the outermost pixels.
    """
    count, height, width, _ = grid.shape
    device = grid.device
    strips = split_rows(height, _GRID_COPIES * count * width, device)
    positions = torch.arange(width, device=device), torch.arange(height, device=device)[:, None]
    for axis, (position, size) in enumerate(zip(positions, (width, height), strict=True)):
        field = torch.empty((count, height, width), dtype=torch.int32, device=device)
        for rows in strips:
            stream = skip(draws, (axis * height + rows.start) * width)
            field[:, rows] = stream.integers(1 << 16, rows.stop - rows.start, width).to(torch.int32)
        smoothed = smooth(field, sigma, 3, "reflect")
        for rows in strips:
            # Integers, so that smoothing is exact; (field + 1/2) / 2¹⁵ - 1 is uniform in ±1.
            moves = ((smoothed[:, rows] + 0.5) * 2**-15 - 1) * length  # (N, rows, W)
            read = moves + (position[rows] if axis else position)
            grid[:, rows, :, axis] = (read * 2 + 1) / size - 1


def _affine_grid(
    draws: Draws, reach: float, height: int, width: int, rows: slice | None = None
) -> tuple[Tensor, Tensor]:
    """Return the source columns and rows of each pixel under the affine map, float64 `(N, H, W)` each.

    Args:
        draws: One stream per image, keys `(N,)`.
        reach: Maximum displacement of the three points.
        height: Height of the images.
        width: Width of the images.
        rows: Rows of the result; None: all.
    """
    side = min(height, width) // 3
    middle_x, middle_y = width // 2, height // 2
    points = torch.tensor(
        [[middle_x + side, middle_y + side], [middle_x + side, middle_y - side], [middle_x - side, middle_y - side]],
        dtype=torch.float64,
        device=draws.keys.device,
    )
    moved = points + (draws.uniform(3, 2).to(torch.float64) * 2 - 1) * reach  # (N, 3, 2)
    # The points form a right angle with its vertex at the second, so the map's columns are differences along its legs.
    legs = max(2 * side, 1)
    right = (moved[:, 1] - moved[:, 2]) / legs  # image of the unit vector to the right, (N, 2)
    below = (moved[:, 0] - moved[:, 1]) / legs  # image of the unit vector down, (N, 2)
    determinant = right[:, 0] * below[:, 1] - right[:, 1] * below[:, 0]
    determinant = torch.where(determinant.abs() < 1e-6, torch.full_like(determinant, 1e-6), determinant)
    down = torch.arange(height, device=points.device)[slice(None) if rows is None else rows]
    x = (torch.arange(width, device=points.device) - moved[:, 1, 0, None])[:, None, :]  # (N, 1, W)
    y = (down - moved[:, 1, 1, None])[:, :, None]  # (N, rows, 1)
    a, b, c, d = (entry[:, None, None] for entry in (below[:, 1], -below[:, 0], -right[:, 1], right[:, 0]))
    determinant = determinant[:, None, None]
    across = (a * x + b * y) / determinant + points[1, 0]
    down = (c * x + d * y) / determinant + points[1, 1]
    # OpenCV's warp reads at multiples of 1/32 pixel.
    return (across * 32 + 0.5).floor_() / 32, (down * 32 + 0.5).floor_() / 32


def pixelate(images: Tensor, level: float) -> Tensor:
    """Scale an image down and back up with box filters, rounding to 8 bits after each axis as Pillow does.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Size in between, as a fraction of the original.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    height, width = images.shape[-2:]
    rows, columns = max(1, int(height * level)), max(1, int(width * level))
    device = images.device
    images = box_filter(images, -1, columns).add_(0.5).floor_()
    images = box_filter(images, -2, rows).add_(0.5).floor_()
    # When upscaling, the box contains one pixel: the nearest.
    down, across = (_nearest(size, to).to(device) for size, to in ((rows, height), (columns, width)))
    return images.index_select(2, down).index_select(3, across)


def _nearest(size: int, to: int) -> Tensor:
    """Return the index of the nearest of `size` pixels for each of `to` pixels, int64 `(to,)`."""
    positions, weights = box_taps(size, to)
    return positions.gather(1, weights.argmax(1, keepdim=True)).squeeze(1)


# For small images, Pillow holds the GIL most of the time, so threads do not help.
_THREADED_VALUES = 1 << 14


@functools.cache
def _threads() -> ThreadPoolExecutor:
    count = count_cpus()
    return ThreadPoolExecutor(max(1, min(16, count)), thread_name_prefix="jpeg")


with contextlib.suppress(AttributeError):  # not on Windows
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of the threads


def _jpeg_block(pictures: np.ndarray, quality: int) -> None:
    """Compress and decompress a block of pictures in place, `(n, H, W)` or `(n, H, W, 3)` uint8."""
    for picture in pictures:
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG", quality=quality)
        with Image.open(buffer) as expanded:
            picture[...] = np.asarray(expanded)


def jpeg_compression(images: Tensor, level: int) -> Tensor:
    """Compress to JPEG and decompress, with Pillow on the CPU, in threads if the images are large.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Quality.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    pictures = images.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()  # (N, H, W, C)
    if not len(pictures):
        return images
    view = pictures[..., 0] if pictures.shape[-1] == 1 else pictures
    if view[0].size < _THREADED_VALUES:
        _jpeg_block(view, level)
    else:
        block = max(1, math.ceil(len(view) / 32))
        jobs = [_threads().submit(_jpeg_block, view[at : at + block], level) for at in range(0, len(view), block)]
        for job in jobs:
            job.result()
    return torch.from_numpy(pictures).to(images.device).permute(0, 3, 1, 2).to(torch.float32)


def saturate(images: Tensor, level: tuple[float, float]) -> Tensor:
    """Change the HSV saturation at constant hue and value; images with one channel have none and are unchanged.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Factor and summand of the saturation, which is clipped to [0, 1].

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    if images.shape[1] == 1:
        return images
    factor, add = level
    red = torch.tensor([0, 1, 1], dtype=images.dtype, device=images.device).view(1, 3, 1, 1)

    def change(rows: slice) -> Tensor:
        part = images[:, :, rows]
        value, low = part.amax(1, keepdim=True), part.amin(1, keepdim=True)
        spread = value - low
        saturation = (spread / value.clamp(min=1) * factor + add).clamp_(0, 1)
        # Distance of each channel from the largest, relative to the smallest's; gray pixels have the hue of red.
        distance = torch.where(spread > 0, (value - part) / spread.clamp(min=1), red)
        return value - value * saturation * distance

    return by_strips(images.shape, images.device, change)
