"""The corruptions against the published generator's output.

This needs a folder, named by TESTTIME_DATA, with CIFAR-10's binary version (`cifar-10-batches-bin`), the published
generator's output on its first 100 test images (`cifar10c_reference/NAME_SEVERITY.npy`, uint8 (100, 32, 32, 3)) and the
frost photographs (`frost`).
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from testtime.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, corrupt
from testtime.data import read_frost

FIXED = (
    *("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
    *("gaussian_blur", "saturate"),
)
CHANCE = [name for name in (*CORRUPTIONS, *EXTRA) if name not in FIXED]


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


@pytest.mark.parametrize("name", FIXED)
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
REPEATS = {"gaussian_noise": 2, "shot_noise": 2, "impulse_noise": 4, "glass_blur": 4, "speckle_noise": 2}


@pytest.mark.parametrize(
    ("name", "photographs", "tolerance"),
    [
        *((name, False, 0.10) for name in CHANCE if name != "frost"),
        ("frost", True, 0.10),
        ("frost", False, 0.20),
    ],
)
def test_corruptions_by_chance_have_the_published_statistics(name: str, photographs: bool, tolerance: float):
    """At every severity, within 10 % of the published output on the same 100 images (procedural frost: within 20 %).

    Compared are, over all values of all images: the mean and the standard deviation of the change; the mean of the
    corrupted images; their contrast (the standard deviation within a channel of an image, averaged); and their radial
    power spectrum in five bands (0.5 to 2.5, to 5, to 8, to 12 and to 17 cycles per image, the mean power of each).
    All are compared relative to the published value, but for the mean change, which can be near zero for no reason of
    its own: it is compared relative to its size or to the change's standard deviation, whichever is larger. The
    published side is one draw of 100 images, with its own sampling error; ours is averaged over several draws, so that
    what is compared is our expectation with the published sample. The tolerance is not widened for either.
    """
    clean = clean_images()
    textures = read_frost(data("frost") if photographs else None)
    repeats = REPEATS.get(name, 20)
    many = clean.repeat(repeats, 1, 1, 1)
    for severity in SEVERITIES:
        theirs = measure(published(name, severity), clean)
        ours = measure(corrupt(many, name, severity, frost=textures), many)
        for key, value in theirs.items():
            size = value.abs()
            if key == "mean change":
                size = torch.maximum(size, theirs["deviation of the change"])
            apart = ((ours[key] - value).abs() / size).max().item()
            assert apart <= tolerance, f"{name} {severity}: {key} is {apart:.1%} off"
