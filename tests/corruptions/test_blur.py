"""The blurs against naive per-image oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from naive_filters import mirrored, naive_gaussian, naive_zoom

from pictures import smooth_pictures
from testtime.corruptions import blur
from testtime.randomness import Draws


def naive_disk(radius: float, softness: float) -> np.ndarray:
    reach = 8 if radius <= 8 else radius
    inside = np.zeros((2 * reach + 1, 2 * reach + 1))
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            inside[y + reach, x + reach] = x * x + y * y <= radius * radius
    inside /= inside.sum()
    half = 1 if radius <= 8 else 2
    bell = np.array([math.exp(-t * t / (2 * softness**2)) for t in range(-half, half + 1)])
    bell /= bell.sum()
    size = len(inside)
    out = np.zeros_like(inside)
    for y in range(size):
        for x in range(size):
            for dy in range(-half, half + 1):
                for dx in range(-half, half + 1):
                    value = inside[mirrored(y + dy, size), mirrored(x + dx, size)]
                    out[y, x] += bell[dy + half] * bell[dx + half] * value
    return out


@pytest.mark.parametrize("level", [(0.3, 0.4), (0.5, 0.6), (1.5, 0.1), (8, 0.5), (10, 0.5)])
def test_defocus_convolves_with_a_soft_disk(level: tuple[float, float]):
    kernel = naive_disk(*level)
    ours = blur.disk(*level)
    margin = (len(kernel) - len(ours)) // 2
    padded = np.pad(ours, margin)
    np.testing.assert_allclose(padded, kernel, atol=2**-16)
    image = smooth_pictures(1, 9, 12, channels=1)
    reach = len(kernel) // 2
    expected = np.zeros((9, 12))
    pixels = image[0, 0].numpy().astype(float)
    for y in range(9):
        for x in range(12):
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    value = pixels[mirrored(y + dy, 9), mirrored(x + dx, 12)]
                    expected[y, x] += kernel[dy + reach, dx + reach] * value
    found = blur.defocus_blur(image.float(), level)[0, 0].numpy()
    np.testing.assert_allclose(found, expected, atol=0.05)


@pytest.mark.parametrize(("reach", "size"), [(1, (12, 9)), (2, (12, 15)), (3, (16, 11)), (4, (24, 24)), (2, (4, 4))])
def test_glass_shuffle_is_the_walk_over_pixels(reach: int, size: tuple[int, int]):
    height, width = size
    draws = Draws.of(1, torch.arange(3))
    images = torch.arange(3 * 2 * height * width, dtype=torch.float32).view(3, 2, height, width)
    rows, columns = max(height - 2 * reach, 0), max(width - 2 * reach, 0)
    expected = images.clone().numpy()
    if rows and columns:
        choice = draws.integers(4 * reach * reach, rows, columns).numpy()
        for n in range(3):
            for y in range(height - reach, reach, -1):
                for x in range(width - reach, reach, -1):
                    pick = choice[n, y - reach - 1, x - reach - 1]
                    dy, dx = pick // (2 * reach) - reach, pick % (2 * reach) - reach
                    assert -reach <= dy < reach
                    assert -reach <= dx < reach
                    expected[n, :, y, x] = expected[n, :, y + dy, x + dx]
    np.testing.assert_array_equal(blur.shuffle_pixels(images, reach, draws).numpy(), expected)


@pytest.mark.parametrize("border", ["edge", "reflect"])
@pytest.mark.parametrize("sigma", [0.25, 0.4, 1.5, 30.0])
def test_smoothing_is_a_gaussian_filter(border: str, sigma: float):
    pixels = smooth_pictures(1, 10, 14, channels=1)[0, 0]
    expected = naive_gaussian(pixels.numpy().astype(float), sigma, 3, border)
    found = blur.smooth(pixels, sigma, 3, border).numpy()
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_glass_blur_is_blur_shuffle_blur():
    image = smooth_pictures(1, 16, 16, channels=1)
    draws = Draws.of(0, torch.arange(1))
    first = np.floor(naive_gaussian(image[0, 0].numpy().astype(float), 0.9, 4, "edge") + 1e-3)
    shuffled = blur.shuffle_pixels(torch.from_numpy(first)[None, None].float(), 2, draws.fold(0))
    expected = naive_gaussian(shuffled[0, 0].numpy().astype(float), 0.9, 4, "edge")
    np.testing.assert_allclose(blur.glass_blur(image.float(), (0.9, 2, 1), draws)[0, 0].numpy(), expected, atol=0.02)


def test_motion_blur_averages_along_a_line_with_half_a_gaussian():
    images = smooth_pictures(5, 11, 13, channels=2)
    angles = torch.tensor([-44.0, 0.0, 17.5, -100.0, 3.0])
    radius, sigma = 4, 2.0
    weights = np.array([math.exp(-i * i / (2 * sigma**2)) for i in range(2 * radius + 1)])
    weights /= weights.sum()
    expected = np.zeros(images.shape)
    for n, angle in enumerate(angles.tolist()):
        for i, weight in enumerate(weights):
            dx = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
            dy = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
            for y in range(11):
                for x in range(13):
                    source = images[n, :, min(max(y + dy, 0), 10), min(max(x + dx, 0), 12)].numpy()
                    expected[n, :, y, x] += weight * source
    found = blur.motion_blur(images.float(), radius, sigma, angles).numpy()
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("size", [(16, 21), (44, 40)])  # one matrix product, and one zoom after the other
def test_zoom_blur_is_the_mean_of_zooms(size: tuple[int, int]):
    image = smooth_pictures(1, *size, channels=1)
    pixels = image[0, 0].numpy().astype(float)
    level = (1.16, 0.03)
    factors = blur.zoom_factors(level)
    assert factors == pytest.approx([1, 1.03, 1.06, 1.09, 1.12, 1.15])
    expected = (pixels + sum(naive_zoom(pixels, factor) for factor in factors)) / (len(factors) + 1)
    np.testing.assert_allclose(blur.zoom_blur(image.float(), level)[0, 0].numpy(), expected, atol=0.05)
    np.testing.assert_allclose(
        blur.clipped_zoom(image.float(), 2.25)[0, 0].numpy(), naive_zoom(pixels, 2.25), atol=1e-3
    )


def test_rounded_weights_add_up_to_exactly_one():
    weights = np.random.default_rng(0).dirichlet(np.ones(30), size=5)
    rounded = blur.round_weights(weights)
    assert (rounded.sum(-1) == 1).all()
    assert (rounded * 2**16 == np.round(rounded * 2**16)).all()
    np.testing.assert_allclose(rounded, weights, atol=2**-16)


@pytest.mark.parametrize("sigma", [0.4, 1, 3])
def test_gaussian_blur_is_a_weighted_mean_of_the_pixels_around(sigma: float):
    image = smooth_pictures(1, 13, 9, channels=1)
    radius = int(4 * sigma + 0.5)
    found = blur.gaussian_blur(image.float(), sigma)[0, 0]
    for y, x in ((0, 0), (5, 4), (12, 3), (6, 8)):
        total = weights = 0.0
        for dy in range(-radius, radius + 1):
            for dx in range(-radius, radius + 1):
                weight = math.exp(-(dy * dy + dx * dx) / (2 * sigma**2))
                total += weight * float(image[0, 0, min(max(y + dy, 0), 12), min(max(x + dx, 0), 8)])
                weights += weight
        assert float(found[y, x]) == pytest.approx(total / weights, abs=0.02)
