"""Tasks: rotations against numpy's, the loss against cross-entropy by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pictures import pictures

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from testtime import tasks
from testtime.augment import Augment, CropFlip, ResizedCropFlip
from testtime.randomness import Draws
from testtime.tasks import Rotation


def turn_by_hand(image: Tensor, turns: int) -> np.ndarray:
    """Cut to the central square, then turn counter-clockwise."""
    height, width = image.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image.numpy()[:, top : top + side, left : left + side]
    return np.stack([np.rot90(channel, turns) for channel in square])


SIZES = [(8, 8), (7, 7), (6, 10), (11, 4), (5, 8), (1, 3)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_random_turns_are_exact_quarter_turns(height: int, width: int, dtype: torch.dtype) -> None:
    images = pictures(40, 3, height, width, seed=9, dtype=dtype)
    views, targets = Rotation().views(images, Draws.of(0, torch.arange(40)))
    assert views.dtype == dtype
    assert set(targets.tolist()) == {0, 1, 2, 3}
    for image, view, target in zip(images, views, targets.tolist(), strict=True):
        assert np.array_equal(view.numpy(), turn_by_hand(image, target))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_all_turns_are_grouped_by_image_upright_first(height: int, width: int) -> None:
    images = pictures(5, 3, height, width, seed=9, dtype=torch.uint8)
    views, targets = Rotation("all").views(images, Draws.of(0, torch.arange(5)))
    assert targets.tolist() == [0, 1, 2, 3] * 5
    for place, view in enumerate(views):
        assert np.array_equal(view.numpy(), turn_by_hand(images[place // 4], place % 4))


@pytest.mark.parametrize("each", ["random", "all"])
def test_the_probe_is_all_four_turns_without_chance(each: str) -> None:
    images = pictures(3, 3, 6, 9, seed=9, dtype=torch.uint8)
    views, targets = Rotation(each).probe(images)  # type: ignore[arg-type]
    expected, _ = Rotation("all").views(images, Draws.of(1, torch.arange(3)))
    assert torch.equal(views, expected)
    assert torch.equal(views[::4], images[..., 1:7])  # the plain image's square is the first view of each
    assert targets.tolist() == [0, 1, 2, 3] * 3


def test_a_turn_depends_on_its_own_key_alone() -> None:
    images = pictures(20, 3, 6, 6, seed=9, dtype=torch.uint8)
    views, targets = Rotation().views(images, Draws.of(3, torch.arange(20)))
    order = torch.arange(19, -1, -1)
    again, turned = Rotation().views(images[order], Draws.of(3, order))
    assert torch.equal(again, views[order])
    assert torch.equal(turned, targets[order])
    other = Rotation().views(images, Draws.of(4, torch.arange(20)))[1]
    assert not torch.equal(other, targets)


def test_turns_are_equally_likely() -> None:
    counts = Rotation().views(torch.zeros(8000, 1, 1, 1), Draws.of(0, torch.arange(8000)))[1].bincount()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 21.1  # chi-square of 3 degrees, once in ten thousand


def test_images_are_not_changed() -> None:
    images = pictures(4, 3, 6, 8, seed=9, dtype=torch.uint8)
    before = images.clone()
    for each in ("random", "all"):
        Rotation(each).views(images, Draws.of(0, torch.arange(4)))  # type: ignore[arg-type]
    assert torch.equal(images, before)


@given(st.integers(1, 30), st.integers(0, 1000))
def test_the_loss_is_cross_entropy_for_each_view(count: int, seed: int) -> None:
    draws = Draws.of(seed, torch.arange(count))
    outputs, targets = draws.normal(4) * 5, draws.integers(4)
    losses = Rotation().loss(outputs, targets)
    probabilities = outputs.double().exp() / outputs.double().exp().sum(1, keepdim=True)
    expected = -probabilities[torch.arange(count), targets].log()
    assert losses.shape == (count,)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_loss_of_half_precision_is_taken_in_float32() -> None:
    outputs, targets = torch.tensor([[9.0, 1.0, 2.0, 3.0]]).bfloat16(), torch.tensor([0])
    loss = Rotation().loss(outputs, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, Rotation().loss(outputs.float(), targets))


def test_names_and_choices() -> None:
    assert (Rotation().name, Rotation().outputs) == ("rotation", 4)
    assert tasks.make("rotation") == Rotation()
    specification = {"name": "rotation", "each": "all"}
    assert tasks.make(specification) == Rotation("all")
    assert specification == {"name": "rotation", "each": "all"}
    for wrong, said in (("inpainting", "'inpainting'"), ({}, "None"), ({"name": "rotation", "turns": 4}, "turns")):
        with pytest.raises(ValueError, match=said):
            tasks.make(wrong)
    with pytest.raises(ValueError, match=r"`each`.*'some'"):
        Rotation("some")  # type: ignore[arg-type]


def test_views_are_counted() -> None:
    assert tasks.count_views(Rotation()) == (1, 4)
    assert tasks.count_views(Rotation("all")) == (4, 4)


@pytest.mark.parametrize("augment", [CropFlip(2), ResizedCropFlip(5)])
@pytest.mark.parametrize("each", ["random", "all"])
def test_views_to_learn_from_are_those_of_every_copy(augment: Augment, each: Any) -> None:
    images, draws, task = pictures(3, 3, 6, 6, seed=9, dtype=torch.uint8), Draws.of(0, torch.arange(3)), Rotation(each)
    views, targets = tasks.make_views(images, draws, 4, augment, task)
    keys = draws.copies(4)
    for number in range(3):
        copies = augment(images[number : number + 1], Draws(keys.keys[number : number + 1]))[0]
        expected, turns = task.views(copies, Draws(keys.keys[number]))
        assert torch.allclose(views.unflatten(0, (3, -1))[number].float(), expected.float(), atol=1e-6)
        assert torch.equal(targets.unflatten(0, (3, -1))[number], turns)
