"""Masked patches: views and targets against loops over patches."""

from __future__ import annotations

import math

import pytest
import torch

from pictures import pictures
from testtime import tasks
from testtime.randomness import Draws
from testtime.tasks import Masked


@pytest.mark.parametrize(("height", "width", "patch"), [(16, 16, 4), (12, 8, 2), (4, 6, 1)])
@pytest.mark.parametrize("ratio", [0.75, 0.4])
@pytest.mark.parametrize("kind", ["views", "probe"])
def test_views_and_targets_by_hand(height: int, width: int, patch: int, ratio: float, kind: str) -> None:
    images, task = pictures(5, 3, height, width, seed=9, dtype=torch.uint8), Masked(ratio, patch)
    views, targets = task.probe(images) if kind == "probe" else task.views(images, Draws.of(0, torch.arange(5)))
    rows, columns = height // patch, width // patch
    total, each = rows * columns, len(views) // 5
    visible = total - round(ratio * total)
    assert views.shape == (5 * each, 5, visible, patch**2)
    assert targets.shape == (5 * each, total, 3 * patch**2 + 1)
    for number, (view, target) in enumerate(zip(views, targets, strict=True)):
        image = images[number // each].float() / 255
        shown = {(int(row), int(column)): i for i, (row, column) in enumerate(view[3:, :, 0].T.tolist())}
        assert len(shown) == visible
        assert torch.equal(view[3:], view[3:, :, :1].expand_as(view[3:]))  # the coordinates of all pixels of a patch
        for place in range(total):
            row, column = divmod(place, columns)
            pixels = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].flatten()
            assert target[place, -1] == ((row, column) not in shown)
            if (row, column) in shown:
                assert torch.equal(view[:3, shown[row, column]].flatten(), pixels)
            spread = math.sqrt(float(((pixels - pixels.mean()) ** 2).mean()) + 1e-4)
            assert torch.allclose(target[place, :-1], (pixels - pixels.mean()) / spread, atol=1e-4)


def test_a_mask_depends_on_its_own_key_alone() -> None:
    images, order = pictures(20, 3, 8, 8, seed=9), torch.arange(19, -1, -1)
    views, targets = Masked().views(images, Draws.of(3, torch.arange(20)))
    again, others = Masked().views(images[order], Draws.of(3, order))
    assert torch.equal(again, views[order])
    assert torch.equal(others, targets[order])
    assert not torch.equal(Masked().views(images, Draws.of(4, torch.arange(20)))[1][..., -1], targets[..., -1])


def test_every_patch_is_hidden_equally_often() -> None:
    hidden = Masked(0.5).views(torch.zeros(4000, 1, 8, 8), Draws.of(0, torch.arange(4000)))[1][..., -1].sum(0)
    assert ((hidden - 2000).abs() < 4 * math.sqrt(1000)).all()  # four standard deviations


def test_the_probe_shows_every_patch_once() -> None:
    hidden = Masked().probe(torch.zeros(2, 1, 16, 16))[1][..., -1].unflatten(0, (2, 4))
    assert torch.equal(hidden[0], hidden[1])
    assert torch.equal((1 - hidden[0]).sum(0), torch.ones(16))


def test_the_loss_is_the_mean_over_hidden_patches() -> None:
    draws, task = Draws.of(0, torch.arange(6)), Masked()
    targets = task.views(draws.purpose("images").uniform(1, 8, 8), draws)[1]
    outputs = draws.normal(4, 16)
    expected = []
    for output, target in zip(outputs, targets, strict=True):
        errors = [((output[place] - target[place, :-1]) ** 2).mean() for place in range(4) if target[place, -1] == 1]
        expected.append(sum(errors, torch.zeros(())) / len(errors))
    assert torch.allclose(task.loss(outputs, targets), torch.stack(expected), atol=1e-6)
    assert torch.equal(task.error(outputs, targets), task.loss(outputs, targets))
    assert task.loss(targets[..., :-1], targets).abs().max() == 0
    assert task.loss(outputs.bfloat16(), targets).dtype == torch.float32


def test_the_loss_of_a_constant_is_chance_and_confidence_is_of_all_masks() -> None:
    views, targets = Masked().probe(pictures(3, 3, 16, 16, seed=9))
    losses = Masked().loss(torch.zeros(len(views), 16, 48), targets).view(3, 4)
    assert torch.allclose(losses, torch.full((3, 4), Masked().chance), atol=0.01)
    assert torch.allclose(Masked().confidence(losses), torch.exp(-losses.mean(1)))


def test_names_sizes_and_choices() -> None:
    assert tasks.make("masked") == Masked(0.75, 4)
    assert tasks.make({"name": "masked", "patch": 8}) == Masked(patch=8)
    assert tasks.describe(Masked()) == "masked"
    assert tasks.describe(Masked(0.5, 8)) == {"name": "masked", "ratio": 0.5, "patch": 8}
    assert tasks.count_views(Masked(patch=14)) == (1, 4)
    assert Masked(0.01).views(torch.zeros(1, 1, 8, 8), Draws.of(0, torch.arange(1)))[1][..., -1].sum() == 1
    for wrong in ({"ratio": 0.0}, {"ratio": 1.0}, {"patch": 0}, {"patch": 2.0}, {"ratio": "all"}):
        with pytest.raises(ValueError, match=next(iter(wrong)) if wrong != {"ratio": "all"} else "'masked'"):
            tasks.make({"name": "masked", **wrong})
    with pytest.raises(ValueError, match="divisible by 4, got 8×10"):
        Masked().probe(torch.zeros(1, 3, 8, 10))
    with pytest.raises(ValueError, match="at least 2 patches"):
        Masked(patch=8).probe(torch.zeros(1, 3, 8, 8))
