"""Frost textures: procedural, or photographs given by the caller.

The published frost corruption uses crops of five photographs. The procedural textures replace them: crystals are drawn
as lines (needles, feathers, grains, a wrinkled film), then their spectrum is matched to that of such photographs octave
by octave, as are colour and brightness. They are the same on every machine and in every run; the crop of an image is
drawn with the image's seed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from testtime.corruptions.strips import split_rows
from testtime.randomness import Draws

_HEIGHT, _WIDTH = 480, 720
# Edges of the octaves of `_Style.octaves`, in cycles per pixel.
_OCTAVES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5)

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Style:
    """The appearance of a texture.

    Attributes:
        draw: Draws the crystals on a gray canvas.
        colour: Mean of red, green and blue.
        swing: Amplitude of the pattern in each channel.
        octaves: Spectral amplitude of the pattern in each octave.
    """

    draw: Callable[[ImageDraw.ImageDraw, Draws], None]
    colour: tuple[float, float, float]
    swing: tuple[float, float, float]
    octaves: tuple[float, ...]


def frost_textures(
    scale: Literal["cifar", "imagenet"],
    photographs: Sequence[Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Return the frost textures for images of a scale.

    Args:
        scale: "cifar" takes every fifth pixel of the textures, as the published code does; "imagenet" all.
        photographs: Textures, uint8 `(3, h, w)` each; None: five procedural ones.
        device: Device of the result.

    Returns:
        uint8 `(3, h, w)` per texture.

    Raises:
        ValueError: `photographs` is empty, or not all are uint8 tensors of three dimensions.
    """
    if photographs is None:
        return _procedural(scale, str(device))
    is_texture = [isinstance(one, Tensor) and one.dtype == torch.uint8 and one.ndim == 3 for one in photographs]
    if not is_texture or not all(is_texture):
        raise ValueError("`frost` must be tensors uint8 (3, h, w); `testtime.data.read_frost` reads a folder.")
    return _prepare(photographs, scale, device)


@functools.lru_cache(maxsize=4)
def _procedural(scale: str, device: str) -> tuple[Tensor, ...]:
    return _prepare(make_textures(), scale, device)


def _prepare(textures: Sequence[Tensor], scale: str, device: torch.device | str) -> tuple[Tensor, ...]:
    if scale == "cifar":
        textures = tuple(texture[:, 2::5, 2::5] for texture in textures)
    return tuple(texture.contiguous().to(device) for texture in textures)


def enlarged_size(texture: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """Return the size to which a texture must be enlarged so that random crops of a size fit into it.

    Args:
        texture: `(3, h, w)`.
        size: Height and width of the images.
    """
    height, width = texture.shape[-2:]
    ratio = max((size[0] + 1) / height, (size[1] + 1) / width)
    return (height, width) if ratio <= 1 else (math.ceil(height * ratio), math.ceil(width * ratio))


def cut_textures(texture: Tensor, size: tuple[int, int], top: Tensor, left: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return crops of a texture resized bilinearly; only the crops are computed.

    Args:
        texture: uint8 `(3, h, w)`.
        size: Height and width to which it is resized.
        top: First row of each crop, `(n,)`.
        left: First column of each crop, `(n,)`.
        shape: Height and width of the crops.

    Returns:
        uint8 `(n, 3, *shape)`.
    """
    height, width = shape
    cuts = torch.empty((3, len(top), height, width), dtype=torch.uint8, device=texture.device)
    columns = left[:, None] + torch.arange(width, device=left.device)  # (n, W)
    for strip in split_rows(height, 4 * len(top) * width, texture.device):
        rows = top[:, None] + torch.arange(strip.start, strip.stop, device=top.device)  # (n, rows)
        if texture.shape[1:] == size:
            cuts[:, :, strip] = texture[:, rows[:, :, None], columns[:, None]]
        else:
            cuts[:, :, strip] = _read_between(texture, size, rows, columns)
    return cuts.transpose(0, 1)


def _read_between(texture: Tensor, size: tuple[int, int], rows: Tensor, columns: Tensor) -> Tensor:
    """Return a texture resized to a size at some rows `(n, R)` and columns `(n, W)`, integers `(3, n, R, W)`."""
    above, below, down = _neighbours(rows, texture.shape[1], size[0])
    before, after, right = _neighbours(columns, texture.shape[2], size[1])

    def read(positions: Tensor) -> Tensor:
        first, second = (
            texture[:, positions[:, :, None], other[:, None]].to(torch.float32) for other in (before, after)
        )
        return _mix(first, second, right[:, None])

    return _mix(read(above), read(below), down[:, :, None]).round_()


def _neighbours(positions: Tensor, size: int, to: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source pixels of positions in a line resized from `size` to `to`, and the second's weight."""
    position = (
        ((positions.to(torch.float64) + 0.5) * float(np.float32(size / to)) - 0.5).to(torch.float32).clamp_(min=0)
    )
    first = position.to(torch.int64).clamp_(max=size - 1)
    return first, (first + 1).clamp_(max=size - 1), position.sub_(first)


def _mix(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Interpolate between float32 tensors with a fused multiply-add, as torch's interpolation does on most machines."""
    return (first.to(torch.float64) * (1 - share).to(torch.float64) + (second * share).to(torch.float64)).to(
        first.dtype
    )


@functools.cache
def make_textures() -> tuple[Tensor, ...]:
    """Return the five procedural textures, uint8 `(3, 480, 720)` each."""
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():  # whatever the caller's defaults
        return tuple(_make(style, number) for number, style in enumerate(_STYLES))


def _make(style: _Style, number: int) -> Tensor:
    draws = Draws.of(0, torch.tensor(number, dtype=torch.int64, device="cpu")).purpose("frost texture")
    canvas = Image.new("L", (_WIDTH, _HEIGHT), 128)
    style.draw(ImageDraw.Draw(canvas), draws.purpose("crystals"))
    crystals = torch.from_numpy(np.array(canvas)).to(torch.float64)
    crystals = (crystals - crystals.mean()) / crystals.std()
    cloud = draws.purpose("cloud").normal(_HEIGHT, _WIDTH).to(torch.float64)
    spectrum = (
        _shape(torch.fft.rfft2(crystals), style.octaves) * 0.85 + _shape(torch.fft.rfft2(cloud), style.octaves) * 0.53
    )
    pattern = torch.fft.irfft2(spectrum, s=(_HEIGHT, _WIDTH))
    colour = torch.tensor(style.colour, dtype=torch.float64, device="cpu").view(3, 1, 1)
    swing = torch.tensor(style.swing, dtype=torch.float64, device="cpu").view(3, 1, 1)
    return (colour + swing * pattern).round_().clamp_(0, 255).to(torch.uint8)


def _shape(spectrum: Tensor, octaves: tuple[float, ...]) -> Tensor:
    """Scale a spectrum smoothly to the amplitude of each octave; phases, and so the crystals, are unchanged."""
    rows = torch.fft.fftfreq(_HEIGHT, dtype=torch.float64)[:, None]
    columns = torch.fft.rfftfreq(_WIDTH, dtype=torch.float64)[None, :]
    frequency = torch.hypot(rows, columns)
    power = spectrum.abs() ** 2 / (_HEIGHT * _WIDTH)
    centres, gains = [], []
    for (low, high), wanted in zip(itertools.pairwise(_OCTAVES), octaves, strict=True):
        found = power[(frequency >= low) & (frequency < high)].mean().sqrt()
        centres.append(math.log(low * math.sqrt(2)))
        gains.append(math.log(wanted / float(found)))
    octave = frequency.clamp(min=_OCTAVES[0]).log()
    gain = torch.from_numpy(np.interp(octave.numpy(), centres, gains)).exp()
    gain[0, 0] = 0  # the mean is the style's colour
    return spectrum * gain


def _numbers(draws: Draws, count: int, each: int) -> Numbers:
    """Draw uniform numbers in [0, 1), `(count, each)`."""
    return draws.uniform(count, each).to(torch.float64).numpy()


def _needles(canvas: ImageDraw.ImageDraw, draws: Draws) -> None:
    """Draw sheaves of straight needles, as on a frozen pond."""
    for x, y, turn, spread, shade, length in _numbers(draws.purpose("sheaves"), 420, 6):
        sheaf = draws.purpose("needles").fold(int(x * 2**24))
        for dx, dy, tilt, extent, tone in _numbers(sheaf, 9, 5):
            angle = (turn * 180 + (tilt - 0.5) * 60 * spread) * math.pi / 180
            reach = (12 + 70 * length * length) * (0.4 + extent)
            left, top = x * _WIDTH + (dx - 0.5) * 30, y * _HEIGHT + (dy - 0.5) * 30
            end = (left + reach * math.cos(angle), top + reach * math.sin(angle))
            canvas.line([(left, top), end], fill=int(50 + 150 * (0.6 * shade + 0.4 * tone)), width=1 + int(tone * 4))


def _feathers(canvas: ImageDraw.ImageDraw, draws: Draws) -> None:
    """Draw feathers, spines with barbs that shorten towards the tip, as on a window."""
    for x, y, turn, length, shade, bend in _numbers(draws.purpose("spines"), 520, 6):
        reach = 18 + 60 * length * length
        tone = int(135 + 120 * shade)
        angle = turn * 2 * math.pi
        left, top = x * _WIDTH, y * _HEIGHT
        joints = max(4, int(reach / 4))
        for joint in range(joints):
            angle += (bend - 0.5) * 0.06
            step = reach / joints
            tip = (left + step * math.cos(angle), top + step * math.sin(angle))
            canvas.line([(left, top), tip], fill=tone, width=2)
            barb = reach * 0.32 * (1 - joint / joints)
            for side in (-1, 1):
                lean = angle + side * math.pi / 3.2
                end = (left + barb * math.cos(lean), top + barb * math.sin(lean))
                canvas.line([(left, top), end], fill=tone - 25, width=1)
            left, top = tip


def _grains(canvas: ImageDraw.ImageDraw, draws: Draws) -> None:
    """Draw dense rime: short splinters with a few stars."""
    for x, y, turn, length, shade in _numbers(draws.purpose("splinters"), 9000, 5):
        angle = turn * math.pi
        reach = 2 + 9 * length * length
        left, top = x * _WIDTH, y * _HEIGHT
        end = (left + reach * math.cos(angle), top + reach * math.sin(angle))
        canvas.line([(left, top), end], fill=int(40 + 190 * shade), width=1 + int(length * 3))
    for x, y, turn, length, shade in _numbers(draws.purpose("stars"), 160, 5):
        for arm in range(6):
            angle = turn * 2 * math.pi + arm * math.pi / 3
            reach = 6 + 20 * length
            left, top = x * _WIDTH, y * _HEIGHT
            end = (left + reach * math.cos(angle), top + reach * math.sin(angle))
            canvas.line([(left, top), end], fill=int(60 + 190 * shade), width=3)


def _film(canvas: ImageDraw.ImageDraw, draws: Draws) -> None:
    """Draw a thin film of ice with fine wrinkles."""
    for x, y, turn, shade, length in _numbers(draws.purpose("wrinkles"), 900, 5):
        path = draws.purpose("paths").fold(int(x * 2**24))
        angle = turn * 2 * math.pi
        points = [(x * _WIDTH, y * _HEIGHT)]
        for (bend,) in _numbers(path, 4 + int(length * 10), 1):
            angle += (bend - 0.5) * 1.4
            points.append((points[-1][0] + 5 * math.cos(angle), points[-1][1] + 5 * math.sin(angle)))
        canvas.line(points, fill=int(70 + 160 * shade), width=1)


# Two of the five photographs are the same pale picture; here, pale needles are drawn twice.
_PALE = _Style(_needles, (200.8, 205.4, 214.5), (0.97, 1.0, 1.05), (1900, 480, 188, 114, 79, 44, 23, 10))
_STYLES = (
    _Style(_film, (77.7, 149.1, 165.7), (1.45, 0.93, 0.84), (2600, 700, 179, 83, 32, 20, 15, 8)),
    _PALE,
    _PALE,
    _Style(_grains, (137.6, 152.8, 165.2), (0.97, 0.98, 1.06), (2000, 600, 156, 126, 91, 57, 38, 18)),
    _Style(_feathers, (97.0, 108.0, 119.0), (1.02, 1.0, 0.97), (3200, 850, 366, 252, 128, 68, 35, 19)),
)
