"""Frost to lay over images: textures made by code, or photographs from a folder.

The published frost corruption cuts its pieces from five photographs. The textures here stand in for them: crystals are
drawn as lines (needles, feathers, grains, a wrinkled film), their spectrum is then brought to that of such photographs
octave by octave, and colour and brightness likewise. They are the same on every machine and in every run; which piece
of which texture an image gets is drawn with the image's seed.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from testtime.corruptions.strips import split_rows
from testtime.data.pictures import read_picture
from testtime.randomness import Draws
from testtime.storage import FileError

# The published program reads six names but draws from the first five.
PHOTOGRAPHS = ("frost1", "frost2", "frost3", "frost4", "frost5")
_ENDINGS = (".png", ".jpg", ".jpeg")

_HEIGHT, _WIDTH = 480, 720
# Edges of the octaves, in cycles per pixel, in which `_Look.octaves` gives the amplitude.
_OCTAVES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5)

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Look:
    """What a texture shall look like.

    Attributes:
        draw: Draws its crystals on a gray canvas, from the numbers it is given.
        colour: Mean of red, green and blue.
        swing: How far each channel follows the pattern.
        octaves: Spectral amplitude of the pattern in each octave.
    """

    draw: Callable[[ImageDraw.ImageDraw, Draws], None]
    colour: tuple[float, float, float]
    swing: tuple[float, float, float]
    octaves: tuple[float, ...]


def frost_textures(
    scale: Literal["cifar", "imagenet"],
    folder: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Five frost textures.

    Args:
        scale: "cifar" takes every fifth pixel of the textures, as the published program does; "imagenet" all.
        folder: Folder with the photographs frost1 to frost5 (.png or .jpg); made by code if not given.
        device: Where the textures shall be.

    Returns:
        Five of uint8 `(3, h, w)`.

    Raises:
        FileError: The folder lacks a photograph, or one cannot be read.
    """
    return _prepared(scale, None if folder is None else os.fspath(folder), str(device))


@functools.lru_cache(maxsize=4)
def _prepared(scale: str, folder: str | None, device: str) -> tuple[Tensor, ...]:
    textures = make_textures() if folder is None else read_photographs(folder)
    if scale == "cifar":
        textures = tuple(texture[:, 2::5, 2::5] for texture in textures)
    return tuple(texture.contiguous().to(device) for texture in textures)


def enlarged_size(texture: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width to which a texture is scaled so that images of a size fit into it with room to move.

    Args:
        texture: `(3, h, w)`.
        size: Height and width of the images.
    """
    height, width = texture.shape[-2:]
    ratio = max((size[0] + 1) / height, (size[1] + 1) / width)
    return (height, width) if ratio <= 1 else (math.ceil(height * ratio), math.ceil(width * ratio))


def cut_textures(texture: Tensor, size: tuple[int, int], top: Tensor, left: Tensor, shape: tuple[int, int]) -> Tensor:
    """Cuts of a texture that is scaled to a size bilinearly; nothing but the cuts is made of it.

    Args:
        texture: uint8 `(3, h, w)`.
        size: Height and width to which it is scaled.
        top: First row of each cut, `(n,)`.
        left: First column of each cut, `(n,)`.
        shape: Height and width of the cuts.

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
    """What a texture scaled to a size has at some rows `(n, R)` and columns `(n, W)`, whole numbers `(3, n, R, W)`."""
    above, below, down = _neighbours(rows, texture.shape[1], size[0])
    before, after, right = _neighbours(columns, texture.shape[2], size[1])

    def read(places: Tensor) -> Tensor:
        first, second = (texture[:, places[:, :, None], other[:, None]].to(torch.float32) for other in (before, after))
        return _mix(first, second, right[:, None])

    return _mix(read(above), read(below), down[:, :, None]).round_()


def _neighbours(places: Tensor, size: int, to: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two pixels between which a line scaled from `size` to `to` pixels is read, and the second one's share."""
    position = ((places.to(torch.float64) + 0.5) * float(np.float32(size / to)) - 0.5).to(torch.float32).clamp_(min=0)
    first = position.to(torch.int64).clamp_(max=size - 1)
    return first, (first + 1).clamp_(max=size - 1), position.sub_(first)


def _mix(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Two float32 tensors, mixed with a fused multiply-add as torch's own interpolation has it on most machines."""
    return (first.to(torch.float64) * (1 - share).to(torch.float64) + (second * share).to(torch.float64)).to(
        first.dtype
    )


def read_photographs(folder: str | os.PathLike[str]) -> tuple[Tensor, ...]:
    """The five photographs of a folder, uint8 `(3, h, w)` each.

    Raises:
        FileError: One is missing or cannot be read.
    """
    photographs = []
    for name in PHOTOGRAPHS:
        path = next((p for ending in _ENDINGS if os.path.lexists(p := Path(folder, name + ending))), None)
        if path is None:
            raise FileError(
                folder,
                f"holds no {name}.png or {name}.jpg",
                f"frost needs the five photographs {PHOTOGRAPHS[0]} to {PHOTOGRAPHS[-1]}",
            )
        photographs.append(read_picture(path))
    return tuple(photographs)


@functools.cache
def make_textures() -> tuple[Tensor, ...]:
    """The five textures made by code, uint8 `(3, 480, 720)` each."""
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():  # whatever the caller's default is
        return tuple(_make(look, number) for number, look in enumerate(_LOOKS))


def _make(look: _Look, number: int) -> Tensor:
    draws = Draws.of(0, torch.tensor(number, dtype=torch.int64, device="cpu")).purpose("frost texture")
    canvas = Image.new("L", (_WIDTH, _HEIGHT), 128)
    look.draw(ImageDraw.Draw(canvas), draws.purpose("crystals"))
    crystals = torch.from_numpy(np.array(canvas)).to(torch.float64)
    crystals = (crystals - crystals.mean()) / crystals.std()
    cloud = draws.purpose("cloud").normal(_HEIGHT, _WIDTH).to(torch.float64)
    spectrum = (
        _shape(torch.fft.rfft2(crystals), look.octaves) * 0.85 + _shape(torch.fft.rfft2(cloud), look.octaves) * 0.53
    )
    pattern = torch.fft.irfft2(spectrum, s=(_HEIGHT, _WIDTH))
    colour = torch.tensor(look.colour, dtype=torch.float64, device="cpu").view(3, 1, 1)
    swing = torch.tensor(look.swing, dtype=torch.float64, device="cpu").view(3, 1, 1)
    return (colour + swing * pattern).round_().clamp_(0, 255).to(torch.uint8)


def _shape(spectrum: Tensor, octaves: tuple[float, ...]) -> Tensor:
    """Scale a spectrum smoothly so that each octave has its amplitude; phases, and so the crystals, stay."""
    rows = torch.fft.fftfreq(_HEIGHT, dtype=torch.float64)[:, None]
    columns = torch.fft.rfftfreq(_WIDTH, dtype=torch.float64)[None, :]
    frequency = torch.hypot(rows, columns)
    power = spectrum.abs() ** 2 / (_HEIGHT * _WIDTH)
    centres, gains = [], []
    for (low, high), wanted in zip(itertools.pairwise(_OCTAVES), octaves, strict=True):
        found = power[(frequency >= low) & (frequency < high)].mean().sqrt()
        centres.append(math.log(low * math.sqrt(2)))
        gains.append(math.log(wanted / float(found)))
    place = frequency.clamp(min=_OCTAVES[0]).log()
    gain = torch.from_numpy(np.interp(place.numpy(), centres, gains)).exp()
    gain[0, 0] = 0  # the mean is the look's colour
    return spectrum * gain


def _numbers(draws: Draws, count: int, each: int) -> Numbers:
    """Uniform numbers in [0, 1), `(count, each)`."""
    return draws.uniform(count, each).to(torch.float64).numpy()


def _needles(canvas: ImageDraw.ImageDraw, draws: Draws) -> None:
    """Sheaves of straight needles, as on a frozen pond."""
    for x, y, turn, spread, shade, length in _numbers(draws.purpose("sheaves"), 420, 6):
        sheaf = draws.purpose("needles").fold(int(x * 2**24))
        for dx, dy, tilt, extent, tone in _numbers(sheaf, 9, 5):
            angle = (turn * 180 + (tilt - 0.5) * 60 * spread) * math.pi / 180
            reach = (12 + 70 * length * length) * (0.4 + extent)
            left, top = x * _WIDTH + (dx - 0.5) * 30, y * _HEIGHT + (dy - 0.5) * 30
            end = (left + reach * math.cos(angle), top + reach * math.sin(angle))
            canvas.line([(left, top), end], fill=int(50 + 150 * (0.6 * shade + 0.4 * tone)), width=1 + int(tone * 4))


def _feathers(canvas: ImageDraw.ImageDraw, draws: Draws) -> None:
    """Feathers: a spine with barbs that grow shorter towards its tip, as on a window."""
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
    """A dense rime of short splinters with a few stars in it."""
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
    """A thin film of ice with fine wrinkles."""
    for x, y, turn, shade, length in _numbers(draws.purpose("wrinkles"), 900, 5):
        path = draws.purpose("paths").fold(int(x * 2**24))
        angle = turn * 2 * math.pi
        points = [(x * _WIDTH, y * _HEIGHT)]
        for (bend,) in _numbers(path, 4 + int(length * 10), 1):
            angle += (bend - 0.5) * 1.4
            points.append((points[-1][0] + 5 * math.cos(angle), points[-1][1] + 5 * math.sin(angle)))
        canvas.line(points, fill=int(70 + 160 * shade), width=1)


# Two of the five photographs are one pale picture; pale needles come twice here too, drawn anew.
_PALE = _Look(_needles, (200.8, 205.4, 214.5), (0.97, 1.0, 1.05), (1900, 480, 188, 114, 79, 44, 23, 10))
_LOOKS = (
    _Look(_film, (77.7, 149.1, 165.7), (1.45, 0.93, 0.84), (2600, 700, 179, 83, 32, 20, 15, 8)),
    _PALE,
    _PALE,
    _Look(_grains, (137.6, 152.8, 165.2), (0.97, 0.98, 1.06), (2000, 600, 156, 126, 91, 57, 38, 18)),
    _Look(_feathers, (97.0, 108.0, 119.0), (1.02, 1.0, 0.97), (3200, 850, 366, 252, 128, 68, 35, 19)),
)
