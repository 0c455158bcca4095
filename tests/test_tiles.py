"""The Triton kernels: on a GPU, or on a CPU by Triton's interpreter (`TRITON_INTERPRET=1`), against torch."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from testtime import CropFlip, Prediction, Rotation, prediction
from testtime.networks.resnet import ZeroPadShortcut
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


# Ends of networks, blocks and episodes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "outputs", "size"), [(64, 4, 8), (16, 10, 5), (1024, 3, 3)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_means_through_a_linear_layer_are_torchs(
    replicas: int, channels: int, outputs: int, size: int, dtype: torch.dtype
) -> None:
    from testtime import kernels

    x = images_last(2 * replicas, channels, size, size).to(dtype).requires_grad_(True)
    weight = normals(replicas, outputs, channels, seed=1).requires_grad_(True)
    bias = normals(replicas, outputs, seed=2).requires_grad_(True)
    y = kernels.pool_linear(x, weight, bias)
    means = x.double().mean((2, 3)).unflatten(0, (replicas, 2))
    expected = (means @ weight.double().transpose(1, 2) + bias.double()[:, None]).flatten(0, 1)
    assert y.dtype == torch.float32
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = normals(*y.shape, seed=3)
    gradients = torch.autograd.grad(y, (x, weight, bias), upstream)
    references = torch.autograd.grad(expected, (x, weight, bias), upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        bound = 1e-5 if gradient.dtype == torch.float32 else 2.0**-7
        assert torch.allclose(gradient.double(), reference.double(), rtol=bound, atol=bound * 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "extra", "height", "width"), [(16, 16, 8, 8), (3, 0, 4, 6), (32, 32, 34, 2)])
def test_a_shortcut_that_halves_is_torchs(
    channels: int, extra: int, height: int, width: int, dtype: torch.dtype
) -> None:
    from testtime import kernels

    x = images_last(3, channels, height, width).to(dtype).requires_grad_(True)
    y = kernels.halve(x, extra)
    expected = ZeroPadShortcut(2, extra)(x.double())
    bound = 1e-6 if dtype == torch.float32 else 2.0**-7
    assert torch.allclose(y.double(), expected, rtol=bound, atol=1e-6)
    upstream = normals(*y.shape, seed=1).to(dtype)
    found = torch.autograd.grad(y, x, upstream)[0]
    assert torch.equal(found, torch.autograd.grad(expected, x, upstream.double())[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 40])
@pytest.mark.parametrize("used", ["both", "norm", "input"])
def test_a_norm_adds_the_gradient_of_its_input(used: str, size: int, dtype: torch.dtype) -> None:
    """Images of 40×40 pixels do not fit into a tile."""
    from testtime import kernels

    x = images_last(4, 16, size, size).to(dtype).requires_grad_(True)
    weight, bias = normals(2, 16, seed=1).requires_grad_(True), normals(2, 16, seed=2).requires_grad_(True)
    y, again = kernels.fork_group_norm(x, 8, weight, bias, 1e-5, relu=True)
    assert torch.equal(again, x)
    one, other = (normals(*x.shape, seed=seed).to(dtype) for seed in (3, 4))
    pieces = zip(x.double().chunk(2), weight.double(), bias.double(), strict=True)
    expected = torch.cat([F.group_norm(piece, 8, scale, shift, 1e-5) for piece, scale, shift in pieces]).relu()
    found, reference = x.new_zeros(()), x.new_zeros(()).double()
    if used != "input":
        found, reference = found + (y * one).sum(), reference + (expected * one.double()).sum()
    if used != "norm":
        found, reference = found + (again * other).sum(), reference + (x.double() * other.double()).sum()
    gradients = torch.autograd.grad(found, (x, weight, bias))
    references = torch.autograd.grad(reference, (x, weight, bias), materialize_grads=True)
    for gradient, wanted in zip(gradients, references, strict=True):
        difference = (gradient.double() - wanted.double()).norm()
        assert difference <= (1e-5 if dtype == torch.float32 else 1e-2) * wanted.norm() + 1e-6


@pytest.mark.parametrize(("images", "classes"), [(1, 10), (3, 10), (5, 700)])
def test_an_episode_is_settled_as_torch_does(images: int, classes: int) -> None:
    """Of nine replicas: some want nothing, some have got worse, some are no numbers."""
    before, after = (normals(9, images, classes, seed=seed) for seed in (0, 1))
    loss_before, loss_after = (normals(9, images, seed=seed).abs() for seed in (2, 3))
    wanted = normals(9, images, seed=4) > -0.5
    wanted[0], loss_after[1], loss_after[2], before[3] = False, float("nan"), float("inf"), float("nan")
    loss_after[4], after[5], wanted[7], loss_after[7] = loss_before[4] + 3.5, float("nan"), True, 0
    finite = torch.tensor([True] * 6 + [False] + [True] * 2, device=DEVICE)
    before = before.mT.contiguous().mT  # of another order in memory
    for guard in (0.3, 3.0, float("inf")):
        given = wanted, before, loss_before, loss_before.exp(), after, loss_after, finite, guard
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prediction, "has_triton", lambda: False)
            expected, undone = prediction.settle(*given)
            patch.setattr(prediction, "has_triton", lambda: True)
            patch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
            found, found_undone = prediction.settle(*given)
        assert undone.any()
        assert not undone.all()
        assert torch.equal(found_undone, undone)
        for field in fields(Prediction):
            assert torch.equal(*(getattr(one, field.name).nan_to_num(7.0) for one in (found, expected))), field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (70, 91)])
def test_only_chosen_rows_are_put_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from testtime import kernels

    now, old = ((normals(4, *shape, seed=seed) * 100).to(dtype) for seed in (0, 1))
    now[2], old[0] = -1, 8
    rows = torch.tensor([True, False, False, True], device=DEVICE)
    expected = torch.stack([old[0], now[1], now[2], old[3]])
    kernels.put_back(now, old, rows)
    assert torch.equal(now, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(64, 64, 1), (32, 64, 2), (16, 40, 1), (3, 16, 1)])
@pytest.mark.parametrize("images", [2, 18])
def test_tiles_of_few_and_of_many_images_convolve(
    images: int, inputs: int, outputs: int, stride: int, transposed: bool, dtype: torch.dtype
) -> None:
    """Where there are few tiles, each has a share of the outputs."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products of bfloat16")
    from testtime.kernels import channels_last, tiles

    x = images_last(4 * images, inputs, 8, 8).to(dtype)
    weight = (normals(4, 3, 3, inputs, outputs, seed=1) / (3 * inputs**0.5)).permute(0, 4, 3, 1, 2)
    exact = x.double().requires_grad_(True)
    pieces = zip(exact.chunk(4), weight.double(), strict=True)
    expected = torch.cat([F.conv2d(piece, filters, None, stride, 1) for piece, filters in pieces])
    given, plus = images_last(*expected.shape, seed=2).to(dtype), None
    if transposed:
        expected = torch.autograd.grad(expected, exact, given.double())[0]
    else:
        given, plus, expected = x, given, expected + given.double()
    bound = 2e-3 if dtype == torch.float32 else 1e-2  # TF32 on a GPU has 11 bits, bfloat16 8
    for _ in range(3):  # what is read from a wrong place need not be wrong every time
        found = channels_last(x, *expected.shape).fill_(float("nan"))
        tiles.convolve(given, weight, found, stride, 1, plus, transposed)
        assert (found.double() - expected).norm() < bound * expected.norm()
