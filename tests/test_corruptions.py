"""The corruptions against naive per-image oracles, against the laws of their noises, and against published examples.

The comparison with published examples needs a folder, named by TESTTIME_DATA, with CIFAR-10's binary version
(`cifar-10-batches-bin`), the published generator's output on its first 100 test images
(`cifar10c_reference/NAME_SEVERITY.npy`, uint8 (100, 32, 32, 3)) and the frost photographs (`frost`).
"""

from __future__ import annotations

import colorsys
import contextlib
import io
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from testtime.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    FileError,
    blur,
    corrupt,
    corrupt_chunks,
    corrupt_noise,
    digital,
    filters,
    frost,
    noise,
    resolve_scale,
    severity_level,
    strips,
    weather,
)
from testtime.corruptions.frost import cut_textures, enlarged_size, frost_textures, make_textures
from testtime.corruptions.noise import poisson
from testtime.corruptions.registry import SIDE_LIMIT
from testtime.randomness import Draws

CHANCE = [
    name for name in CORRUPTIONS if name not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate")
]
CHANCE.remove("jpeg_compression")


def pictures(count: int, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    """Smooth shapes with some grain: more like pictures than noise is."""
    generator = torch.Generator().manual_seed(count * 7 + height * 3 + width + channels)
    rows = torch.linspace(0, 1, height)[:, None]
    columns = torch.linspace(0, 1, width)[None, :]
    waves = torch.rand(count, channels, 4, generator=generator) * 6
    a, b, c, d = (wave[..., None, None] for wave in waves.unbind(-1))
    smooth = 0.5 + 0.25 * torch.sin(a * rows * 2 + b * columns * 2 + c) + 0.2 * torch.cos(d * rows * columns * 3)
    grain = 0.04 * torch.randn(count, channels, height, width, generator=generator)
    return ((smooth + grain).clamp(0, 1) * 255).to(torch.uint8)


# ---------------------------------------------------------------------------------------------- the contract of all


def test_names_are_the_tables_columns():
    assert (
        *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    ) == CORRUPTIONS


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_comes_out_the_same_alone_and_in_a_batch_in_any_order(name: str):
    images = pictures(7)
    together = corrupt(images, name, 4, seed=3)
    assert together.dtype == torch.uint8
    assert together.shape == images.shape
    order = torch.tensor([5, 0, 6, 2])
    assert torch.equal(corrupt(images[order], name, 4, seed=3, samples=order), together[order])
    for number in (0, 6):
        alone = corrupt(images[number : number + 1], name, 4, seed=3, samples=torch.tensor([number]))
        assert torch.equal(alone[0], together[number])
    assert torch.equal(corrupt(images, name, 4, seed=3, chunk=2), together)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_large_images_come_out_the_same_alone_and_in_a_batch(name: str):
    images = pictures(3, 70, 96)
    together = corrupt(images, name, 2, seed=1)
    for number in range(3):
        alone = corrupt(images[number : number + 1], name, 2, seed=1, samples=torch.tensor([number]))
        assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("name", CHANCE)
def test_draws_depend_on_the_seed_and_on_the_number_and_on_nothing_else(name: str):
    images = pictures(1).expand(2, -1, -1, -1)
    before = torch.random.get_rng_state()
    first = corrupt(images, name, 5, seed=0)
    assert torch.equal(first, corrupt(images, name, 5, seed=0))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, corrupt(images, name, 5, seed=1))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_floats_take_the_path_of_eight_bits(name: str):
    images = pictures(2)
    assert torch.equal(corrupt(images.float() / 255, name, 3), corrupt(images, name, 3))


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (20, 33), (65, 80)])
def test_any_size_and_gray_images_work(name: str, size: tuple[int, int]):
    for channels in (1, 3):
        images = pictures(2, *size, channels=channels)
        kept = images.clone()
        for severity in (1, 5):
            assert corrupt(images, name, severity).shape == images.shape
        assert torch.equal(images, kept)  # the caller's images are not touched


@pytest.mark.parametrize(
    "name", ["defocus_blur", "motion_blur", "zoom_blur", "fog", "contrast", "pixelate", "brightness"]
)
def test_a_gray_image_is_a_colour_image_with_equal_channels(name: str):
    gray = pictures(2, channels=1)
    colour = corrupt(gray.expand(-1, 3, -1, -1), name, 4)
    assert torch.equal(corrupt(gray, name, 4), colour[:, :1])
    assert torch.equal(colour[:, 0], colour[:, 2])


# Not in these: glass blurs grain away as it goes up, frost dims what it whitens, elastic trades its shear for ripples.
@pytest.mark.parametrize("name", [n for n in CORRUPTIONS if n not in ("glass_blur", "frost", "elastic_transform")])
def test_damage_grows_from_the_first_severity_to_the_last(name: str):
    images = pictures(24)
    damage = [(corrupt(images, name, s).float() - images.float()).square().mean().item() for s in (1, 3, 5)]
    assert 0 < damage[0] < damage[1] < damage[2]


def test_chunks_cover_the_set_in_order():
    images = pictures(10)
    parts = list(corrupt_chunks(images, "fog", 2, seed=5, chunk=4))
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 4), (4, 8), (8, 10)]
    assert torch.equal(torch.cat([block for _, block in parts]), corrupt(images, "fog", 2, seed=5))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_callers_modes_do_not_matter_and_stay(name: str):
    images = pictures(2)
    expected = corrupt(images, name, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(corrupt(images, name, 3), expected)
    with torch.inference_mode():
        assert torch.equal(corrupt(images, name, 3), expected)
    for _ in corrupt_chunks(images, name, 3, chunk=1):
        assert torch.is_grad_enabled()


def test_an_empty_batch_stays_empty():
    for name in CORRUPTIONS:
        assert corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), name, 1).shape == (0, 3, 32, 32)


def test_scale_follows_the_short_side():
    assert resolve_scale("auto", 32, 500) == "cifar"
    assert resolve_scale("auto", 64, 64) == "imagenet"
    assert resolve_scale("imagenet", 8, 8) == "imagenet"
    images = pictures(1)
    assert torch.equal(corrupt(images, "contrast", 1), corrupt(images, "contrast", 1, scale="cifar"))
    assert not torch.equal(corrupt(images, "contrast", 1), corrupt(images, "contrast", 1, scale="imagenet"))


def test_levels_are_the_published_ones():
    assert [severity_level("gaussian_noise", s, "cifar") for s in SEVERITIES] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert [severity_level("shot_noise", s, "imagenet") for s in SEVERITIES] == [60, 25, 12, 5, 3]
    assert severity_level("glass_blur", 4, "imagenet") == (1.1, 3, 2)
    assert severity_level("snow", 3, "cifar") == (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9)
    assert severity_level("elastic_transform", 5, "imagenet") == (0.12, 0.01, 0.02)
    assert severity_level("jpeg_compression", 5, "cifar") == 40


def test_errors_name_the_argument_and_its_value():
    images = pictures(2)
    with pytest.raises(ValueError, match=r"^`severity` must be 1 to 5, got 6\.$"):
        corrupt(images, "fog", 6)
    with pytest.raises(ValueError, match=r"`name` must be one of gaussian_noise, .*got 'mist'\."):
        corrupt(images, "mist", 1)
    with pytest.raises(
        ValueError, match=r"`images` must be \(N, C, H, W\) with 1 or 3 channels, got shape \(3, 32, 32\)"
    ):
        corrupt(images[0], "fog", 1)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        corrupt(pictures(1, channels=2), "fog", 1)
    with pytest.raises(TypeError, match=r"`images` must be uint8, or floating point in 0 to 1, got torch.int64"):
        corrupt(images.long(), "fog", 1)
    with pytest.raises(ValueError, match=r'`scale` must be "auto", "cifar" or "imagenet", got \'mnist\''):
        corrupt(images, "fog", 1, scale="mnist")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`samples` must have one number for each of 2 images, got \(3,\)"):
        corrupt(images, "fog", 1, samples=torch.arange(3))
    with pytest.raises(TypeError, match="`samples` must be integers"):
        corrupt(images, "fog", 1, samples=torch.zeros(2))
    with pytest.raises(ValueError, match="`chunk` must be at least 1, got 0"):
        corrupt(images, "fog", 1, chunk=0)
    with pytest.raises(ValueError, match="`severity` must be 1 to 5, got 0"):
        severity_level("fog", 0, "cifar")


# ------------------------------------------------------------------------------------------- large and long pictures


@pytest.mark.parametrize("scale", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_strips_are_the_rows_of_the_whole(name: str, scale, monkeypatch: pytest.MonkeyPatch):
    batches = [pictures(2, 29, 41), pictures(1, 50, 17, channels=1)]
    whole = [corrupt(images, name, severity, scale=scale) for images in batches for severity in (1, 2, 3, 5)]
    monkeypatch.setattr(filters, "_DENSE", 8)
    for values in (1, 1000):
        monkeypatch.setattr(strips, "_CPU_VALUES", values)
        parts = [corrupt(images, name, severity, scale=scale) for images in batches for severity in (1, 2, 3, 5)]
        assert all(torch.equal(part, expected) for part, expected in zip(parts, whole, strict=True))


def test_clouds_of_a_long_picture_are_those_of_the_square_stretched_to_the_full_range(monkeypatch: pytest.MonkeyPatch):
    draws = Draws.of(2, torch.arange(3))
    square = weather.plasma(draws, 128, 1.7)
    monkeypatch.setattr(weather, "_SQUARE_PIXELS", 0)
    for height, width in ((3, 100), (100, 3), (1, 128)):
        part = square[:, :height, :width]
        low, high = part.amin((1, 2), keepdim=True), part.amax((1, 2), keepdim=True)
        torch.testing.assert_close(weather.plasma(draws, 128, 1.7, (height, width)), (part - low) / (high - low))
    assert torch.equal(weather.plasma(draws, 128, 1.7, (100, 70)), square[:, :100, :70])


def test_a_long_picture_takes_little_memory():
    """The square over the long side would take a gigabyte; all fifteen together add less than the textures do."""
    program = """
import resource, torch
from testtime.corruptions import CORRUPTIONS, corrupt
torch.set_num_threads(1)
images = torch.arange(16000).remainder(256).to(torch.uint8).view(1, 1, 1, 16000)
corrupt(images[..., :100], "frost", 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in CORRUPTIONS:
    for long in (images, images.transpose(2, 3)):
        assert corrupt(long, name, 5).shape == long.shape
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert int(result.stdout) < 100  # MB


def test_there_is_a_limit_to_the_size_and_not_to_the_batch():
    for shape in ((1, 1, 1, SIDE_LIMIT + 1), (1, 1, SIDE_LIMIT + 1, 1), (1, 1, 8001, 8000)):
        with pytest.raises(ValueError, match=r"^`images` must have at most 65,500 .* 64,000,000 in all, got shape"):
            corrupt(torch.zeros(1, dtype=torch.uint8).expand(shape), "contrast", 1)
    long = torch.zeros(1, dtype=torch.uint8).expand(1, 1, 1, SIDE_LIMIT)
    assert corrupt(long, "jpeg_compression", 1).shape == long.shape


# -------------------------------------------------------------------------------------------------- torch's defaults


@contextlib.contextmanager
def torch_default(what: str) -> Iterator[None]:
    kind = torch.get_default_dtype()
    try:
        if what in ("float64", "bfloat16"):
            torch.set_default_dtype(getattr(torch, what))
        if what == "meta":
            torch.set_default_device("meta")
        with contextlib.ExitStack() as stack:
            if what == "inference":
                stack.enter_context(torch.inference_mode())
            if what == "autocast":
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield
    finally:
        torch.set_default_dtype(kind)
        torch.set_default_device(None)


def forget() -> None:
    """Empty the caches: what they hold was made under other defaults."""
    for cached in (
        frost._prepared,
        make_textures,
        filters.gaussian_matrix,
        filters.box_taps,
        filters._box_matrix,
        blur._zoom_operator,
        noise._alias_tables,
    ):
        cached.cache_clear()


@pytest.mark.parametrize("what", ["float64", "bfloat16", "meta", "inference", "autocast"])
def test_torchs_defaults_do_not_matter(what: str):
    batches = [pictures(2), pictures(2, 70, 66, channels=1)]
    severities = {name: 1 + place % 5 for place, name in enumerate(CORRUPTIONS)}
    forget()
    expected = {name: [corrupt(images, name, severities[name]) for images in batches] for name in CORRUPTIONS}
    forget()
    with torch_default(what):
        found = {name: [corrupt(images, name, severities[name]) for images in batches] for name in CORRUPTIONS}
    for name in CORRUPTIONS:
        assert all(torch.equal(a, b) for a, b in zip(expected[name], found[name], strict=True)), name
    # And what was cached there serves where gradients are wanted.
    assert torch.equal(corrupt(batches[0].float() / 255, "elastic_transform", 3), expected["elastic_transform"][0])
    assert corrupt((batches[0].float() / 255).requires_grad_(), "zoom_blur", 2).shape == batches[0].shape


# ------------------------------------------------------------------------------------------------------------ noises


def test_gaussian_noise_has_its_standard_deviation():
    images = torch.full((64, 3, 32, 32), 128, dtype=torch.uint8)
    change = corrupt(images, "gaussian_noise", 5).float() - 128
    assert change.mean().item() == pytest.approx(-0.5, abs=0.25)  # truncation takes half a step
    assert change.std().item() == pytest.approx(25.5, rel=0.01)
    # Normal: 68.3 % within one deviation, 95.4 % within two.
    assert (change.abs() < 25.5).float().mean().item() == pytest.approx(0.683, abs=0.01)
    assert (change.abs() < 51.0).float().mean().item() == pytest.approx(0.954, abs=0.005)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.8, 3.0, 9.95, 10.0, 14.0, 60.0, 400.0])
def test_poisson_counts_have_the_poisson_distribution(rate: float):
    """Total variation between the exact law and what was drawn stays at what chance allows for this many draws."""
    count = 400_000
    drawn = poisson(torch.full((4, count // 4), rate), Draws.of(0, torch.arange(4))).flatten().long().numpy()
    assert drawn.min() >= 0
    top = int(rate + 12 * math.sqrt(rate) + 20)
    assert drawn.max() < top
    chances = np.array(
        [math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) if rate else k == 0 for k in range(top)]
    )
    found = np.bincount(drawn, minlength=top) / count
    expected = 0.5 * np.sqrt(2 / math.pi * chances * (1 - chances) / count).sum()  # mean deviation of each frequency
    assert 0.5 * np.abs(found - chances).sum() <= 1.5 * expected + 1e-6
    assert drawn.mean() == pytest.approx(rate, abs=5 * math.sqrt(rate / count) + 1e-9)
    assert drawn.var() == pytest.approx(rate, rel=0.02, abs=1e-9)


def test_shot_noise_keeps_the_mean_and_has_the_variance_of_photons():
    for value in (30, 100, 140):  # too dark for any to reach white
        images = torch.full((64, 3, 32, 32), value, dtype=torch.uint8)
        noisy = corrupt(images, "shot_noise", 5).double()
        assert noisy.mean().item() == pytest.approx(value - 0.5, abs=0.6)
        assert noisy.std().item() == pytest.approx(math.sqrt(value / 255 * 50) / 50 * 255, rel=0.02)


def test_impulse_noise_sets_each_value_by_itself_to_black_or_white():
    images = torch.full((64, 3, 32, 32), 100, dtype=torch.uint8)
    noisy = corrupt(images, "impulse_noise", 5)
    assert (noisy == 0).float().mean().item() == pytest.approx(0.035, rel=0.05)
    assert (noisy == 255).float().mean().item() == pytest.approx(0.035, rel=0.05)
    assert ((noisy == 100) | (noisy == 0) | (noisy == 255)).all()
    hit = noisy != 100  # channels are hit independently: both with a chance of p²
    assert (hit[:, 0] & hit[:, 1]).float().mean().item() == pytest.approx(0.07**2, rel=0.15)


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "impulse_noise"])
def test_free_strength_is_each_images_own(name):
    images = pictures(6)
    draws = Draws.of(4, torch.arange(6)).purpose(name).fold(5)
    first, last = (float(severity_level(name, s, "cifar")) for s in (1, 5))
    strength = torch.linspace(first, last, 6)
    noisy = corrupt_noise(images, name, strength, draws)
    # At a published strength it is the published severity, whatever the others have.
    assert torch.equal(noisy[5], corrupt(images, name, 5, seed=4)[5])
    alone = corrupt_noise(images[2:3], name, strength[2:3], Draws(draws.keys[2:3]))
    assert torch.equal(alone[0], noisy[2])
    with pytest.raises(ValueError, match="`strength` and `draws` must have one entry for each of 6 images"):
        corrupt_noise(images, name, strength[:3], draws)
    with pytest.raises(ValueError, match="`strength`"):
        corrupt_noise(images, name, -strength, draws)


def test_free_strength_takes_noises_only():
    with pytest.raises(ValueError, match="`name` must be one of gaussian_noise, shot_noise, impulse_noise, got 'fog'"):
        corrupt_noise(pictures(1), "fog", torch.ones(1), Draws.of(0, torch.arange(1)))  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------------------- blurs


def mirrored(index: int, size: int) -> int:
    """An index folded into a line, mirrored at its outermost pixels without repeating them."""
    if size == 1:
        return 0
    index %= 2 * size - 2
    return min(index, 2 * size - 2 - index)


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
    image = pictures(1, 9, 12, channels=1)
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


def naive_gaussian(pixels: np.ndarray, sigma: float, truncate: float, border: str) -> np.ndarray:
    radius = int(truncate * sigma + 0.5)
    bell = np.array([math.exp(-t * t / (2 * sigma**2)) for t in range(-radius, radius + 1)])
    bell /= bell.sum()
    for axis in (0, 1):
        pixels = np.apply_along_axis(
            lambda line: np.convolve(
                np.pad(line, radius, mode="edge" if border == "edge" else "symmetric"), bell, "valid"
            ),
            axis,
            pixels,
        )
    return pixels


@pytest.mark.parametrize("border", ["edge", "reflect"])
@pytest.mark.parametrize("sigma", [0.25, 0.4, 1.5, 30.0])
def test_smoothing_is_a_gaussian_filter(border: str, sigma: float):
    pixels = pictures(1, 10, 14, channels=1)[0, 0]
    expected = naive_gaussian(pixels.numpy().astype(float), sigma, 3, border)
    found = blur.smooth(pixels, sigma, 3, border).numpy()
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_glass_blur_is_blur_shuffle_blur():
    image = pictures(1, 16, 16, channels=1)
    draws = Draws.of(0, torch.arange(1))
    first = np.floor(naive_gaussian(image[0, 0].numpy().astype(float), 0.9, 4, "edge") + 1e-3)
    shuffled = blur.shuffle_pixels(torch.from_numpy(first)[None, None].float(), 2, draws.fold(0))
    expected = naive_gaussian(shuffled[0, 0].numpy().astype(float), 0.9, 4, "edge")
    np.testing.assert_allclose(blur.glass_blur(image.float(), (0.9, 2, 1), draws)[0, 0].numpy(), expected, atol=0.02)


def test_motion_blur_averages_along_a_line_with_half_a_gaussian():
    images = pictures(5, 11, 13, channels=2)
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


def naive_zoom(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Cut out the middle, stretch it bilinearly so that its corners stay corners, trim to the size."""
    cut, first = [], []
    for size in pixels.shape:
        cut.append(math.ceil(size / factor))
        first.append((size - cut[-1]) // 2)
    middle = pixels[first[0] : first[0] + cut[0], first[1] : first[1] + cut[1]]
    shape = [round(length * factor) for length in cut]
    out = np.zeros(shape)
    for y in range(shape[0]):
        for x in range(shape[1]):
            fy, fx = y * (cut[0] - 1) / (shape[0] - 1), x * (cut[1] - 1) / (shape[1] - 1)
            y0, x0 = min(int(fy), cut[0] - 2), min(int(fx), cut[1] - 2)
            ty, tx = fy - y0, fx - x0
            top = middle[y0, x0] * (1 - tx) + middle[y0, x0 + 1] * tx
            bottom = middle[y0 + 1, x0] * (1 - tx) + middle[y0 + 1, x0 + 1] * tx
            out[y, x] = top * (1 - ty) + bottom * ty
    trim = [(length - size) // 2 for length, size in zip(shape, pixels.shape, strict=True)]
    return out[trim[0] : trim[0] + pixels.shape[0], trim[1] : trim[1] + pixels.shape[1]]


@pytest.mark.parametrize("size", [(16, 21), (44, 40)])  # one matrix product, and one zoom after the other
def test_zoom_blur_is_the_mean_of_zooms(size: tuple[int, int]):
    image = pictures(1, *size, channels=1)
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


# ----------------------------------------------------------------------------------------------------------- weather


def test_plasma_is_the_diamond_square_fractal_on_a_torus():
    size, decay = 16, 1.9
    draws = Draws.of(2, torch.arange(2))
    noise = (draws.uniform(size, size) * 2 - 1).double().numpy()
    for n in range(2):
        field = np.zeros((size, size))
        step, amplitude = size, 100.0
        while step >= 2:
            half = step // 2
            for y in range(0, size, step):
                for x in range(0, size, step):
                    around = [field[(y + a) % size, (x + b) % size] for a in (0, step) for b in (0, step)]
                    field[y + half, x + half] = np.mean(around) + amplitude**2 * noise[n, y + half, x + half]
            for y in range(0, size, step):
                for x in range(0, size, step):
                    for cy, cx in ((y, x + half), (y + half, x)):
                        around = [
                            field[(cy + a) % size, (cx + b) % size]
                            for a, b in ((-half, 0), (half, 0), (0, -half), (0, half))
                        ]
                        field[cy, cx] = np.mean(around) + amplitude**2 * noise[n, cy, cx]
            step, amplitude = half, amplitude / decay
        field = (field - field.min()) / (field.max() - field.min())
        np.testing.assert_allclose(weather.plasma(draws, size, decay)[n].numpy(), field, atol=1e-4)


def test_fog_adds_clouds_and_keeps_the_brightest_value():
    images = pictures(3, 20, 24)
    draws = Draws.of(0, torch.arange(3)).purpose("fog").fold(4)
    clouds = weather.plasma(draws, 32, 2).numpy()[:, None, :20, :24]
    pixels = images.numpy() / 255
    top = pixels.max((1, 2, 3), keepdims=True)
    expected = np.clip((pixels + 1 * clouds) * top / (top + 1), 0, 1) * 255
    found = corrupt(images, "fog", 4).numpy()
    assert np.abs(found - np.floor(expected)).max() <= 1
    assert (found == np.floor(expected)).mean() > 0.99


def test_snow_falls_on_a_whitened_image_from_both_sides():
    image = pictures(1, 17, 14)
    level = (0.25, 0.3, 2.25, 0.6, 3, 2.0, 0.85)
    draws = Draws.of(5, torch.arange(1))
    layer = draws.purpose("flakes").normal(1, 17, 14)[0, 0].double().numpy() * 0.3 + 0.25
    layer = naive_zoom(layer, 2.25)
    layer[layer < 0.6] = 0
    layer = np.floor(np.clip(layer, 0, 1) * 255)
    angle = draws.purpose("wind").uniform() * 90 - 135
    assert -135 <= angle.item() <= -45
    layer = blur.motion_blur(torch.from_numpy(layer)[None, None].float(), 3, 2.0, angle)[0, 0].numpy()
    pixels = image[0].numpy().astype(float)
    gray = 0.299 * pixels[0] + 0.587 * pixels[1] + 0.114 * pixels[2]
    expected = 0.85 * pixels + 0.15 * np.maximum(pixels, 1.5 * gray + 127.5) + layer + np.rot90(layer, 2)
    found = weather.snow(image.float(), level, draws)[0].numpy()
    assert layer.max() > 0
    assert np.mean(np.abs(found - expected) < 1) > 0.99  # a flake at its threshold may go either way


def test_frost_is_a_cut_of_one_texture():
    images = pictures(40, 6, 8)
    sizes = [(10, 12), (9, 30), (7, 9), (20, 20), (8, 11)]
    textures = []
    for number, (height, width) in enumerate(sizes):
        place = torch.arange(height * width).view(1, height, width)
        textures.append(torch.cat([torch.full_like(place, number), place // 256, place % 256]).to(torch.uint8))
    cuts = weather.frost(torch.zeros_like(images, dtype=torch.float32), (1, 1), Draws.of(0, torch.arange(40)), textures)
    seen = set()
    for cut in cuts.long():
        number = int(cut[0, 0, 0])
        seen.add(number)
        first = int(cut[1, 0, 0]) * 256 + int(cut[2, 0, 0])
        top, left = divmod(first, sizes[number][1])
        assert torch.equal(cut, textures[number][:, top : top + 6, left : left + 8].long())
    assert seen == {0, 1, 2, 3, 4}
    mixed = weather.frost(images.float(), (0.75, 0.45), Draws.of(0, torch.arange(40)), textures)
    torch.testing.assert_close(mixed, images.float() * 0.75 + cuts * 0.45)


def test_frost_textures_are_five_and_fit_any_image():
    textures = make_textures()
    assert len(textures) == 5
    assert all(texture.dtype == torch.uint8 and texture.shape == (3, 480, 720) for texture in textures)
    assert not torch.equal(textures[1], textures[2])
    small = frost_textures("cifar")
    assert all(torch.equal(texture, whole[:, 2::5, 2::5]) for texture, whole in zip(small, textures, strict=True))
    for size in ((32, 32), (200, 60), (95, 143), (96, 144), (1, 3000)):
        for texture in small:
            height, width = enlarged_size(texture, size)
            assert height > size[0]
            assert width > size[1]
            assert height / width == pytest.approx(96 / 144, rel=0.05)


def test_a_cut_of_an_enlarged_texture_is_a_cut_of_a_bilinear_enlargement():
    texture = make_textures()[3][:, :40, :50]
    size = (101, 127)
    plane = texture[None].float()
    whole = torch.nn.functional.interpolate(plane, size=size, mode="bilinear", align_corners=False)[0]
    top, left = torch.tensor([0, 33, 61]), torch.tensor([27, 0, 11])
    for cut, y, x in zip(cut_textures(texture, size, top, left, (40, 100)), top, left, strict=True):
        apart = cut.float() - whole[:, y : y + 40, x : x + 100]
        assert apart.abs().max() <= 0.5 + 1e-3


def test_frost_photographs_come_from_a_folder(tmp_path: Path):
    for number in range(1, 6):
        pixels = np.full((200, 300, 3), number * 40, np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"frost{number}.png")
    images = torch.zeros(50, 3, 32, 32, dtype=torch.uint8)
    frosted = corrupt(images, "frost", 1, frost=tmp_path)
    values = {int(value) for value in frosted.unique()}
    assert values == {8, 16, 24, 32, 40}
    assert (frosted.flatten(1).amax(1) == frosted.flatten(1).amin(1)).all()


def test_frost_folder_without_a_photograph_is_an_error(tmp_path: Path):
    with pytest.raises(FileError, match=rf"^{tmp_path}: .*frost1\.png"):
        corrupt(pictures(1), "frost", 1, frost=tmp_path)
    (tmp_path / "frost1.png").write_bytes(b"no picture")
    with pytest.raises(FileError, match=r"/frost1\.png: "):
        corrupt(pictures(1), "frost", 1, frost=tmp_path)


def test_brightness_raises_the_value_of_hsv():
    image = pictures(1, 8, 8)
    image[0, :, 0, 0] = 0
    found = corrupt(image, "brightness", 5)[0].numpy()
    for y in range(8):
        for x in range(8):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[0, :, y, x].numpy() / 255))
            expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))) * 255
            assert np.abs(found[:, y, x] - np.floor(expected + 1e-3)).max() <= 1


# ----------------------------------------------------------------------------------------------------------- digital


def test_contrast_draws_towards_each_channels_mean():
    image = pictures(1)
    pixels = image[0].numpy().astype(float)
    mean = pixels.mean((1, 2), keepdims=True)
    expected = np.floor((pixels - mean) * 0.3 + mean)
    assert np.abs(corrupt(image, "contrast", 4)[0].numpy() - expected).max() <= 1


def test_elastic_shear_takes_three_points_where_they_were_moved():
    """The pixel at a moved point reads the original at the unmoved one, to OpenCV's 1/32 pixel."""
    draws = Draws.of(0, torch.arange(20))
    height, width, reach = 64, 48, 4.0
    across, down = digital._affine_grid(draws, reach, height, width)
    points = np.array([[24 + 16, 32 + 16], [24 + 16, 32 - 16], [24 - 16, 32 - 16]])
    moves = (draws.uniform(3, 2).double().numpy() * 2 - 1) * reach
    for n in range(20):
        moved = points + moves[n]
        # An affine map is fixed by three points: fit it on the grid and evaluate at the moved points.
        grid = np.array([[x, y, 1] for y in range(0, height, 7) for x in range(0, width, 5)], float)
        reads = np.array([[across[n, int(y), int(x)], down[n, int(y), int(x)]] for x, y, _ in grid])
        fit = np.linalg.lstsq(grid, reads, rcond=None)[0]
        np.testing.assert_allclose(np.c_[moved, np.ones(3)] @ fit, points, atol=0.03)


def test_elastic_reads_bilinearly_and_mirrors():
    image = pictures(1, 12, 10, channels=1)
    draws = Draws.of(3, torch.arange(1))
    pixels = image[0, 0].numpy().astype(float)

    def read(source: np.ndarray, y: float, x: float, fold) -> float:
        y0, x0 = math.floor(y), math.floor(x)
        ty, tx = y - y0, x - x0
        corner = lambda a, b: source[fold(a, 12), fold(b, 10)]  # noqa: E731
        top = corner(y0, x0) * (1 - tx) + corner(y0, x0 + 1) * tx
        return top * (1 - ty) + (corner(y0 + 1, x0) * (1 - tx) + corner(y0 + 1, x0 + 1) * tx) * ty

    def with_edge(index: int, size: int) -> int:
        index %= 2 * size
        return min(index, 2 * size - 1 - index)

    across, down = (grid[0].numpy() for grid in digital._affine_grid(draws.purpose("points"), 2.0, 12, 10))
    sheared = np.array([[read(pixels, down[y, x], across[y, x], mirrored) for x in range(10)] for y in range(12)])
    found = digital.elastic_transform(image.float(), (0, 0, 2.0), draws)[0, 0].numpy()
    np.testing.assert_allclose(found, sheared, atol=0.01)

    field = draws.purpose("field").integers(1 << 16, 2, 12, 10)[0].numpy() / 2**15 - 1
    moves = [naive_gaussian(plane, 1.2, 3, "reflect") * 5 for plane in field]
    expected = [
        [read(sheared, y + moves[1][y, x], x + moves[0][y, x], with_edge) for x in range(10)] for y in range(12)
    ]
    found = digital.elastic_transform(image.float(), (5.0, 1.2, 2.0), draws)[0, 0].numpy()
    np.testing.assert_allclose(found, np.array(expected), atol=0.1)


@pytest.mark.parametrize("size", [(32, 32), (40, 57), (7, 100)])
@pytest.mark.parametrize("scale", ["cifar", "imagenet"])
def test_pixelate_is_pillows_box_filter(size: tuple[int, int], scale):
    image = pictures(1, *size)
    for severity in SEVERITIES:
        share = severity_level("pixelate", severity, scale)
        picture = Image.fromarray(image[0].permute(1, 2, 0).numpy())
        small = picture.resize((max(1, int(size[1] * share)), max(1, int(size[0] * share))), Image.Resampling.BOX)
        expected = np.asarray(small.resize((size[1], size[0]), Image.Resampling.BOX)).astype(int)
        found = corrupt(image, "pixelate", severity, scale=scale)[0].permute(1, 2, 0).numpy()
        assert np.abs(found - expected).max() <= 1
        assert (found == expected).mean() > 0.995


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_compression_is_pillows(channels: int):
    images = pictures(5, 19, 34, channels=channels)
    found = corrupt(images, "jpeg_compression", 3).permute(0, 2, 3, 1).numpy()
    for image, ours in zip(images.permute(0, 2, 3, 1).numpy(), found, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image if channels == 3 else image[..., 0]).save(buffer, "JPEG", quality=58)
        expected = np.asarray(Image.open(buffer)).reshape(image.shape)
        np.testing.assert_array_equal(ours, expected)


# --------------------------------------------------------------------------------------------------- the other device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (100, 96)])
def test_cuda_agrees_with_the_cpu(name: str, size: tuple[int, int]):
    """Up to rounding: a value on the edge of truncation may fall by one; a flake or photon at a threshold may flip."""
    images = pictures(8, *size)
    for severity in (1, 3, 5):
        here = corrupt(images, name, severity, seed=2).int()
        there = corrupt(images.cuda(), name, severity, seed=2).cpu().int()
        apart = (here - there).abs()
        assert (apart <= 1).float().mean().item() > 0.999
        assert (apart == 0).float().mean().item() > 0.99


# ------------------------------------------------------------------------------------ the published generator's output


def data(part: str) -> Path:
    """A part of the folder that TESTTIME_DATA names; the test is skipped where it is absent."""
    root = os.environ.get("TESTTIME_DATA")
    if not root:
        pytest.skip("TESTTIME_DATA is not set: no published examples to compare with")
    path = Path(root, part)
    if not path.exists():
        pytest.skip(f"TESTTIME_DATA has no {part}")
    return path


def clean_images() -> torch.Tensor:
    """The first 100 test images of CIFAR-10, uint8 (100, 3, 32, 32)."""
    records = np.fromfile(data("cifar-10-batches-bin") / "test_batch.bin", np.uint8, count=100 * 3073)
    return torch.from_numpy(records.reshape(100, 3073)[:, 1:].reshape(100, 3, 32, 32).copy())


def published(name: str, severity: int) -> torch.Tensor:
    array = np.load(data("cifar10c_reference") / f"{name}_{severity}.npy", allow_pickle=False)
    return torch.from_numpy(array).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "name", ["defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"]
)
def test_corruptions_without_chance_are_the_published_ones_pixel_by_pixel(name: str):
    """At least 99 % of all values are within 2/255 of the published generator's, at every severity."""
    clean = clean_images()
    for severity in SEVERITIES:
        apart = (corrupt(clean, name, severity).int() - published(name, severity).int()).abs()
        assert (apart <= 2).double().mean().item() >= 0.99


def measure(images: torch.Tensor, clean: torch.Tensor) -> dict[str, torch.Tensor]:
    """The statistics that are compared; see the test below."""
    change = images.double() - clean.double()
    centred = images.double() - images.double().mean((2, 3), keepdim=True)
    power = torch.fft.fft2(centred.float()).abs().square().mean((0, 1))  # (32, 32)
    cycles = torch.fft.fftfreq(32) * 32
    radius = torch.hypot(cycles[:, None], cycles[None, :])
    edges = [0.5, 2.5, 5, 8, 12, 17]
    bands = [power[(radius >= low) & (radius < high)].mean() for low, high in itertools.pairwise(edges)]
    return {
        "mean change": change.mean(),
        "deviation of the change": change.std(),
        "mean": images.double().mean(),
        "contrast": images.double().std((2, 3)).mean(),
        "spectrum": torch.stack(bands),
    }


# How often each of the 100 images is corrupted, to bring our side's sampling error well below the tolerance.
REPEATS = {"gaussian_noise": 2, "shot_noise": 2, "impulse_noise": 4, "glass_blur": 4}


@pytest.mark.parametrize(
    ("name", "photographs", "tolerance"),
    [
        *((name, False, 0.10) for name in CHANCE if name != "frost"),
        ("frost", True, 0.10),
        ("frost", False, 0.20),
    ],
)
def test_corruptions_by_chance_have_the_published_statistics(name: str, photographs: bool, tolerance: float):
    """At every severity, within 10 % of the published output on the same 100 images (made frost: within 20 %).

    Compared are, over all values of all images: the mean and the standard deviation of the change; the mean of the
    corrupted images; their contrast (the standard deviation within a channel of an image, averaged); and their radial
    power spectrum in five bands (0.5 to 2.5, to 5, to 8, to 12 and to 17 cycles per image, the mean power of each).
    All are compared relative to the published value, but for the mean change, which can be near zero for no reason of
    its own: it is compared relative to its size or to the change's standard deviation, whichever is larger. The
    published side is one draw of 100 images, with its own sampling error; ours is averaged over several draws, so that
    what is compared is our expectation with the published sample. The tolerance is not widened for either.
    """
    clean = clean_images()
    folder = data("frost") if photographs else None
    repeats = REPEATS.get(name, 20)
    many = clean.repeat(repeats, 1, 1, 1)
    for severity in SEVERITIES:
        theirs = measure(published(name, severity), clean)
        ours = measure(corrupt(many, name, severity, frost=folder), many)
        for key, value in theirs.items():
            size = value.abs()
            if key == "mean change":
                size = torch.maximum(size, theirs["deviation of the change"])
            apart = ((ours[key] - value).abs() / size).max().item()
            assert apart <= tolerance, f"{name} {severity}: {key} is {apart:.1%} off"
