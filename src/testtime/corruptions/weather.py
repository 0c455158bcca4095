"""The four weather corruptions: snow, frost, fog and brightness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from testtime.corruptions.blur import clipped_zoom, motion_blur
from testtime.corruptions.frost import cut_textures, enlarged_size
from testtime.corruptions.strips import by_strips, draw_rows, split_rows
from testtime.randomness import GOLDEN, Draws

# (mean, deviation, zoom, threshold) of the flakes, (radius, deviation) of their motion, weight of the original image
SNOW = {
    "cifar": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "imagenet": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
}
# (weight of the image, weight of the frost)
FROST = {
    "cifar": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "imagenet": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
}
# (strength, decay of the fractal)
FOG = {
    "cifar": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "imagenet": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
}
# added to the HSV value
BRIGHTNESS = {"cifar": (0.05, 0.1, 0.15, 0.2, 0.3), "imagenet": (0.1, 0.2, 0.3, 0.4, 0.5)}


def snow(images: Tensor, level: tuple[float, float, float, float, int, float, float], draws: Draws) -> Tensor:
    """Whiten an image and add motion-blurred flakes, once as drawn and once rotated by 180°.

    Args:
        images: Float pixels, integers from 0 to 255, `(N, C, H, W)`.
        level: Mean, deviation, zoom and threshold of the flakes, radius and deviation of their motion, and the weight
            of the image that is not whitened.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    mean, deviation, zoom, threshold, radius, sigma, share = level
    count, _, height, width = images.shape
    plane, device = (count, 1, height, width), images.device
    flakes = by_strips(
        plane, device, lambda rows: draw_rows("normal", draws.purpose("flakes"), plane[1:], rows) * deviation + mean
    )

    def choose(rows: slice) -> Tensor:
        zoomed = clipped_zoom(flakes, zoom, rows)
        return (zoomed.masked_fill(zoomed < threshold, 0).clamp_(0, 1) * 255).floor_()

    angles = draws.purpose("wind").uniform() * 90 - 135
    layer = motion_blur(by_strips(plane, device, choose), radius, sigma, angles)

    def fall(rows: slice) -> Tensor:
        part = images[:, :, rows]
        whitened = torch.maximum(part, gray(part) * 1.5 + 127.5)
        other = layer[:, :, height - rows.stop : height - rows.start].flip(-2, -1)
        return part * share + whitened * (1 - share) + layer[:, :, rows] + other

    return by_strips(images.shape, device, fall)


def gray(images: Tensor) -> Tensor:
    """Convert images to luma (ITU-R BT.601), `(N, 3, H, W)` or `(N, 1, H, W)` → `(N, 1, H, W)`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (red * 0.299 + green * 0.587 + blue * 0.114).unsqueeze(1)


def frost(images: Tensor, level: tuple[float, float], draws: Draws, textures: Sequence[Tensor]) -> Tensor:
    """Add a random crop of one of the frost textures, enlarged if an image does not fit into it.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Weight of the image and of the frost.
        draws: One stream per image, keys `(N,)`.
        textures: uint8 `(3, h, w)` each, on the images' device.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    count, channels, height, width = images.shape
    device = images.device
    weight, add = level
    shapes = [enlarged_size(texture, (height, width)) for texture in textures]
    sizes = torch.tensor(shapes, dtype=torch.int64, device=device)  # (5, 2)
    which = draws.purpose("texture").integers(len(textures))
    top = draws.purpose("top").integers(sizes[which, 0] - height)
    left = draws.purpose("left").integers(sizes[which, 1] - width)
    cuts = torch.empty((count, 3, height, width), dtype=torch.uint8, device=device)
    for number, (texture, shape) in enumerate(zip(textures, shapes, strict=True)):
        chosen = (which == number).nonzero().flatten()
        if len(chosen):
            cuts[chosen] = cut_textures(texture, shape, top[chosen], left[chosen], (height, width))

    def cover(rows: slice) -> Tensor:
        cut = cuts[:, :, rows].to(torch.float32)
        return images[:, :, rows] * weight + (gray(cut) if channels == 1 else cut) * add

    return by_strips(images.shape, device, cover)


# Clouds are scaled by the extremes of their whole square, as published, unless that has over a million pixels and this
# many times those of the image: an elongated image would otherwise cost as much as the square over its long side.
_SQUARE_RATIO, _SQUARE_PIXELS = 16, 1 << 20


def plasma(draws: Draws, size: int, decay: float, shape: tuple[int, int] | None = None) -> Tensor:
    """Generate clouds with the diamond-square fractal on a torus.

    Args:
        draws: One stream per map, keys `(N,)`.
        size: Side of the maps, a power of two.
        decay: The amplitude is divided by this at each halving of the step; larger is smoother.
        shape: Height and width of the upper left part to return; None: the whole map.

    Returns:
        Float32 `(N, *shape)`; the whole map, or an elongated part by itself, is scaled to [0, 1].
    """
    height, width = shape or (size, size)
    whole = size * size <= max(_SQUARE_RATIO * height * width, _SQUARE_PIXELS)
    rows, columns = (size, size) if whole else (height, width)
    count, device = len(draws.keys), draws.keys.device
    field = torch.empty((count, height, width), dtype=torch.float32, device=device)
    low = torch.full((count, 1, 1), torch.inf, dtype=torch.float32, device=device)
    high = -low
    for strip in split_rows(rows, count * columns, device):
        part = _plasma_window(draws, size, decay, (strip.start, strip.stop), (0, columns))
        low, high = torch.minimum(low, part.amin((1, 2), True)), torch.maximum(high, part.amax((1, 2), True))
        inside = part[:, : max(0, height - strip.start), :width]
        field[:, strip.start : strip.start + inside.shape[1]] = inside
    return field.sub_(low).div_(high - low)


def _plasma_window(draws: Draws, size: int, decay: float, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Compute the raw fractal in a window of the torus, at each level only the points that the window depends on.

    Args:
        draws: One stream per map, keys `(N,)`.
        size: Side of the torus, a power of two.
        decay: As in `plasma`.
        rows: First row and the one after the last.
        columns: Likewise.

    Returns:
        Float32 `(N, rows, columns)`.
    """
    # A point depends on the points of the next coarser grid from half its index - 1 to half its index + 1.
    windows = [(rows, columns)]
    for _ in range(size.bit_length() - 1):
        down, across = ((first // 2 - 1, (last - 1) // 2 + 2) for first, last in windows[-1])
        windows.append((down, across))
    (top, bottom), (left, right) = windows.pop()
    field = torch.zeros((len(draws.keys), bottom - top, right - left), dtype=torch.float32, device=draws.keys.device)
    half, amplitude = size // 2, 100.0
    while windows:
        # The finer grid starts at (2·top + 1, 2·left + 1): squares at even positions, corners at odd ones.
        height, width = 2 * field.shape[1] - 3, 2 * field.shape[2] - 3
        noise = _noise_at(draws, size, (2 * top + 1, height), (2 * left + 1, width), half)
        noise *= amplitude * amplitude  # the published code applies the amplitude twice
        pairs = field[:, :-1] + field[:, 1:]  # vertical neighbours
        squares = (pairs[..., :-1] + pairs[..., 1:]) / 4 + noise[:, ::2, ::2]
        across = field[:, 1:-1, :-1] + field[:, 1:-1, 1:]
        finer = torch.empty_like(noise)
        finer[:, ::2, ::2] = squares
        finer[:, 1::2, ::2] = (squares[:, 1:] + squares[:, :-1] + across) / 4 + noise[:, 1::2, ::2]
        finer[:, ::2, 1::2] = (squares[..., 1:] + squares[..., :-1] + pairs[..., 1:-1]) / 4 + noise[:, ::2, 1::2]
        finer[:, 1::2, 1::2] = field[:, 1:-1, 1:-1]
        first, before = 2 * top + 1, 2 * left + 1
        (top, bottom), (left, right) = windows.pop()
        field = finer[:, top - first : bottom - first, left - before : right - before]
        half, amplitude = half // 2, amplitude / decay
    return field


def _noise_at(draws: Draws, size: int, rows: tuple[int, int], columns: tuple[int, int], step: int) -> Tensor:
    """Draw uniform numbers in ±1 on a grid of the torus, a function of the point, float32 `(N, rows, columns)`.

    Args:
        draws: One stream per map, keys `(N,)`.
        size: Side of the torus.
        rows: First row of the grid in steps, and number of rows.
        columns: Likewise.
        step: Distance between the points of the grid.
    """
    device = draws.keys.device
    down = (torch.arange(rows[0], sum(rows), device=device) * step) % size
    across = (torch.arange(columns[0], sum(columns), device=device) * step) % size
    points = down[:, None] * size + across
    return Draws(draws.keys[:, None, None] + points * GOLDEN).uniform(1).squeeze(-1) * 2 - 1


def fog(images: Tensor, level: tuple[float, float], draws: Draws) -> Tensor:
    """Add clouds to an image and scale it back to its original maximum.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Strength of the fog and decay of its fractal.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    strength, decay = level
    height, width = images.shape[-2:]
    size = 1 << max(1, (max(height, width) - 1).bit_length())
    clouds = plasma(draws, size, decay, (height, width))[:, None]
    brightest = images.amax((1, 2, 3), keepdim=True)
    share = brightest / (brightest + strength * 255)

    def cover(rows: slice) -> Tensor:
        return (images[:, :, rows] + clouds[:, :, rows] * (strength * 255)) * share

    return by_strips(images.shape, images.device, cover)


def brightness(images: Tensor, level: float) -> Tensor:
    """Raise the HSV value at constant hue and saturation, which scales a pixel's channels alike.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Added to the value, as a fraction of full white.

    Returns:
        Float pixels `(N, C, H, W)`.
    """

    def raise_value(rows: slice) -> Tensor:
        part = images[:, :, rows]
        value = part.amax(1, keepdim=True)
        raised = (value + level * 255).clamp_(max=255)
        return torch.where(value > 0, part * (raised / value.clamp(min=1)), raised)

    return by_strips(images.shape, images.device, raise_value)
