"""The noises against the laws of their distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pictures import smooth_pictures
from testtime.corruptions import corrupt, corrupt_noise, severity_level
from testtime.corruptions.noise import poisson
from testtime.randomness import Draws


def test_gaussian_noise_has_its_standard_deviation():
    images = torch.full((64, 3, 32, 32), 128, dtype=torch.uint8)
    change = corrupt(images, "gaussian_noise", 5).float() - 128
    assert change.mean().item() == pytest.approx(-0.5, abs=0.25)  # truncation takes half a step
    assert change.std().item() == pytest.approx(25.5, rel=0.01)
    # Normal: 68.3 % within one deviation, 95.4 % within two.
    assert (change.abs() < 25.5).float().mean().item() == pytest.approx(0.683, abs=0.01)
    assert (change.abs() < 51.0).float().mean().item() == pytest.approx(0.954, abs=0.005)


def test_speckle_noise_is_proportional_to_the_value():
    for value in (0, 40, 120):
        images = torch.full((64, 3, 32, 32), value, dtype=torch.uint8)
        change = corrupt(images, "speckle_noise", 5).float() - value
        assert change.std().item() == pytest.approx(0.2 * value, rel=0.02)
        assert change.mean().item() == pytest.approx(-0.5 if value else 0, abs=0.25)  # truncation takes half a step


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
    images = smooth_pictures(6)
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
        corrupt_noise(smooth_pictures(1), "fog", torch.ones(1), Draws.of(0, torch.arange(1)))  # pyright: ignore[reportArgumentType]
