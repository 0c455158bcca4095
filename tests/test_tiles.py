"""The Triton kernels: on a GPU, or on a CPU by Triton's interpreter (`TRITON_INTERPRET=1`), against torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from testtime import CropFlip, Rotation
from testtime.randomness import GOLDEN, Draws, _mix

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


def normals(*shape: int, seed: int = 0) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:]).to(DEVICE)


def images_last(*shape: int, seed: int = 0) -> Tensor:
    return normals(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


# Gathered gradients


FILTERS = 9 * 16 * 16


def split(numbers: Tensor) -> list[Tensor]:
    """Filters with their channels innermost, a scale, a shift, and what no kernel of ours uses; there is a gap."""
    filters = numbers[:, :FILTERS].view(-1, 3, 3, 16, 16).permute(0, 4, 3, 1, 2)
    return [filters, *(numbers[:, FILTERS + start : FILTERS + start + 16] for start in (0, 16, 36))]


def compute(x: Tensor, parameters: list[Tensor], uses: int) -> Tensor:
    from testtime import kernels

    filters, scale, shift, other = parameters
    for _ in range(uses):
        x = kernels.convolve(x, filters, 1, 1)
        x = kernels.group_norm(x, 8, scale, shift, 1e-5, relu=True)
    return (x.unflatten(0, (len(other), -1)) * other[:, None, :, None, None]).square().sum()


@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 9])
def test_gathered_gradients_are_those_of_autograd(replicas: int, uses: int) -> None:
    from testtime.kernels import Gathering

    numbers = normals(replicas, FILTERS + 60, seed=1)
    parameters = [part.requires_grad_(True) for part in split(numbers)]
    x = images_last(2 * replicas, 16, 8, 8)
    expected = torch.autograd.grad(compute(x, parameters, uses), parameters)
    gathering, results = Gathering(numbers), []
    for _ in range(2):
        with gathering:
            attacked = x.clone().requires_grad_(True)
            torch.autograd.grad(compute(attacked, parameters, 1), attacked)  # no part of the gradient
            loss = compute(x, parameters, uses)
            idle = compute(x, parameters, 1)  # nobody asks for its gradient
            gathering.begin()
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            results.append(gathering.collect())
            del idle
        assert [gradient is None for gradient in found] == [True] * 3 + [False]
        assert not results[-1][:, FILTERS + 32 :].any()
        for kept, rest, reference in zip(split(results[-1]), found, expected, strict=True):
            piece = kept if rest is None else kept + rest
            assert torch.allclose(piece, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))
    assert torch.equal(*results)


# Views


def pixels(count: int, height: int, width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    bytes_ = Draws.of(3, torch.arange(count)).integers(256, 3, height, width)
    return (bytes_.to(torch.uint8) if dtype == torch.uint8 else bytes_ / 255).to(DEVICE)


@pytest.mark.parametrize("each", ["random", "all"])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 33), (7, 5)])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (1, False), (0, True)])
def test_views_in_one_launch_are_those_of_crop_and_rotation(
    padding: int, flip: bool, height: int, width: int, each: Any
) -> None:
    from testtime import kernels

    images, draws = pixels(3, height, width), Draws.of(5, torch.tensor([0, 7, -3])).fold(2)
    keys = draws.copies(6)
    copies = CropFlip(padding, flip)(images.cpu(), keys).flatten(0, 1)
    expected, turns = Rotation(each).views(copies, keys.flatten())
    views, targets = kernels.make_views(images, draws.keys.to(DEVICE), 6, padding, flip, 4 if each == "all" else 1)
    assert torch.equal(views.cpu(), expected)
    assert torch.equal(targets.cpu(), turns)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (6, 9)])
def test_turns_in_one_launch_are_rotations(height: int, width: int, dtype: torch.dtype) -> None:
    from testtime import kernels

    images = pixels(2, height, width, dtype)
    for found, expected in zip(kernels.turn(images), Rotation().probe(images.cpu()), strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [(0.5,), (0.485, 0.456, 0.406)])
def test_pixels_are_normalised_as_the_network_does_it(
    mean: tuple[float, ...], result: torch.dtype, dtype: torch.dtype
) -> None:
    from testtime import kernels

    images, centre, spread = pixels(2, 7, 9, dtype), torch.tensor(mean)[:, None, None], torch.tensor([0.3])
    given = images.cpu() / 255 if dtype == torch.uint8 else images.cpu()
    found = kernels.normalise(images, centre.to(DEVICE), spread.to(DEVICE), result)
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = ((given - centre) / spread).to(result)
    if INTERPRETED and result == torch.bfloat16:  # the interpreter cuts where a GPU rounds
        assert torch.allclose(found, expected, rtol=2.0**-7)
    else:
        assert torch.equal(found.cpu(), expected)


def test_the_hash_in_one_launch_is_the_hash() -> None:
    from testtime import kernels

    numbers = Draws.of(0, torch.arange(5000)).keys
    for factor, plus in ((1, 0), (1, 12345), (GOLDEN, -7)):
        found = kernels.mix(numbers.to(DEVICE), factor, plus)
        assert torch.equal(found.cpu(), _mix(numbers, factor, plus))
