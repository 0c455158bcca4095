"""The four blurs: defocus, glass, motion and zoom, and the filters the other corruptions share with them.

Where a blur is a weighted mean of 8-bit pixels, its weights are rounded to multiples of 2⁻¹⁶ that add up to one. Sums
are then exact in floating point whatever their order, so an image comes out the same, bit for bit, alone or in a batch,
on the CPU or on a GPU.
"""

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

from testtime.randomness import Draws

Array = npt.NDArray[np.float64]

# (radius of the disk, standard deviation that softens its edge)
DEFOCUS = {
    "cifar": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "imagenet": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
}
# (standard deviation of the blur before and after, reach of the shuffle, its rounds)
GLASS = {
    "cifar": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "imagenet": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
}
# (radius, standard deviation)
MOTION = {
    "cifar": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "imagenet": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
}
# (stop, step) of the zoom factors, which start at 1. The published stops carry a rounding surplus: 1.06 is reached.
ZOOM = {
    "cifar": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "imagenet": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
}

# Zoom blur is one matrix product for images up to this many pixels; its matrix has the square of that.
_DENSE_PIXELS = 1600


def round_weights(weights: Array, bits: int = 16) -> Array:
    """Weights rounded to multiples of 2⁻ᵇⁱᵗˢ along the last axis so that their sum is rounded only once.

    Running sums are rounded and differences taken: many small equal weights would else all err to the same side.

    Args:
        weights: Non-negative, `(..., K)`.
        bits: Fraction bits.
    """
    return np.diff(np.round(np.cumsum(weights, -1) * 2.0**bits), axis=-1, prepend=0) / 2.0**bits


def gaussian_weights(sigma: float, radius: int) -> Array:
    """A gaussian at the whole numbers from -radius to radius, adding up to one, `(2·radius + 1,)`."""
    if sigma <= 0:
        return np.ones(1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return weights / weights.sum()


@functools.lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, truncate: float, border: str) -> Tensor:
    """The gaussian filter of a line of `size` pixels as a matrix.

    Args:
        size: Pixels in the line.
        sigma: Standard deviation in pixels.
        truncate: The kernel ends at this many standard deviations.
        border: "edge" repeats the outermost pixel, "reflect" mirrors the line with its outermost pixel.

    Returns:
        Float64 `(size, size)` with rows in multiples of 2⁻¹⁸: two passes over 16-bit numbers stay exact.
    """
    radius = int(truncate * sigma + 0.5)
    weights = gaussian_weights(sigma, radius)
    matrix = np.zeros((size, size))
    rows = np.arange(size)
    for offset, weight in zip(range(-radius, radius + 1), weights, strict=True):
        columns = rows + offset
        if border == "edge":
            columns = columns.clip(0, size - 1)
        else:
            columns = columns % (2 * size)
            columns = np.minimum(columns, 2 * size - 1 - columns)
        np.add.at(matrix, (rows, columns), weight)
    return torch.from_numpy(round_weights(matrix, bits=18))


def smooth(images: Tensor, sigma: float, truncate: float, border: str) -> Tensor:
    """Blur the last two axes of whole-numbered images with a gaussian, exactly, in float64.

    Args:
        images: Whole numbers below 2¹⁶ in size, `(..., H, W)`.
        sigma: Standard deviation in pixels.
        truncate: The kernel ends at this many standard deviations.
        border: "edge" or "reflect", as in `gaussian_matrix`.

    Returns:
        Float64 `(..., H, W)`.
    """
    images = images.to(torch.float64)
    if int(truncate * sigma + 0.5) == 0:
        return images
    height, width = images.shape[-2:]
    rows = gaussian_matrix(height, sigma, truncate, border).to(images.device)
    columns = gaussian_matrix(width, sigma, truncate, border).to(images.device)
    return rows @ (images @ columns.T)


def disk(radius: float, softness: float) -> Array:
    """A disk with a softened edge, adding up to about one, `(K, K)` with K odd; empty margins are cut off."""
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


def _reflect(size: int, pad: int) -> Tensor:
    """Indices of a line padded by its mirror image without its outermost pixel, for any pad, `(size + 2·pad,)`."""
    if size == 1:
        return torch.zeros(1 + 2 * pad, dtype=torch.long)
    index = torch.arange(-pad, size + pad) % (2 * size - 2)
    return torch.minimum(index, 2 * size - 2 - index)


def defocus_blur(images: Tensor, level: tuple[float, float]) -> Tensor:
    """Blur with a softened disk, as a lens out of focus does.

    Args:
        images: Float pixels, whole numbers 0 to 255, `(N, C, H, W)`.
        level: Radius of the disk and softness of its edge.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    # Its sum may be a little over one, where the softened disk meets the end of its grid, hence one bit less.
    kernel = disk(*level)
    kernel = round_weights(kernel.reshape(-1), bits=15).reshape(kernel.shape)
    pad = len(kernel) // 2
    height, width = images.shape[-2:]
    padded = images[..., _reflect(height, pad).to(images.device), :][..., _reflect(width, pad).to(images.device)]
    taps = np.argwhere(kernel > 0)
    if len(taps) > 64:  # a real convolution wins over adding shifted images
        weight = torch.from_numpy(kernel).to(padded.device, padded.dtype)[None, None]
        flat = padded.reshape(-1, 1, *padded.shape[-2:])
        return F.conv2d(flat, weight).view(images.shape)
    result = torch.zeros_like(images)
    for row, column in taps.tolist():
        view = padded[..., row : row + height, column : column + width]
        result.add_(view, alpha=float(kernel[row, column]))
    return result


def shuffle_pixels(images: Tensor, reach: int, draws: Draws) -> Tensor:
    """One round of the glass blur's walk: from the last pixel to the first, each takes a random neighbour's value.

    The published program means to swap but copies, so the walk is a pointer from every pixel to the one it reads: to
    that pixel's old value if the walk has yet to come there, else to its new one. Following pointers twice as far
    each time resolves the whole walk in a few batched steps.

    Args:
        images: `(N, C, H, W)`.
        reach: Neighbours are at offsets from -reach to reach - 1 on both axes; the walk leaves out the first
            reach + 1 rows and columns, and the last reach - 1.
        draws: One stream for each image, keys `(N,)`.

    Returns:
        The shuffled images `(N, C, H, W)`.
    """
    count, channels, height, width = images.shape
    rows, columns = height - 2 * reach, width - 2 * reach
    if rows < 1 or columns < 1:
        return images
    device = images.device
    pixels = height * width
    walked = torch.arange(pixels, device=device).view(height, width)[
        reach + 1 : height - reach + 1, reach + 1 : width - reach + 1
    ]
    choice = draws.integers(4 * reach * reach, rows, columns)  # both offsets from one number
    offset = (choice // (2 * reach) - reach) * width + (choice % (2 * reach) - reach)
    target = walked + offset  # (N, rows, columns)
    source = torch.arange(pixels, device=device).view(height, width).repeat(count, 1, 1)
    source[:, reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = target
    source = source.view(count, pixels)
    if reach > 1:  # with a reach of 1 every neighbour is read before the walk comes to it
        # A pointer to a later pixel means its new value, followed on; to an earlier one its old value, the end.
        done = torch.ones(pixels, dtype=torch.bool, device=device)
        done[walked.flatten()] = False
        old = (source <= torch.arange(pixels, device=device)) | done[source]
        for _ in range(math.ceil(math.log2(pixels))):
            if bool(old.all()):
                break
            follow = torch.where(old, torch.arange(pixels, device=device), source)
            source, old = (
                torch.where(old, source, source.gather(1, follow)),
                old | old.gather(1, follow),
            )
    flat = images.reshape(count, channels, pixels)
    return flat.gather(2, source.unsqueeze(1).expand(-1, channels, -1)).view(images.shape)


def glass_blur(images: Tensor, level: tuple[float, int, int], draws: Draws) -> Tensor:
    """Blur a little, let pixels take their neighbours' places, and blur again: a pane of ribbed glass.

    Args:
        images: Float pixels, whole numbers 0 to 255, `(N, C, H, W)`.
        level: Standard deviation of the blur, reach of the shuffle, its rounds.
        draws: One stream for each image, keys `(N,)`.

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
        images: Float pixels, whole numbers 0 to 255, `(N, C, H, W)`.
        radius: The line has 2·radius + 1 pixels.
        sigma: Standard deviation of the half gaussian along it.
        angles: Direction in degrees for each image, `(N,)`, 0 to the right and 90 down.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    taps = 2 * radius + 1
    half = gaussian_weights(sigma, taps - 1)[taps - 1 :]
    weights = round_weights(half / half.sum())
    height, width = images.shape[-2:]
    # Sorted by angle, images that read the same shifted pixel lie together: each run is one addition of a slice.
    order = torch.argsort(angles, stable=True)
    radians = angles[order].to(torch.float64).cpu().numpy() * (math.pi / 180)
    steps = np.arange(taps)[:, None]
    across = np.ceil(steps * np.cos(radians) - 0.5).astype(int)  # (taps, N)
    down = np.ceil(steps * np.sin(radians) - 0.5).astype(int)
    left, right = max(0, -int(across.min())), max(0, int(across.max()))
    above, below = max(0, -int(down.min())), max(0, int(down.max()))
    padded = F.pad(images[order], (left, right, above, below), mode="replicate")
    result = torch.zeros_like(images)
    for step in range(taps):
        changes = np.flatnonzero((np.diff(across[step]) != 0) | (np.diff(down[step]) != 0)) + 1
        bounds = [0, *changes.tolist(), len(radians)]
        for start, stop in itertools.pairwise(bounds):
            row, column = above + int(down[step, start]), left + int(across[step, start])
            view = padded[start:stop, :, row : row + height, column : column + width]
            result[start:stop].add_(view, alpha=float(weights[step]))
    return torch.empty_like(result).index_copy_(0, order, result)


def blur_motion(images: Tensor, level: tuple[int, float], draws: Draws) -> Tensor:
    """Motion blur in a direction within 45° of the horizontal.

    Args:
        images: Float pixels, whole numbers 0 to 255, `(N, C, H, W)`.
        level: Radius and standard deviation.
        draws: One stream for each image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    return motion_blur(images, *level, draws.uniform() * 90 - 45)


def zoom_taps(size: int, factor: float) -> tuple[npt.NDArray[np.int64], Array]:
    """Where a line of `size` pixels zoomed at its centre reads: the first of two neighbours, and the second's share.

    The published zoom cuts out the middle, stretches it so that the outermost pixels keep their places, and trims.

    Returns:
        Two arrays of `(size,)`: whole positions (at most size - 2, or 0) and shares in 0 to 1.
    """
    middle = math.ceil(size / factor)
    first = (size - middle) // 2
    stretched = round(middle * factor)
    trim = (stretched - size) // 2
    position = (np.arange(size) + trim) * ((middle - 1) / max(stretched - 1, 1))
    whole = np.clip(np.floor(position).astype(np.int64), 0, max(middle - 2, 0))
    return first + whole, np.clip(position - whole, 0, 1).astype(np.float64)


def zoom_matrix(size: int, factor: float) -> Array:
    """The zoom of a line of `size` pixels at its centre as a matrix, `(size, size)`."""
    whole, share = zoom_taps(size, factor)
    matrix = np.zeros((size, size))
    rows = np.arange(size)
    np.add.at(matrix, (rows, whole), 1 - share)
    np.add.at(matrix, (rows, np.minimum(whole + 1, size - 1)), share)
    return matrix


def clipped_zoom(images: Tensor, factor: float) -> Tensor:
    """Zoom into the centre of images by a factor of at least 1, bilinearly, at the same size, `(..., H, W)`."""
    if factor == 1:
        return images
    for axis in (-2, -1):
        size = images.shape[axis]
        whole, share = zoom_taps(size, factor)
        near = torch.from_numpy(whole).to(images.device)
        far = (near + 1).clamp(max=size - 1)
        weight = torch.from_numpy(share).to(images.device, images.dtype)
        if axis == -2:
            weight = weight[:, None]
        # Products and sums apart: a fused multiply-add rounds differently in the tail of a vector loop.
        images = images.index_select(axis, near) * (1 - weight) + images.index_select(axis, far) * weight
    return images


def zoom_factors(level: tuple[float, float]) -> list[float]:
    """The factors of a zoom blur, 1 upwards."""
    stop, step = level
    return cast(list[float], np.arange(1, stop, step).tolist())


@functools.lru_cache(maxsize=16)
def _zoom_operator(height: int, width: int, level: tuple[float, float]) -> Tensor:
    """The whole zoom blur as a matrix that flat images are multiplied with, float32 `(H·W, H·W)`."""
    factors = zoom_factors(level)
    total = np.eye(height * width)
    for factor in factors:
        rows, columns = zoom_matrix(height, factor), zoom_matrix(width, factor)
        total += np.kron(rows, columns)
    weights = round_weights(total / (len(factors) + 1))
    return torch.from_numpy(weights.T.astype(np.float32)).contiguous()


def zoom_blur(images: Tensor, level: tuple[float, float]) -> Tensor:
    """Average an image with its centre-zooms, as a camera that moves towards its subject.

    Args:
        images: Float pixels, whole numbers 0 to 255, `(N, C, H, W)`.
        level: Stop and step of the zoom factors.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    height, width = images.shape[-2:]
    if height * width <= _DENSE_PIXELS:
        operator = _zoom_operator(height, width, level).to(images.device)
        return (images.reshape(-1, height * width) @ operator).view(images.shape)
    factors = zoom_factors(level)
    total = images.clone()
    for factor in factors:
        total += clipped_zoom(images, factor)
    return total / (len(factors) + 1)
