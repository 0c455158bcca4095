"""What holds for every corruption, whatever the size of the images, torch's defaults and the device."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from pictures import smooth_pictures
from testtime import data
from testtime.corruptions import (
    CORRUPTIONS,
    EXTRA,
    SEVERITIES,
    blur,
    corrupt,
    corrupt_chunks,
    filters,
    frost,
    noise,
    resolve_scale,
    severity_level,
    strips,
    weather,
)
from testtime.corruptions.frost import make_textures
from testtime.corruptions.registry import SIDE_LIMIT
from testtime.randomness import Draws

NAMES = (*CORRUPTIONS, *EXTRA)
FIXED = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
CHANCE = [name for name in NAMES if name not in (*FIXED, "gaussian_blur", "saturate")]


def test_names_are_the_tables_columns():
    assert (
        *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    ) == CORRUPTIONS


def test_sets_of_the_extra_ones_open_by_name_and_are_not_listed():
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    clean = data.open("digits").images(slice(0, 5))
    for name in EXTRA:
        assert torch.equal(data.open(f"digits-c/{name}/3").images(slice(0, 5)), corrupt(clean, name, 3))
    names = [name for name in data.names() if "held-out" not in name]
    listed = (*names, *data.expand("cifar10-c"), *data.expand("imagenet-c/*/5"), *data.expand("digits-c/*/3"))
    assert not any(name in part for name in EXTRA for part in listed)
    assert data.expand("cifar10-c/saturate/5") == ("cifar10-c/saturate/5",)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_comes_out_the_same_alone_and_in_a_batch_in_any_order(name: str):
    images = smooth_pictures(7)
    together = corrupt(images, name, 4, seed=3)
    assert together.dtype == torch.uint8
    assert together.shape == images.shape
    order = torch.tensor([5, 0, 6, 2])
    assert torch.equal(corrupt(images[order], name, 4, seed=3, samples=order), together[order])
    for number in (0, 6):
        alone = corrupt(images[number : number + 1], name, 4, seed=3, samples=torch.tensor([number]))
        assert torch.equal(alone[0], together[number])
    assert torch.equal(corrupt(images, name, 4, seed=3, chunk=2), together)


@pytest.mark.parametrize("name", NAMES)
def test_large_images_come_out_the_same_alone_and_in_a_batch(name: str):
    images = smooth_pictures(3, 70, 96)
    together = corrupt(images, name, 2, seed=1)
    for number in range(3):
        alone = corrupt(images[number : number + 1], name, 2, seed=1, samples=torch.tensor([number]))
        assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("name", CHANCE)
def test_draws_depend_on_the_seed_and_on_the_number_and_on_nothing_else(name: str):
    images = smooth_pictures(1).expand(2, -1, -1, -1)
    before = torch.random.get_rng_state()
    first = corrupt(images, name, 5, seed=0)
    assert torch.equal(first, corrupt(images, name, 5, seed=0))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, corrupt(images, name, 5, seed=1))


@pytest.mark.parametrize("name", NAMES)
def test_floats_take_the_path_of_eight_bits(name: str):
    images = smooth_pictures(2)
    assert torch.equal(corrupt(images.float() / 255, name, 3), corrupt(images, name, 3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (20, 33), (65, 80)])
def test_any_size_and_gray_images_work(name: str, size: tuple[int, int]):
    for channels in (1, 3):
        images = smooth_pictures(2, *size, channels=channels)
        kept = images.clone()
        for severity in (1, 5):
            assert corrupt(images, name, severity).shape == images.shape
        assert torch.equal(images, kept)  # the caller's images are not touched


@pytest.mark.parametrize(
    "name",
    ["defocus_blur", "motion_blur", "zoom_blur", "fog", "contrast", "pixelate", "brightness", "gaussian_blur"],
)
def test_a_gray_image_is_a_colour_image_with_equal_channels(name: str):
    gray = smooth_pictures(2, channels=1)
    colour = corrupt(gray.expand(-1, 3, -1, -1), name, 4)
    assert torch.equal(corrupt(gray, name, 4), colour[:, :1])
    assert torch.equal(colour[:, 0], colour[:, 2])


# Not in these: glass blurs grain away as it goes up, frost dims what it whitens, elastic trades its shear for ripples,
# saturation goes down first and then up.
@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("glass_blur", "frost", "elastic_transform", "saturate")]
)
def test_damage_grows_from_the_first_severity_to_the_last(name: str):
    images = smooth_pictures(24)
    damage = [(corrupt(images, name, s).float() - images.float()).square().mean().item() for s in (1, 3, 5)]
    assert 0 < damage[0] < damage[1] < damage[2]


def test_chunks_cover_the_set_in_order():
    images = smooth_pictures(10)
    parts = list(corrupt_chunks(images, "fog", 2, seed=5, chunk=4))
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 4), (4, 8), (8, 10)]
    assert torch.equal(torch.cat([block for _, block in parts]), corrupt(images, "fog", 2, seed=5))


@pytest.mark.parametrize("name", NAMES)
def test_the_callers_modes_do_not_matter_and_stay(name: str):
    images = smooth_pictures(2)
    expected = corrupt(images, name, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(corrupt(images, name, 3), expected)
    with torch.inference_mode():
        assert torch.equal(corrupt(images, name, 3), expected)
    for _ in corrupt_chunks(images, name, 3, chunk=1):
        assert torch.is_grad_enabled()


def test_an_empty_batch_stays_empty():
    for name in NAMES:
        assert corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), name, 1).shape == (0, 3, 32, 32)


def test_scale_follows_the_short_side():
    assert resolve_scale("auto", 32, 500) == "cifar"
    assert resolve_scale("auto", 64, 64) == "imagenet"
    assert resolve_scale("imagenet", 8, 8) == "imagenet"
    images = smooth_pictures(1)
    assert torch.equal(corrupt(images, "contrast", 1), corrupt(images, "contrast", 1, scale="cifar"))
    assert not torch.equal(corrupt(images, "contrast", 1), corrupt(images, "contrast", 1, scale="imagenet"))


def test_levels_are_the_published_ones():
    assert [severity_level("gaussian_noise", s, "cifar") for s in SEVERITIES] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert [severity_level("shot_noise", s, "imagenet") for s in SEVERITIES] == [60, 25, 12, 5, 3]
    assert severity_level("glass_blur", 4, "imagenet") == (1.1, 3, 2)
    assert severity_level("snow", 3, "cifar") == (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9)
    assert severity_level("elastic_transform", 5, "imagenet") == (0.12, 0.01, 0.02)
    assert severity_level("jpeg_compression", 5, "cifar") == 40
    assert [severity_level("speckle_noise", s, "imagenet") for s in SEVERITIES] == [0.15, 0.2, 0.35, 0.45, 0.6]
    assert [severity_level("gaussian_blur", s, "cifar") for s in SEVERITIES] == [0.4, 0.6, 0.7, 0.8, 1]
    assert severity_level("saturate", 5, "imagenet") == (20, 0.2)
    assert severity_level("spatter", 2, "cifar") == (0.65, 0.1, 0.8, 0.7, 0.5, "water")
    assert severity_level("spatter", 5, "imagenet") == (0.67, 0.4, 1, 0.65, 1.5, "mud")


def test_errors_name_the_argument_and_its_value():
    images = smooth_pictures(2)
    with pytest.raises(ValueError, match=r"^`severity` must be 1 to 5, got 6\.$"):
        corrupt(images, "fog", 6)
    with pytest.raises(ValueError, match=r"`name` must be one of gaussian_noise, .*got 'mist'\."):
        corrupt(images, "mist", 1)
    with pytest.raises(
        ValueError, match=r"`images` must be \(N, C, H, W\) with 1 or 3 channels, got shape \(3, 32, 32\)"
    ):
        corrupt(images[0], "fog", 1)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        corrupt(smooth_pictures(1, channels=2), "fog", 1)
    with pytest.raises(TypeError, match=r"`images` must be uint8, or floating point in \[0, 1\], got torch.int64"):
        corrupt(images.long(), "fog", 1)
    with pytest.raises(ValueError, match=r'`scale` must be "auto", "cifar" or "imagenet", got \'mnist\''):
        corrupt(images, "fog", 1, scale="mnist")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`samples` must have one index for each of 2 images, got \(3,\)"):
        corrupt(images, "fog", 1, samples=torch.arange(3))
    with pytest.raises(TypeError, match="`samples` must be integers"):
        corrupt(images, "fog", 1, samples=torch.zeros(2))
    with pytest.raises(ValueError, match="`chunk` must be at least 1, got 0"):
        corrupt(images, "fog", 1, chunk=0)
    with pytest.raises(ValueError, match="`severity` must be 1 to 5, got 0"):
        severity_level("fog", 0, "cifar")


@pytest.mark.parametrize("scale", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", NAMES)
def test_strips_are_the_rows_of_the_whole(name: str, scale, monkeypatch: pytest.MonkeyPatch):
    batches = [smooth_pictures(2, 29, 41), smooth_pictures(1, 50, 17, channels=1)]
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
    """The square over the long side would take a gigabyte; all together add less than the textures do."""
    program = """
import resource, torch
from testtime.corruptions import CORRUPTIONS, EXTRA, corrupt
torch.set_num_threads(1)
images = torch.arange(16000).remainder(256).to(torch.uint8).view(1, 1, 1, 16000)
corrupt(images[..., :100], "frost", 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in (*CORRUPTIONS, *EXTRA):
    for long in (images, images.transpose(2, 3)):
        assert corrupt(long, name, 5).shape == long.shape
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert int(result.stdout) < 100  # MB


def test_there_is_a_limit_to_the_size_and_not_to_the_batch():
    for shape in ((1, 1, 1, SIDE_LIMIT + 1), (1, 1, SIDE_LIMIT + 1, 1), (1, 1, 8001, 8000)):
        with pytest.raises(ValueError, match=r"^`images` must have at most 65,500 .* 64,000,000 in total, got shape"):
            corrupt(torch.zeros(1, dtype=torch.uint8).expand(shape), "contrast", 1)
    long = torch.zeros(1, dtype=torch.uint8).expand(1, 1, 1, SIDE_LIMIT)
    assert corrupt(long, "jpeg_compression", 1).shape == long.shape


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
        frost._procedural,
        make_textures,
        filters.gaussian_matrix,
        filters.box_taps,
        filters._box_matrix,
        blur._zoom_operator,
        noise._alias_tables,
    ):
        cached.cache_clear()


@pytest.mark.parametrize(
    "what", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow), "meta", "inference", "autocast"]
)
def test_torchs_defaults_do_not_matter(what: str):
    batches = [smooth_pictures(2), smooth_pictures(2, 70, 66, channels=1)]
    severities = {name: 1 + place % 5 for place, name in enumerate(NAMES)}
    forget()
    expected = {name: [corrupt(images, name, severities[name]) for images in batches] for name in NAMES}
    forget()
    with torch_default(what):
        found = {name: [corrupt(images, name, severities[name]) for images in batches] for name in NAMES}
    for name in NAMES:
        assert all(torch.equal(a, b) for a, b in zip(expected[name], found[name], strict=True)), name
    # And what was cached there serves where gradients are wanted.
    assert torch.equal(corrupt(batches[0].float() / 255, "elastic_transform", 3), expected["elastic_transform"][0])
    for name in ("zoom_blur", *EXTRA):
        wanting = (batches[0].float() / 255).requires_grad_()
        assert torch.equal(corrupt(wanting, name, severities[name]), expected[name][0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(32, 32), (100, 96)])
def test_cuda_agrees_with_the_cpu(name: str, size: tuple[int, int]):
    """Up to rounding: a value on the edge of truncation may fall by one; a flake or photon at a threshold may flip."""
    images = smooth_pictures(8, *size)
    for severity in (1, 3, 5):
        here = corrupt(images, name, severity, seed=2).int()
        there = corrupt(images.cuda(), name, severity, seed=2).cpu().int()
        apart = (here - there).abs()
        assert (apart <= 1).float().mean().item() > 0.999
        assert (apart == 0).float().mean().item() > 0.99
