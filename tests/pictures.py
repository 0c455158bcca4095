"""Random images for several tests."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.randomness import Draws


def pictures(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Noise images `(N, C, H, W)`: uint8 in 0 to 255, or floats in 0 to 1; each depends on its number and the seed."""
    pixels = Draws.of(seed, torch.arange(shape[0])).integers(256, *shape[1:])
    return pixels.to(torch.uint8) if dtype == torch.uint8 else pixels.to(dtype) / 255


def smooth_pictures(count: int, height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """Smooth shapes with some grain: more like pictures than noise is."""
    generator = torch.Generator().manual_seed(count * 7 + height * 3 + width + channels)
    rows = torch.linspace(0, 1, height)[:, None]
    columns = torch.linspace(0, 1, width)[None, :]
    waves = torch.rand(count, channels, 4, generator=generator) * 6
    a, b, c, d = (wave[..., None, None] for wave in waves.unbind(-1))
    smooth = 0.5 + 0.25 * torch.sin(a * rows * 2 + b * columns * 2 + c) + 0.2 * torch.cos(d * rows * columns * 3)
    grain = 0.04 * torch.randn(count, channels, height, width, generator=generator)
    return ((smooth + grain).clamp(0, 1) * 255).to(torch.uint8)
