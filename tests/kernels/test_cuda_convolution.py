"""The CUDA convolutions against torch's in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.kernels import ConvolutionForm
from triton_device import INTERPRETED, MARKS, PRODUCTS, images_last, normals, relative

pytestmark = MARKS
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 1e-2}  # TF32 has 11 bits, bfloat16 8
# inputs, outputs, side; interpreted, a program takes milliseconds
SHAPES = [(3, 16, 32), (16, 16, 32), (16, 16, 16), (32, 32, 16), (32, 32, 8), (16, 32, 17), (64, 64, 8)]
SHAPES = [(3, 16, 8), (16, 16, 8), (16, 32, 9), (64, 64, 8)] if INTERPRETED else SHAPES


def convolve(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 1, plus: Tensor | None = None) -> Tensor:
    from testtime.kernels.cuda import convolution

    form = ConvolutionForm((stride, stride), (padding, padding), (1, 1), 1)
    return convolution.convolve(x, weight, None, form, plus)


def convolve_exactly(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    pieces = zip(x.double().chunk(len(weight)), weight.double(), strict=True)
    return torch.cat([F.conv2d(piece, filters, None, stride, padding) for piece, filters in pieces])


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0)])
@pytest.mark.parametrize(("inputs", "outputs", "size"), SHAPES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_convolve_is_torchs_convolution(
    inputs: int, outputs: int, size: int, stride: int, padding: int, replicas: int, dtype: torch.dtype
) -> None:
    # Of 64 channels enough for the kernel of many tiles with three replicas, not with one.
    images = 2 if INTERPRETED else 40 if inputs == 64 else 4
    x = images_last(replicas * images, inputs, size, size).to(dtype).requires_grad_(True)
    weight = (normals(replicas, outputs, inputs, 3, 3, seed=1) / (3 * inputs**0.5)).requires_grad_(True)
    y, expected = convolve(x, weight, stride, padding), convolve_exactly(x, weight, stride, padding)
    assert y.shape == expected.shape
    assert y.dtype == dtype
    assert relative(y, expected) < BOUNDS[dtype]
    upstream = normals(*y.shape, seed=2).to(dtype)
    gradients = torch.autograd.grad(y, (x, weight), upstream)
    references = torch.autograd.grad(expected, (x, weight), upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.shape == reference.shape
        assert relative(gradient, reference) < BOUNDS[dtype]


def test_convolve_is_the_same_every_time() -> None:
    dtype = PRODUCTS[-1]
    size = 8 if INTERPRETED else 32
    x, weight = images_last(12, 16, size, size).to(dtype), normals(3, 32, 16, 3, 3, seed=1).requires_grad_(True)
    first, second = (torch.autograd.grad(convolve(x, weight).float().square().sum(), weight)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("outputs", [16, 32])
def test_convolve_adds_a_shortcut(outputs: int, dtype: torch.dtype) -> None:
    size = 8 if INTERPRETED else 16
    x = images_last(6, 16, size, size).to(dtype).requires_grad_(True)
    shortcut = images_last(6, outputs, size, size, seed=3).to(dtype).requires_grad_(True)
    weight = (normals(2, outputs, 16, 3, 3, seed=1) / 12).requires_grad_(True)
    y, expected = convolve(x, weight, plus=shortcut), convolve_exactly(x, weight) + shortcut.double()
    assert relative(y, expected) < BOUNDS[dtype]
    gradients = torch.autograd.grad(y.float().square().sum(), (x, weight, shortcut))
    references = torch.autograd.grad(expected.square().sum(), (x, weight, shortcut))
    for gradient, reference in zip(gradients, references, strict=True):
        assert relative(gradient, reference) < 2 * BOUNDS[dtype]


def test_filters_may_lie_in_any_order() -> None:
    x, weight = images_last(4, 16, 8, 8), normals(2, 32, 16, 3, 3, seed=1)
    innermost = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    assert torch.equal(convolve(x, weight), convolve(x, innermost))


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(64, 64, 1), (32, 64, 2), (16, 40, 1), (3, 16, 1)])
@pytest.mark.parametrize("images", [2, 18])
def test_tiles_of_few_and_of_many_images_convolve(
    images: int, inputs: int, outputs: int, stride: int, transposed: bool, dtype: torch.dtype
) -> None:
    """Where there are few tiles, each has a share of the outputs."""
    from testtime.kernels.cuda import triton_convolution
    from testtime.kernels.cuda.layout import channels_last

    x = images_last(4 * images, inputs, 8, 8).to(dtype)
    weight = (normals(4, 3, 3, inputs, outputs, seed=1) / (3 * inputs**0.5)).permute(0, 4, 3, 1, 2)
    exact = x.double().requires_grad_(True)
    expected = convolve_exactly(exact, weight, stride)
    given, plus = images_last(*expected.shape, seed=2).to(dtype), None
    if transposed:
        expected = torch.autograd.grad(expected, exact, given.double())[0]
    else:
        given, plus, expected = x, given, expected + given.double()
    for _ in range(1 if INTERPRETED else 3):  # what is read from a wrong place need not be wrong every time
        found = channels_last(x, *expected.shape).fill_(float("nan"))
        triton_convolution.convolve(given, weight, found, stride, 1, plus, transposed)
        assert relative(found, expected) < BOUNDS[dtype]
