"""The blurs: defocus, glass, motion and zoom, and the extra Gaussian one."""

from __future__ import annotations

import functools
import itertools
import math
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from testtime.corruptions.filters import Array, gaussian_weights, mirror_index, round_weights, smooth
from testtime.corruptions.strips import by_strips, skip, split_rows
from testtime.randomness import Draws

# (radius of the disk, standard deviation of the blur of its edge)
DEFOCUS = {
    "cifar": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "imagenet": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
}
# (standard deviation of the blur before and after, range of the shuffle, number of shuffles)
GLASS = {
    "cifar": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "imagenet": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
}
# (radius, standard deviation)
MOTION = {
    "cifar": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "imagenet": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
}
# (stop, step) of the zoom factors, which start at 1; by rounding, as in the published code, 1.06 is included.
ZOOM = {
    "cifar": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "imagenet": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
}
# standard deviation
GAUSSIAN = {"cifar": (0.4, 0.6, 0.7, 0.8, 1), "imagenet": (1, 2, 3, 4, 6)}

# Up to this many pixels, zoom blur is one matrix product; its matrix has the square of that many elements.
_DENSE_PIXELS = 1600


def disk(radius: float, softness: float) -> Array:
    """Return a disk kernel with a blurred edge, sum about 1, `(K, K)` with K odd; empty margins are cropped."""
    reach = 8 if radius <= 8 else int(radius)
    line = np.arange(-reach, reach + 1)
    kernel = (line[:, None] ** 2 + line[None, :] ** 2 <= radius**2).astype(np.float64)
    kernel /= kernel.sum()
    soften = gaussian_weights(softness, 1 if radius <= 8 else 2)
    pad = len(soften) // 2
    for axis in (0, 1):
        margins = [(0, 0), (0, 0)]
        margins[axis] = (pad, pad)
        padded = np.pad(kernel, margins, mode="reflect")
        length = kernel.shape[axis]
        kernel = sum(
            weight * np.take(padded, range(shift, shift + length), axis) for shift, weight in enumerate(soften)
        ) + np.zeros_like(kernel)
    used = np.flatnonzero(kernel.sum(0) > 2**-17)
    margin = int(used[0]) if len(used) else reach
    return kernel[margin : len(kernel) - margin, margin : len(kernel) - margin]


def defocus_blur(images: Tensor, level: tuple[float, float]) -> Tensor:
    """Blur with a disk, as a lens out of focus does.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Radius of the disk and blur of its edge.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    # The sum may slightly exceed 1, where the disk is cropped, hence one bit less.
    kernel = disk(*level)
    kernel = round_weights(kernel.reshape(-1), bits=15).reshape(kernel.shape)
    pad = len(kernel) // 2
    height, width = images.shape[-2:]
    down, across = (torch.from_numpy(mirror_index(size, pad)).to(images.device) for size in (height, width))
    taps = np.argwhere(kernel > 0)
    weight = torch.from_numpy(kernel).to(images.device, images.dtype)[None, None]

    def blur_rows(rows: slice) -> Tensor:
        padded = images[..., down[rows.start : rows.stop + 2 * pad], :][..., across]
        if len(taps) > 64:  # a convolution is faster than adding shifted images
            return F.conv2d(padded.flatten(0, 1)[:, None], weight).view(
                *images.shape[:2], rows.stop - rows.start, width
            )
        result = torch.zeros_like(images[..., rows, :])
        for row, column in taps.tolist():
            view = padded[..., row : row + result.shape[-2], column : column + width]
            result.add_(view, alpha=float(kernel[row, column]))
        return result

    return by_strips(images.shape, images.device, blur_rows)


def shuffle_pixels(images: Tensor, reach: int, draws: Draws) -> Tensor:
    """One pass of the glass blur's shuffle: from the last pixel to the first, each takes a random neighbour's value.

    The published code intends to swap but copies, so the pass is a pointer from every pixel to its source: the source's
    old value if it comes later in the pass, else its new one. Pointer doubling resolves the whole pass in a few batched
    steps.

    Args:
        images: `(N, C, H, W)`.
        reach: Neighbours are at offsets from -reach to reach - 1 on both axes; the pass skips the first reach + 1 rows
            and columns, and the last reach - 1.
        draws: One stream per image, keys `(N,)`.

    Returns:
        The shuffled images `(N, C, H, W)`.
    """
    count, channels, height, width = images.shape
    rows, columns = height - 2 * reach, width - 2 * reach
    if rows < 1 or columns < 1:
        return images
    result = images.clone()
    # Last strip first, in the order of the pass: rows below a strip have their new values, rows above the old ones.
    for strip in reversed(split_rows(rows, count * channels * width, images.device)):
        top, bottom = strip.start + reach + 1, strip.stop + reach + 1
        choice = skip(draws, strip.start * columns).integers(4 * reach * reach, bottom - top, columns)
        source = _trace_walk(choice, reach, width)[:, reach * width : (reach + bottom - top) * width]
        flat = result[:, :, top - reach : bottom + reach - 1].reshape(count, channels, -1)
        taken = flat.gather(2, source.unsqueeze(1).expand(-1, channels, -1))
        result[:, :, top:bottom] = taken.view(count, channels, -1, width)
    return result


def _trace_walk(choice: Tensor, reach: int, width: int) -> Tensor:
    """Return the final source of each pixel of a strip, as indices into the strip and the rows that it may read.

    Args:
        choice: The draw of each shuffled pixel, both offsets in one integer, `(N, rows, columns)`.
        reach: As in `shuffle_pixels`.
        width: Width of the image.

    Returns:
        int64 `(N, (reach + rows + reach - 1) · width)`.
    """
    count, rows, columns = choice.shape
    height = rows + 2 * reach - 1
    pixels = height * width
    own = torch.arange(pixels, device=choice.device)
    walked = own.view(height, width)[reach : reach + rows, reach + 1 : reach + 1 + columns]
    offset = (choice // (2 * reach) - reach) * width + (choice % (2 * reach) - reach)
    source = own.view(height, width).repeat(count, 1, 1)
    source[:, reach : reach + rows, reach + 1 : reach + 1 + columns] = walked + offset
    source = source.view(count, pixels)
    if reach == 1:  # every neighbour is read before it changes
        return source
    # A pointer to a later pixel refers to its new value and is followed; one to an earlier pixel to its old value.
    done = torch.ones(pixels, dtype=torch.bool, device=choice.device)
    done[walked.flatten()] = False
    old = (source <= own) | done[source]
    for _ in range(math.ceil(math.log2(pixels))):
        if bool(old.all()):
            break
        follow = torch.where(old, own, source)
        source, old = (
            torch.where(old, source, source.gather(1, follow)),
            old | old.gather(1, follow),
        )
    return source


def glass_blur(images: Tensor, level: tuple[float, int, int], draws: Draws) -> Tensor:
    """Blur, shuffle pixels locally, and blur again, as frosted glass does.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Standard deviation of the blur, range of the shuffle, number of shuffles.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    sigma, reach, rounds = level
    shuffled = smooth(images, sigma, 4, "edge").add_(2**-10).floor_()  # 8-bit between the stages, as published
    shuffled = shuffled.to(torch.float32)
    for number in range(rounds):
        shuffled = shuffle_pixels(shuffled, reach, draws.fold(number))
    return smooth(shuffled, sigma, 4, "edge")


def motion_blur(images: Tensor, radius: int, sigma: float, angles: Tensor) -> Tensor:
    """Blur along a line on one side of each pixel, as ImageMagick's motion blur does.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        radius: The line has 2·radius + 1 pixels.
        sigma: Standard deviation of the half Gaussian along it.
        angles: Direction of each image in degrees, `(N,)`, 0 to the right and 90 down.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    taps = 2 * radius + 1
    half = gaussian_weights(sigma, taps - 1)[taps - 1 :]
    weights = round_weights(half / half.sum())
    height, width = images.shape[-2:]
    # Sorted by angle, images with the same offset are adjacent: each run is one addition of a slice.
    order = torch.argsort(angles, stable=True)
    radians = angles[order].to(torch.float64).cpu().numpy() * (math.pi / 180)
    steps = np.arange(taps)[:, None]
    across = np.ceil(steps * np.cos(radians) - 0.5).astype(int)  # (taps, N)
    down = np.ceil(steps * np.sin(radians) - 0.5).astype(int)
    left, right = max(0, -int(across.min())), max(0, int(across.max()))
    above, below = max(0, -int(down.min())), max(0, int(down.max()))
    ordered = images[order]

    def blur_rows(rows: slice) -> Tensor:
        window = ordered[:, :, max(0, rows.start - above) : rows.stop + below]
        over, under = max(0, above - rows.start), max(0, rows.stop + below - height)
        padded = F.pad(window, (left, right, over, under), mode="replicate")
        result = torch.zeros_like(ordered[:, :, rows])
        for step in range(taps):
            changes = np.flatnonzero((np.diff(across[step]) != 0) | (np.diff(down[step]) != 0)) + 1
            bounds = [0, *changes.tolist(), len(radians)]
            for start, stop in itertools.pairwise(bounds):
                row, column = above + int(down[step, start]), left + int(across[step, start])
                view = padded[start:stop, :, row : row + result.shape[2], column : column + width]
                result[start:stop].add_(view, alpha=float(weights[step]))
        return result

    result = by_strips(images.shape, images.device, blur_rows)
    return torch.empty_like(result).index_copy_(0, order, result)


def blur_motion(images: Tensor, level: tuple[int, float], draws: Draws) -> Tensor:
    """Apply motion blur in a random direction within 45° of the horizontal.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Radius and standard deviation.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    return motion_blur(images, *level, draws.uniform() * 90 - 45)


def zoom_taps(size: int, factor: float) -> tuple[npt.NDArray[np.int64], Array]:
    """Return the first of the two source pixels of each pixel of a line zoomed at its centre, and the second's weight.

    The published zoom crops the centre, resizes it with aligned corners, and trims.

    Returns:
        Two arrays of `(size,)`: indices (at most size - 2, or 0) and weights in [0, 1].
    """
    middle = math.ceil(size / factor)
    first = (size - middle) // 2
    stretched = round(middle * factor)
    trim = (stretched - size) // 2
    position = (np.arange(size) + trim) * ((middle - 1) / max(stretched - 1, 1))
    whole = np.clip(np.floor(position).astype(np.int64), 0, max(middle - 2, 0))
    return first + whole, np.clip(position - whole, 0, 1).astype(np.float64)


def zoom_matrix(size: int, factor: float) -> Array:
    """Return the zoom of a line of `size` pixels at its centre as a matrix, `(size, size)`."""
    whole, share = zoom_taps(size, factor)
    matrix = np.zeros((size, size))
    rows = np.arange(size)
    np.add.at(matrix, (rows, whole), 1 - share)
    np.add.at(matrix, (rows, np.minimum(whole + 1, size - 1)), share)
    return matrix


def clipped_zoom(images: Tensor, factor: float, rows: slice | None = None) -> Tensor:
    """Zoom into the centre of images by a factor of at least 1, bilinearly, at the same size.

    Args:
        images: `(..., H, W)`.
        factor: The factor.
        rows: Rows of the zoomed images to compute; None: all.

    Returns:
        `(..., rows, W)`.
    """
    rows = slice(None) if rows is None else rows
    if factor == 1:
        return images[..., rows, :]
    for axis, part in ((-2, rows), (-1, slice(None))):
        size = images.shape[axis]
        whole, share = zoom_taps(size, factor)
        near = torch.from_numpy(whole[part]).to(images.device)
        far = (near + 1).clamp(max=size - 1)
        weight = torch.from_numpy(share[part]).to(images.device, images.dtype)
        if axis == -2:
            weight = weight[:, None]
        # Separate products and sums: a fused multiply-add rounds differently in the tail of a vector loop.
        images = images.index_select(axis, near) * (1 - weight) + images.index_select(axis, far) * weight
    return images


def zoom_factors(level: tuple[float, float]) -> list[float]:
    """Return the factors of a zoom blur, from 1 upwards."""
    stop, step = level
    return cast(list[float], np.arange(1, stop, step).tolist())


@functools.lru_cache(maxsize=16)
def _zoom_operator(height: int, width: int, level: tuple[float, float]) -> Tensor:
    """Return zoom blur as a matrix to multiply flattened images with, float64 `(H·W, H·W)`."""
    factors = zoom_factors(level)
    total = np.eye(height * width)
    for factor in factors:
        rows, columns = zoom_matrix(height, factor), zoom_matrix(width, factor)
        total += np.kron(rows, columns)
    weights = round_weights(total / (len(factors) + 1))
    return torch.from_numpy(weights.T.copy())


def zoom_blur(images: Tensor, level: tuple[float, float]) -> Tensor:
    """Average an image with zooms into its centre, as a camera moving towards its subject does.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Stop and step of the zoom factors.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    height, width = images.shape[-2:]
    if height * width <= _DENSE_PIXELS:
        operator = _zoom_operator(height, width, level).to(images.device)
        # Float64: torch may be set to multiply float32 matrices at lower precision.
        blurred = images.reshape(-1, height * width).to(torch.float64) @ operator
        return blurred.view(images.shape).to(images.dtype)
    factors = zoom_factors(level)

    def blur_rows(rows: slice) -> Tensor:
        total = images[:, :, rows].clone()
        for factor in factors:
            total += clipped_zoom(images, factor, rows)
        return total / (len(factors) + 1)

    return by_strips(images.shape, images.device, blur_rows)


def gaussian_blur(images: Tensor, level: float) -> Tensor:
    """Blur with a Gaussian, truncated at four standard deviations.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Standard deviation in pixels.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    return smooth(images, level, 4, "edge")
