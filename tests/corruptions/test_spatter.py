"""Spatter against naive per-pixel oracles of OpenCV's definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from naive_filters import mirrored, naive_gaussian

from pictures import pictures, smooth_pictures
from testtime.corruptions import SEVERITIES, corrupt, severity_level, spatter
from testtime.randomness import Draws

AROUND = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
EMBOSS = [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]


def naive_filter(plane: np.ndarray, kernel, fold) -> np.ndarray:
    height, width = plane.shape
    out = np.zeros((height, width), int)
    for y, x in np.ndindex(height, width):
        out[y, x] = sum(
            kernel[dy + 1][dx + 1] * int(plane[fold(y + dy, height), fold(x + dx, width)]) for dy, dx in AROUND
        )
    return out


def naive_canny(plane: np.ndarray) -> np.ndarray:
    height, width = plane.shape
    sobel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    across, down = (naive_filter(plane, k, lambda i, size: min(max(i, 0), size - 1)) for k in (sobel, sobel.T))
    size = np.pad(np.abs(across) + np.abs(down), 1)
    found, stack = np.zeros((height, width), int), []
    for y, x in np.ndindex(height, width):
        gx, gy, m = int(across[y, x]), int(down[y, x]), size[y + 1, x + 1]
        if m <= 50:
            continue
        angle = math.degrees(math.atan2(abs(gy), abs(gx)))
        if angle < 22.5:
            peak = m > size[y + 1, x] and m >= size[y + 1, x + 2]
        elif angle > 67.5:
            peak = m > size[y, x + 1] and m >= size[y + 2, x + 1]
        else:
            s = -1 if gx * gy < 0 else 1
            peak = m > size[y, x + 1 - s] and m > size[y + 2, x + 1 + s]
        if peak:
            found[y, x] = 1
            if m > 150:
                stack.append((y, x))
    edges = np.zeros((height, width), bool)
    while stack:
        y, x = stack.pop()
        if 0 <= y < height and 0 <= x < width and found[y, x] and not edges[y, x]:
            edges[y, x] = True
            stack += [(y + dy, x + dx) for dy, dx in AROUND]
    return edges


def naive_distances(edges: np.ndarray) -> np.ndarray:
    """Two passes with the upper and the lower half of the 5 × 5 mask."""
    height, width = edges.shape
    out = np.where(edges, 0.0, 1e9)
    costs = {(0, 1): 1, (1, 0): 1, (1, 1): 1.4, (1, 2): 2.1969, (2, 1): 2.1969}
    half = [(-1, -2), (-2, -1), (-2, 1), (-1, 2), (-1, -1), (-1, 0), (-1, 1), (0, -1)]
    points = list(np.ndindex(height, width))
    for order, sign in ((points, 1), (points[::-1], -1)):
        for y, x in order:
            for dy, dx in half:
                ny, nx = y + sign * dy, x + sign * dx
                if 0 <= ny < height and 0 <= nx < width:
                    out[y, x] = min(out[y, x], out[ny, nx] + costs[abs(dy), abs(dx)])
    return np.minimum(out, 20)


def naive_equalize(plane: np.ndarray) -> np.ndarray:
    counts = np.bincount(plane.ravel(), minlength=256)
    first = int(np.flatnonzero(counts)[0])
    rest = plane.size - counts[first]
    if not rest:
        return plane
    return np.array([round(counts[first + 1 : v + 1].sum() * 255 / rest) for v in range(256)])[plane]


def drops(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Smooth planes with empty gaps, int32 in 0 to 255, with weak edges and strong ones."""
    noise = pictures(count, height, width, seed=seed).numpy()
    planes = np.stack([naive_gaussian(plane, 1.2, 4, "edge") for plane in noise])
    planes = np.clip((planes - 0.5) * 900 + 128, 0, 255)
    planes[planes < 110] = 0
    return torch.from_numpy(planes).to(torch.int32)


@pytest.mark.parametrize("size", [(24, 31), (1, 40), (17, 2), (1, 1)])
def test_edges_are_cannys(size: tuple[int, int]):
    planes = drops(4, *size)
    found = spatter.find_edges(planes).numpy()
    for plane, edges in zip(planes.numpy(), found, strict=True):
        np.testing.assert_array_equal(edges, naive_canny(plane))


def test_weak_edges_count_only_if_connected_to_strong_ones():
    ramp = torch.linspace(0, 120, 40).round().repeat(2, 1)  # a step that fades along the edge
    planes = torch.cat([torch.zeros_like(ramp), ramp]).to(torch.int32)[None]
    whole, weak = spatter.find_edges(planes)[0], spatter.find_edges(planes[..., :12])[0]
    assert whole[:, :12].any()
    assert not weak.any()


@pytest.mark.parametrize("size", [(30, 45), (1, 50), (60, 3), (2, 2)])
def test_distances_are_those_of_the_two_pass_transform(size: tuple[int, int]):
    for share in (0, 1, 8):
        edges = Draws.of(1, torch.arange(3)).integers(1000, *size) < share
        found = spatter.edge_distances(edges).double() / 2**16
        for mask, distances in zip(edges.numpy(), found.numpy(), strict=True):
            np.testing.assert_allclose(distances, naive_distances(mask), atol=1e-3)


def test_histograms_are_equalised_as_in_opencv():
    planes = Draws.of(2, torch.arange(5)).integers(21, 9, 14).to(torch.int32)
    planes[1] = planes[1].clamp(3, 6)
    planes[2] = 20
    planes[3] = 0
    for plane, found in zip(planes.numpy(), spatter.equalize(planes).numpy(), strict=True):
        np.testing.assert_array_equal(found, naive_equalize(plane))


@pytest.mark.parametrize(("scale", "severity"), [*itertools.product(["cifar"], SEVERITIES), ("imagenet", 3)])
def test_spatter_is_a_layer_of_water_or_mud(scale, severity: int):
    image = smooth_pictures(1, 26, 21)
    level = severity_level("spatter", severity, scale)
    mean, deviation, sigma, threshold, amount, kind = level
    draws = Draws.of(7, torch.arange(1))
    noise = draws.normal(1, 26, 21)[0, 0].double().numpy()
    layer = naive_gaussian(noise * deviation + mean, sigma, 4, "edge")
    layer[layer < threshold] = 0
    assert layer.any()
    pixels = image[0].numpy().astype(float)
    if kind == "water":
        eight = np.floor(layer * 255).astype(int) % 256
        ones = np.ones((3, 3), int)
        near = np.pad(naive_distances(naive_canny(eight)), 1, mode="reflect")
        near = np.mean([near[1 + dy : 27 + dy, 1 + dx : 22 + dx] for dy, dx in AROUND], axis=0) + 1e-6
        relief = np.clip(naive_filter(naive_equalize(near.astype(int)), EMBOSS, mirrored), 0, 255)
        mask = eight * np.round(naive_filter(relief, ones, mirrored) / 9)
        mask = mask / mask.max() * amount
        expected = pixels + mask * np.array([175, 238, 238])[:, None, None]
    else:
        mask = naive_gaussian((layer > threshold).astype(float), amount, 4, "edge")
        mask[mask < 0.8] = 0
        expected = pixels * (1 - mask) + mask * np.array([63, 42, 20])[:, None, None]
    found = spatter.spatter(image.float(), level, draws)[0].numpy()
    assert mask.any()
    assert np.mean(np.abs(found - expected) < 0.05) > 0.99  # a drop on the edge of truncation may fall by one level


def test_no_drops_leave_the_image_unchanged():
    image = smooth_pictures(1)
    draws = Draws.of(0, torch.arange(1))
    for kind in ("water", "mud"):
        assert torch.equal(spatter.spatter(image.float(), (0, 0.1, 1, 0.9, 0.5, kind), draws), image.float())


def test_mud_darkens_and_water_brightens():
    images = smooth_pictures(8).clamp(min=70)
    assert (corrupt(images, "spatter", 3) >= images).all()
    assert (corrupt(images, "spatter", 5) <= images).all()
