"""Sets that are corrupted as they are read: the same images in any order, increasing noise along the stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import testtime.data
from testtime.corruptions import CORRUPTIONS, corrupt, severity_level
from testtime.data import Corrupted, Gradual, TensorSet, digits, read_frost


@pytest.fixture(scope="module")
def gray() -> TensorSet:
    """Uniform gray, so that what differs from it is noise."""
    images = torch.full((200, 1, 32, 32), 128, dtype=torch.uint8)
    return TensorSet("gray", images, torch.arange(200) % 10)


@pytest.fixture(scope="module")
def frost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of frost, so to speak: making procedural textures takes seconds."""
    folder = tmp_path_factory.mktemp("frost")
    rng = np.random.default_rng(0)
    for number in range(1, 7):
        pixels = rng.integers(0, 256, (300, 400, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"frost{number}.{'png' if number < 4 else 'jpg'}")
    return folder


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupted_sets_do_not_depend_on_how_they_are_read(corruption: str, frost: Path) -> None:
    base = digits.load("test")
    part = TensorSet("digits", base.images(slice(0, 12)), torch.arange(12) % 10)
    test_set = Corrupted(part, corruption, 3, seed=5, frost=frost)
    whole = test_set.images(slice(None))
    assert whole.equal(
        corrupt(part.images(slice(None)), corruption, 3, seed=5, samples=torch.arange(12), frost=read_frost(frost))
    )
    for numbers, images, labels in test_set.chunks(5, [11, 0, 7, 3, 3, 8]):
        assert images.equal(whole[numbers])
        assert labels is not None
        assert labels.equal(numbers % 10)


def test_corrupted_sets_have_their_bases_labels_and_a_name() -> None:
    test_set = testtime.data.open("digits-c/fog/5", seed=3)
    base = digits.load()
    assert (test_set.name, len(test_set), test_set.shape) == ("digits-c/fog/5", 500, (1, 16, 16))
    assert test_set.labels is not None
    assert base.labels is not None
    assert test_set.labels.equal(base.labels)
    assert "seed 3" in test_set.origin
    assert not test_set.images([0]).equal(testtime.data.open("digits-c/fog/5", seed=4).images([0]))
    assert test_set.fingerprint() != testtime.data.open("digits-c/fog/5", seed=4).fingerprint()
    assert Corrupted(base, "fog", 5).name == "digits-c/fog/5"


def test_bad_corruptions_are_named(gray: TensorSet) -> None:
    with pytest.raises(ValueError, match="`corruption` must be one of gaussian_noise"):
        Corrupted(gray, "mist", 1)
    with pytest.raises(ValueError, match="`level` must be 1 to 5, got 0"):
        Corrupted(gray, "fog", 0)
    with pytest.raises(ValueError, match="`noise` must be one of"):
        Gradual(gray, "fog")


@pytest.mark.parametrize("noise", ["gaussian_noise", "shot_noise", "impulse_noise"])
@pytest.mark.parametrize("scale", ["cifar", "imagenet"])
def test_strength_runs_from_level_1_to_level_5(gray: TensorSet, noise: str, scale) -> None:
    strengths = Gradual(gray, noise, scale=scale).strengths(torch.arange(200)).tolist()
    assert strengths[0] == pytest.approx(severity_level(noise, 1, scale), rel=1e-6)
    assert strengths[-1] == pytest.approx(severity_level(noise, 5, scale), rel=1e-6)
    assert sorted(strengths, reverse=noise == "shot_noise") == strengths


@pytest.mark.parametrize("noise", ["gaussian_noise", "shot_noise", "impulse_noise"])
def test_the_measured_deviation_grows_linearly(gray: TensorSet, noise: str) -> None:
    stream = Gradual(gray, noise)
    deviations = torch.cat([images.float().sub(128).flatten(1).std(1) for _, images, _ in stream.chunks(100)])
    first, last = (Corrupted(gray, noise, level).images(slice(0, 50)).float().std() for level in (1, 5))
    line = torch.lerp(first, last, torch.arange(200) / 199)
    blocks = (deviations - line).view(4, 50).mean(1)  # four stretches of the stream
    assert blocks.abs().max() < 0.04 * last


def test_the_stream_is_the_base_shuffled_once(gray: TensorSet) -> None:
    base = digits.load("test")
    stream = Gradual(base, "gaussian_noise", seed=2)
    assert stream.ordered
    assert sorted(stream.order.tolist()) == list(range(500))
    assert stream.order.tolist() != list(range(500))
    assert stream.labels is not None
    assert base.labels is not None
    assert stream.labels.equal(base.labels[stream.order])
    clean = base.images(stream.order[:20])
    noisy = stream.images(slice(0, 20))
    assert (clean.float() - noisy.float()).abs().mean() < 20
    assert stream.images([19, 4]).equal(noisy[[19, 4]])
    assert not Gradual(base, "gaussian_noise", seed=3).order.equal(stream.order)


def test_one_image_is_no_division_by_zero() -> None:
    one = TensorSet("one", torch.full((1, 1, 8, 8), 9, dtype=torch.uint8))
    assert Gradual(one, "shot_noise").images([0]).shape == (1, 1, 8, 8)
