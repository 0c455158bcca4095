"""Statistics: bootstrap intervals, paired tests, line fits.

The bootstrap uses `testtime.randomness`, so a seed gives the same interval on every machine. Columns passed together
are resampled jointly: the images of a corruption benchmark are the same under every corruption, so an interval of the
mean over corruptions must not treat them as independent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from testtime.randomness import Draws

ROUNDS = 1000
_DRAWS_AT_ONCE = 1 << 21


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


class Line(NamedTuple):
    """A least-squares line with its correlation and confidence band.

    Attributes:
        slope: Its slope.
        offset: Its value at 0.
        correlation: Pearson's r of the points.
        at: X values of the band.
        low: Lower edge of the band.
        high: Upper edge of the band.
    """

    slope: float
    offset: float
    correlation: float
    at: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bootstrap_means(values: np.ndarray, seed: int = 0, rounds: int = ROUNDS) -> np.ndarray:
    """Return bootstrap means of the columns, over images drawn with replacement.

    Args:
        values: `(N, K)`, one row per image.
        seed: Seed of the draws.
        rounds: Number of bootstrap samples.

    Returns:
        float64 `(rounds, K)`; each round draws the same images for all columns.
    """
    sums = [part.astype(np.float64) @ values for part in _draw_counts(len(values), seed, rounds)]
    return np.concatenate(sums) / len(values)


@functools.lru_cache(maxsize=2)  # the sets of a benchmark have the same size
def _draw_counts(count: int, seed: int, rounds: int) -> list[np.ndarray]:
    """Return how often each of `count` images is drawn, `(rounds, count)` in pieces."""
    step = max(1, _DRAWS_AT_ONCE // max(count, 1))
    pieces = []
    for start in range(0, rounds, step):
        numbers = torch.arange(start, min(start + step, rounds), device="cpu")
        drawn = Draws.of(seed, numbers).purpose("bootstrap").integers(count, count)  # (rounds here, N)
        flat = (drawn + torch.arange(len(numbers), device="cpu")[:, None] * count).flatten()
        found = torch.bincount(flat, minlength=len(numbers) * count).view(len(numbers), count)
        pieces.append(found.numpy().astype(np.uint16 if count < 1 << 16 else np.uint32))
    return pieces


def interval_of(means: np.ndarray, confidence: float = 0.95) -> Interval:
    """Return the percentile interval of bootstrap means `(rounds,)`."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def wilson(count: float, total: int, sigmas: float = 1.959964) -> Interval:
    """Return Wilson's 95% interval of a fraction: `count` of `total`. It is not empty where `count` is 0."""
    share, z = count / total, sigmas**2 / total
    half = math.sqrt(z * share * (1 - share) + z * z / 4)
    low, high = ((share + z / 2 + sign * half) / (1 + z) for sign in (-1, 1))
    return Interval(max(0.0, low), min(1.0, high))


def sign_test(more: int, fewer: int) -> float:
    """Return the exact two-sided p-value of a sign test with `more` positive and `fewer` negative differences.

    On the images that exactly one of two methods gets right, this is McNemar's exact test.
    """
    count = more + fewer
    if count == 0:
        return 1.0
    # In logarithms, because 2 ** -count underflows.
    logs = [_log_choose(count, k) - count * math.log(2) for k in range(min(more, fewer) + 1)]
    return min(1.0, 2 * math.fsum(math.exp(value) for value in logs))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def calibration_error(images: Sequence[int], probability: Sequence[float], right: Sequence[int]) -> float:
    """Return the expected calibration error in [0, 1].

    It is the mean over images of the difference between the accuracy and the mean probability of their bin.

    Args:
        images: Number of images in each bin.
        probability: Sum of their probabilities.
        right: Number of right predictions.

    Raises:
        ValueError: There are no images.
    """
    if sum(images) == 0:
        raise ValueError("There are no images.")
    return math.fsum(abs(one - other) for one, other in zip(probability, right, strict=True)) / sum(images)


def rank(values: Sequence[float]) -> list[float]:
    """Return the ranks of values, 1 for the smallest; equal ones share the mean of their ranks."""
    return [sum(other < one for other in values) + (1 + sum(other == one for other in values)) / 2 for one in values]


def spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def fit_line(x: np.ndarray, y: np.ndarray, confidence: float = 0.99, points: int = 100) -> Line:
    """Fit a line and its confidence band over the range of `x`.

    Args:
        x: `(N,)`, at least three points, not all equal.
        y: `(N,)`.
        confidence: Confidence level of the band.
        points: Number of points of the band.

    Raises:
        ValueError: There are too few distinct points.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"`x` and `y` must have the same length, got shapes {x.shape} and {y.shape}.")
    if len(x) < 3 or np.ptp(x) == 0:
        raise ValueError(f"A line needs at least 3 points, not all at the same `x`, got {len(x)}.")
    centred = x - x.mean()
    scatter = float(centred @ centred)
    slope = float(centred @ (y - y.mean())) / scatter
    offset = float(y.mean() - slope * x.mean())
    rest = y - (slope * x + offset)
    noise = math.sqrt(float(rest @ rest) / (len(x) - 2))
    at = np.linspace(x.min(), x.max(), points)
    half = student_quantile((1 + confidence) / 2, len(x) - 2) * noise
    half = half * np.sqrt(1 / len(x) + (at - x.mean()) ** 2 / scatter)
    height = float((y - y.mean()) @ (y - y.mean()))
    correlation = slope * math.sqrt(scatter / height) if height > 0 else 0.0
    return Line(slope, offset, correlation, at, slope * at + offset - half, slope * at + offset + half)


def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees of freedom at probability `share` (≥ 0.5)."""
    low, high = 0.0, 1.0
    while _student_below(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _student_below(t: float, freedom: int) -> float:
    # Abramowitz and Stegun 26.7.3 and 26.7.4: finite sums for integer degrees of freedom.
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + inside) / 2
