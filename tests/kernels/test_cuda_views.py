"""Views, pixels and random numbers on CUDA: the same bits as the plain bodies give on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from testtime import CropFlip, Rotation
from testtime.randomness import GOLDEN, Draws, _mix, purpose_word
from triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS


def pixels(count: int, height: int, width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    bytes_ = Draws.of(3, torch.arange(count)).integers(256, 3, height, width)
    return (bytes_.to(torch.uint8) if dtype == torch.uint8 else bytes_ / 255).to(DEVICE)


@pytest.mark.parametrize("each", ["random", "all"])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 33), (7, 5)])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (1, False), (0, True)])
def test_views_in_one_launch_are_those_of_crop_and_rotation(
    padding: int, flip: bool, height: int, width: int, each: Any
) -> None:
    from testtime.kernels.cuda.views import make_views

    images, draws = pixels(3, height, width), Draws.of(5, torch.tensor([0, 7, -3])).fold(2)
    keys = draws.copies(6)
    copies = CropFlip(padding, flip)(images.cpu(), keys).flatten(0, 1)
    expected, turns = Rotation(each).views(copies, keys.flatten())
    words = purpose_word("crop"), purpose_word("flip"), purpose_word("rotation")
    form = padding, flip, 4 if each == "all" else 1
    views, targets = make_views(images, draws.keys.to(DEVICE), 6, *form, words)
    assert torch.equal(views.cpu(), expected)
    assert torch.equal(targets.cpu(), turns)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (6, 9)])
def test_rotations_in_one_launch_are_rotations(height: int, width: int, dtype: torch.dtype) -> None:
    from testtime.kernels.cuda.views import rotate

    images = pixels(2, height, width, dtype)
    for found, expected in zip(rotate(images), Rotation().probe(images.cpu()), strict=True):
        assert torch.equal(found.cpu(), expected)


def test_no_images_have_no_views() -> None:
    from testtime.kernels.cuda.views import normalise, rotate

    images, one = pixels(2, 8, 8)[:0], torch.ones(1, device=DEVICE)
    assert [tensor.shape for tensor in rotate(images)] == [(0, 3, 8, 8), (0,)]
    assert normalise(images, one, one, torch.float32).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [(0.5,), (0.485, 0.456, 0.406)])
def test_pixels_are_normalised_as_the_network_does_it(
    mean: tuple[float, ...], result: torch.dtype, dtype: torch.dtype
) -> None:
    from testtime.kernels.cuda.views import normalise

    images, centre, spread = pixels(2, 7, 9, dtype), torch.tensor(mean)[:, None, None], torch.tensor([0.3])
    given = images.cpu() / 255 if dtype == torch.uint8 else images.cpu()
    found = normalise(images, centre.to(DEVICE), spread.to(DEVICE), result)
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = ((given - centre) / spread).to(result)
    if INTERPRETED and result == torch.bfloat16:  # the interpreter cuts where a GPU rounds
        assert torch.allclose(found, expected, rtol=2.0**-7)
    else:
        assert torch.equal(found.cpu(), expected)


def test_the_hash_in_one_launch_is_the_hash() -> None:
    from testtime.kernels.cuda.hash import mix

    numbers = Draws.of(0, torch.arange(5000)).keys
    for factor, plus in ((1, 0), (1, 12345), (GOLDEN, -7)):
        assert torch.equal(mix(numbers.to(DEVICE), factor, plus).cpu(), _mix(numbers, factor, plus))
