"""The digital corruptions against naive per-image oracles."""

from __future__ import annotations

import colorsys
import io
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from naive_filters import mirrored, naive_gaussian
from PIL import Image

from pictures import smooth_pictures
from testtime.corruptions import SEVERITIES, corrupt, digital, severity_level
from testtime.randomness import Draws


def test_contrast_draws_towards_each_channels_mean():
    image = smooth_pictures(1)
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
    image = smooth_pictures(1, 12, 10, channels=1)
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
    image = smooth_pictures(1, *size)
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
    images = smooth_pictures(5, 19, 34, channels=channels)
    found = corrupt(images, "jpeg_compression", 3).permute(0, 2, 3, 1).numpy()
    for image, ours in zip(images.permute(0, 2, 3, 1).numpy(), found, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image if channels == 3 else image[..., 0]).save(buffer, "JPEG", quality=58)
        expected = np.asarray(Image.open(buffer)).reshape(image.shape)
        np.testing.assert_array_equal(ours, expected)


PROGRAM = """
import os, signal, torch
from testtime.corruptions import digital
torch.set_num_threads(1)
images = torch.full((2, 3, 96, 96), 100.0)

def run():
    return int(digital.jpeg_compression(images, 50).shape[0])

assert run() == 2
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(run())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_large_images_are_compressed_after_a_fork():
    own = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=own)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("scale", ["cifar", "imagenet"])
def test_saturate_changes_the_saturation_of_hsv(scale):
    image = smooth_pictures(1, 8, 8)
    image[0, :, 0, 0] = 0
    image[0, :, 0, 1] = 90  # gray, which has the hue of red
    for severity in SEVERITIES:
        factor, add = severity_level("saturate", severity, scale)
        found = corrupt(image, "saturate", severity, scale=scale)[0].numpy()
        for y, x in np.ndindex(8, 8):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[0, :, y, x].numpy() / 255))
            expected = np.array(colorsys.hsv_to_rgb(hue, min(saturation * factor + add, 1), value)) * 255
            assert np.abs(found[:, y, x] - np.floor(expected + 1e-3)).max() <= 1


def test_saturate_leaves_gray_images_unchanged():
    images = smooth_pictures(2, channels=1)
    assert torch.equal(corrupt(images, "saturate", 5), images)
