"""The four kinds of weather: snow, frost, fog and brightness."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from testtime.corruptions.blur import clipped_zoom, motion_blur
from testtime.randomness import Draws

# (mean, deviation, zoom, threshold) of the flakes, (radius, deviation) of their motion, share of the original image
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
# (share of the image, share of the frost)
FROST = {
    "cifar": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "imagenet": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
}
# (strength, decay of the fractal)
FOG = {
    "cifar": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "imagenet": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
}
# added to the value of HSV
BRIGHTNESS = {"cifar": (0.05, 0.1, 0.15, 0.2, 0.3), "imagenet": (0.1, 0.2, 0.3, 0.4, 0.5)}


def snow(images: Tensor, level: tuple[float, float, float, float, int, float, float], draws: Draws) -> Tensor:
    """Whiten an image and let flakes fall over it, from both sides.

    Args:
        images: Float pixels, whole numbers 0 to 255, `(N, C, H, W)`.
        level: Mean, deviation, zoom and threshold of the flakes, radius and deviation of their motion, and the share
            of the image that is not whitened.
        draws: One stream for each image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    mean, deviation, zoom, threshold, radius, sigma, share = level
    height, width = images.shape[-2:]
    layer = draws.purpose("flakes").normal(1, height, width) * deviation + mean
    layer = clipped_zoom(layer, zoom)
    layer = layer.masked_fill(layer < threshold, 0).clamp_(0, 1)
    layer = (layer * 255).floor_()
    angles = draws.purpose("wind").uniform() * 90 - 135
    layer = motion_blur(layer, radius, sigma, angles)
    whitened = torch.maximum(images, gray(images) * 1.5 + 127.5)
    return images * share + whitened * (1 - share) + layer + layer.flip(-2, -1)


def gray(images: Tensor) -> Tensor:
    """The luma of colour images (ITU-R BT.601), `(N, 3, H, W)` or `(N, 1, H, W)` → `(N, 1, H, W)`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (red * 0.299 + green * 0.587 + blue * 0.114).unsqueeze(1)


def frost(images: Tensor, level: tuple[float, float], draws: Draws, textures: list[Tensor]) -> Tensor:
    """Add a random cut of one of five frost textures.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Share of the image and share of the frost.
        draws: One stream for each image, keys `(N,)`.
        textures: Five of uint8 `(3, h, w)` on the images' device, each larger than an image.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    height, width = images.shape[-2:]
    device = images.device
    keep, add = level
    sizes = torch.tensor([texture.shape[-2:] for texture in textures], device=device)  # (5, 2)
    lengths = [texture.shape[-2] * texture.shape[-1] for texture in textures]
    begins = torch.tensor([0, *itertools.accumulate(lengths[:-1])], device=device)
    which = draws.purpose("texture").integers(len(textures))
    top = draws.purpose("top").integers(sizes[which, 0] - height)
    left = draws.purpose("left").integers(sizes[which, 1] - width)
    row = (top[:, None] + torch.arange(height, device=device)) * sizes[which, 1][:, None]  # (N, H)
    column = left[:, None] + torch.arange(width, device=device)  # (N, W)
    index = begins[which][:, None, None] + row[:, :, None] + column[:, None, :]
    pixels = torch.cat([texture.flatten(1) for texture in textures], 1)  # (3, all pixels)
    if images.shape[1] == 1:
        pixels = gray(pixels[None, :, None].float())[0, :, 0]  # (1, all pixels)
    cut = pixels[:, index].transpose(0, 1)  # (N, C, H, W)
    return images * keep + cut * add


def plasma(draws: Draws, size: int, decay: float) -> Tensor:
    """Clouds by the diamond-square fractal on a torus.

    Args:
        draws: One stream for each map, keys `(N,)`.
        size: Side of the maps, a power of two.
        decay: The amplitude's divisor at each halving of the step; larger is smoother.

    Returns:
        Float32 `(N, size, size)`, each map reaching from 0 to 1.
    """
    # Every place but the first corner is filled exactly once, so all the noise can be drawn at once.
    noise = draws.uniform(size, size) * 2 - 1
    field = torch.zeros_like(noise)
    step, amplitude = size, 100.0
    while step >= 2:
        half = step // 2
        rough = amplitude * amplitude  # the published program applies the amplitude twice
        corners = field[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        squares = (pairs + pairs.roll(-1, 2)) / 4 + noise[:, half::step, half::step] * rough
        field[:, half::step, half::step] = squares
        beside = corners + corners.roll(-1, 2)
        field[:, ::step, half::step] = (squares + squares.roll(1, 1) + beside) / 4 + noise[
            :, ::step, half::step
        ] * rough
        above = corners + corners.roll(-1, 1)
        field[:, half::step, ::step] = (squares + squares.roll(1, 2) + above) / 4 + noise[:, half::step, ::step] * rough
        step, amplitude = half, amplitude / decay
    field = field - field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True)


def fog(images: Tensor, level: tuple[float, float], draws: Draws) -> Tensor:
    """Lay clouds over an image and scale it back to its own brightest value.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Strength of the fog and decay of its fractal.
        draws: One stream for each image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    strength, decay = level
    height, width = images.shape[-2:]
    size = 1 << max(1, (max(height, width) - 1).bit_length())
    clouds = plasma(draws, size, decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + clouds * (strength * 255)) * (brightest / (brightest + strength * 255))


def brightness(images: Tensor, level: float) -> Tensor:
    """Raise the value of HSV and keep hue and saturation: that scales a pixel's channels alike.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: What is added to the value, of full white.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    value = images.amax(1, keepdim=True)
    raised = (value + level * 255).clamp_(max=255)
    return torch.where(value > 0, images * (raised / value.clamp(min=1)), raised)
