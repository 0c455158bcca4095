"""The three noises, Gaussian, shot (Poisson) and impulse (salt and pepper), and the extra speckle noise.

The three take a strength per image, so that a data set can drift smoothly from one severity to the next; the published
severities are the five strengths in `LEVELS`. Every random number depends only on the image's stream and the pixel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from testtime.corruptions.strips import by_strips, draw_rows
from testtime.randomness import Draws

NoiseName = Literal["gaussian_noise", "shot_noise", "impulse_noise"]

# Severity 1 to 5: standard deviation, photons at full white, and the fraction of values replaced.
LEVELS: dict[str, dict[str, tuple[float, ...]]] = {
    "gaussian_noise": {"cifar": (0.04, 0.06, 0.08, 0.09, 0.10), "imagenet": (0.08, 0.12, 0.18, 0.26, 0.38)},
    "shot_noise": {"cifar": (500, 250, 100, 75, 50), "imagenet": (60, 25, 12, 5, 3)},
    "impulse_noise": {"cifar": (0.01, 0.02, 0.03, 0.05, 0.07), "imagenet": (0.03, 0.06, 0.09, 0.17, 0.27)},
}
# standard deviation, as a fraction of the pixel
SPECKLE = {"cifar": (0.06, 0.10, 0.12, 0.16, 0.20), "imagenet": (0.15, 0.2, 0.35, 0.45, 0.6)}


def gaussian_noise(images: Tensor, strength: Tensor, draws: Draws) -> Tensor:
    """Add normal noise.

    Args:
        images: Float pixels in 0 to 255, `(N, C, H, W)`.
        strength: Standard deviation per image, as a fraction of full white, `(N,)`.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels on the same scale, not clipped, `(N, C, H, W)`.
    """
    deviation = strength.view(-1, 1, 1, 1) * 255

    def add_noise(rows: slice) -> Tensor:
        return images[:, :, rows] + draw_rows("normal", draws, images.shape[1:], rows) * deviation

    return by_strips(images.shape, images.device, add_noise)


def shot_noise(images: Tensor, strength: Tensor, draws: Draws) -> Tensor:
    """Replace every value by a Poisson count of mean value × `strength`, divided by `strength`.

    Args:
        images: Float pixels in 0 to 255, `(N, C, H, W)`.
        strength: Photons at full white per image, `(N,)`; fewer photons, more noise.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels on the same scale, not clipped, `(N, C, H, W)`.
    """
    photons = strength.view(-1, 1, 1, 1) / 255

    def count(rows: slice) -> Tensor:
        deviate = draw_rows("normal", draws, images.shape[1:], rows)
        return _counts(images[:, :, rows] * photons, deviate) / photons

    return by_strips(images.shape, images.device, count)


def impulse_noise(images: Tensor, strength: Tensor, draws: Draws) -> Tensor:
    """Set a fraction `strength` of all channel values to black or white, half each.

    Args:
        images: Float pixels in 0 to 255, `(N, C, H, W)`.
        strength: Fraction of values to replace per image, `(N,)`.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels on the same scale, `(N, C, H, W)`.
    """
    # One uniform number decides: the lowest strength/2 are pepper, the highest strength/2 salt.
    half = strength.view(-1, 1, 1, 1) / 2

    def replace(rows: slice) -> Tensor:
        chance = draw_rows("uniform", draws, images.shape[1:], rows)
        return images[:, :, rows].masked_fill(chance < half, 0).masked_fill_(chance >= 1 - half, 255)

    return by_strips(images.shape, images.device, replace)


def speckle_noise(images: Tensor, level: float, draws: Draws) -> Tensor:
    """Add normal noise in proportion to each value.

    Args:
        images: Float pixels in 0 to 255, `(N, C, H, W)`.
        level: Standard deviation, as a fraction of the value.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels on the same scale, not clipped, `(N, C, H, W)`.
    """

    def add_noise(rows: slice) -> Tensor:
        part = images[:, :, rows]
        return part + part * draw_rows("normal", draws, images.shape[1:], rows) * level

    return by_strips(images.shape, images.device, add_noise)


NOISES: dict[str, Callable[[Tensor, Tensor, Draws], Tensor]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
}

# Rates below _SMALL use exact tables on a grid of _GRID plus a small remainder; larger ones the normal expansion, whose
# error decreases with the rate and is negligible at 10.
_SMALL = 10.0
_GRID = 1 / 8
_OUTCOMES = 64  # a count at rate 10 exceeds 63 with probability 10⁻²⁸


def poisson(rates: Tensor, draws: Draws) -> Tensor:
    """Draw Poisson counts without a loop over counts, in a few passes per batch.

    Rates of 10 and more use Giles' normal expansion of the Poisson quantile (2016). Smaller ones are the sum of two
    counts: one of the rate rounded down to a multiple of 1/8, from an alias table (Walker 1977), and one of the
    remainder, nearly always 0, by inversion. Both use one normal number per count.

    Args:
        rates: Non-negative float32, `(N, ...)`.
        draws: One stream per image, keys `(N,)`.

    Returns:
        Counts as float32, `(N, ...)`.
    """
    return _counts(rates, draws.normal(*rates.shape[1:]))


def _counts(rates: Tensor, deviate: Tensor) -> Tensor:
    """Return counts for the given rates, from one normal number each."""
    if not rates.numel():
        return rates
    low, high = (float(bound) for bound in torch.aminmax(rates))
    many = _many(rates, deviate) if high >= _SMALL else None
    if low >= _SMALL and many is not None:
        return many
    few = _few(rates.clamp(max=_SMALL - 2**-20), deviate)
    return few if many is None else torch.where(rates < _SMALL, few, many)


def _many(rates: Tensor, deviate: Tensor) -> Tensor:
    """Return counts for rates of at least `_SMALL`."""
    root = rates.sqrt()
    square = deviate * deviate + 2
    counts = root * deviate
    counts += rates
    counts += square / 6
    square *= deviate
    counts -= square.div_(root.mul_(72))
    return counts.floor_().clamp_(min=0)


def _few(rates: Tensor, deviate: Tensor) -> Tensor:
    """Return counts for rates below `_SMALL`."""
    keep, other = (table.to(rates.device) for table in _alias_tables())
    row = (rates * (1 / _GRID)).floor_()
    rest = rates - row * _GRID
    # The quantile of the normal number is uniform. It selects a column, then one of the column's two outcomes; its
    # position within that outcome's share is uniform again, and selects the count of the remainder.
    ticket = torch.erf(deviate * math.sqrt(0.5)).add_(1).mul_(_OUTCOMES / 2)
    column = ticket.floor().clamp_(max=_OUTCOMES - 1)
    share = ticket.sub_(column)
    entry = row.mul_(_OUTCOMES).add_(column).to(torch.int32)
    bound = keep[entry]
    first = share < bound
    counts = torch.where(first, column, other[entry])
    chance = torch.where(first, share / bound, (share - bound) / (1 - bound)).clamp_(max=1 - 2**-20)
    # The remainder is below 1/8: more than four has probability 10⁻⁷.
    term = torch.exp(-rest)
    total = term.clone()
    for count in range(1, 5):
        counts += chance >= total
        term *= rest
        term /= count
        total += term
    return counts


@functools.cache
def _alias_tables() -> tuple[Tensor, Tensor]:
    """Return Walker's alias tables for every rate on the grid below `_SMALL`, each `(rates × outcomes,)`."""
    rates = np.arange(0, _SMALL, _GRID)[:, None]
    counts = np.arange(_OUTCOMES)[None, :]
    logs = np.array([math.lgamma(count + 1) for count in range(_OUTCOMES)])
    with np.errstate(divide="ignore", invalid="ignore"):
        chances = np.exp(np.where(rates > 0, counts * np.log(rates) - rates - logs, np.where(counts == 0, 0, -np.inf)))
    keep = chances / chances.sum(1, keepdims=True) * _OUTCOMES
    other = np.tile(counts, (len(rates), 1))
    for row in range(len(rates)):
        shares = keep[row]
        small = [k for k in range(_OUTCOMES) if shares[k] < 1]
        large = [k for k in range(_OUTCOMES) if shares[k] >= 1]
        while small and large:
            poor, rich = small.pop(), large[-1]
            other[row, poor] = rich
            shares[rich] -= 1 - shares[poor]
            if shares[rich] < 1:
                small.append(large.pop())
        for left in small + large:  # 1 up to rounding
            shares[left] = 1
    return torch.from_numpy(keep.astype(np.float32)).flatten(), torch.from_numpy(other.astype(np.float32)).flatten()
