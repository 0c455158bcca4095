"""Jigsaw: tiles moved by hand, and the properties of the arrangements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from pictures import pictures
from testtime import tasks
from testtime.randomness import Draws
from testtime.tasks import Jigsaw
from testtime.tasks.jigsaw import list_arrangements


def arrange_by_hand(image: Tensor, grid: int, order: tuple[int, ...]) -> np.ndarray:
    """The tile at position i is the one that was at position order[i]."""
    pixels = image.numpy()
    height, width = pixels.shape[1] // grid, pixels.shape[2] // grid
    made = np.zeros_like(pixels)
    for there, here in enumerate(order):
        (top, left), (row, column) = divmod(there, grid), divmod(here, grid)
        tile = pixels[:, row * height : (row + 1) * height, column * width : (column + 1) * width]
        made[:, top * height : (top + 1) * height, left * width : (left + 1) * width] = tile
    return made


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("grid", "height", "width"), [(2, 6, 6), (2, 4, 10), (3, 9, 6)])
def test_tiles_are_moved_as_the_target_says(grid: int, height: int, width: int, dtype: torch.dtype) -> None:
    images, task = pictures(40, 3, height, width, seed=9, dtype=dtype), Jigsaw(grid)
    views, targets = task.views(images, Draws.of(0, torch.arange(40)))
    assert views.dtype == dtype
    assert len(set(targets.tolist())) > 10
    for image, view, target in zip(images, views, targets.tolist(), strict=True):
        assert np.array_equal(view.numpy(), arrange_by_hand(image, grid, list_arrangements(grid)[target]))


def test_a_view_depends_on_its_own_key_alone() -> None:
    images, order = pictures(20, 3, 6, 6, seed=9), torch.arange(19, -1, -1)
    views, targets = Jigsaw().views(images, Draws.of(3, torch.arange(20)))
    again, others = Jigsaw().views(images[order], Draws.of(3, order))
    assert torch.equal(again, views[order])
    assert torch.equal(others, targets[order])


@pytest.mark.parametrize("grid", [2, 3])
def test_the_probe_starts_with_the_image(grid: int) -> None:
    images, task = pictures(3, 3, 6, 6, seed=9), Jigsaw(grid)
    views, targets = task.probe(images)
    assert views.shape == (12, 3, 6, 6)
    assert torch.equal(views[::4], images)
    assert targets.tolist() == [0, 6, 12, 18] * 3
    assert np.array_equal(views[5].numpy(), arrange_by_hand(images[1], grid, list_arrangements(grid)[6]))


def test_arrangements() -> None:
    assert list_arrangements(2) == tuple(itertools.permutations(range(4)))
    large = list_arrangements(3)
    assert large[0] == tuple(range(9))
    assert len(large) == Jigsaw(3).outputs == 24
    differing = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in itertools.combinations(large, 2)]
    assert min(differing) >= 7


def test_names_sizes_and_choices() -> None:
    assert tasks.make({"name": "jigsaw", "grid": 3}) == Jigsaw(3)
    assert tasks.describe(Jigsaw()) == "jigsaw"
    assert tasks.describe(Jigsaw(3)) == {"name": "jigsaw", "grid": 3}
    assert tasks.count_views(Jigsaw(3)) == (1, 4)
    assert Jigsaw().chance == pytest.approx(23 / 24)
    with pytest.raises(ValueError, match=r"`grid`.*4"):
        Jigsaw(4)
    with pytest.raises(ValueError, match="divisible by 2, got 5×6"):
        Jigsaw().probe(torch.zeros(1, 3, 5, 6))
