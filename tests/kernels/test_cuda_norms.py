"""GroupNorm and BatchNorm on CUDA against torch's in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.kernels import NormForm
from triton_device import DEVICE, DTYPES, INTERPRETED, MARKS, images_last, normals, relative

pytestmark = MARKS
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def norm_exactly(x: Tensor, norm: NormForm) -> Tensor:
    pieces = zip(x.double().chunk(len(norm.weight)), norm.weight.double(), norm.bias.double(), strict=True)
    y = torch.cat([F.group_norm(piece, norm.groups, w, b, norm.eps) for piece, w, b in pieces])
    return F.relu(y) if norm.relu else y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("channels", "groups", "size"), [(16, 8, 32), (32, 8, 17), (64, 8, 8), (64, 32, 16)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_group_norm_is_torchs(
    channels: int, groups: int, size: int, replicas: int, relu: bool, dtype: torch.dtype
) -> None:
    from testtime.kernels.cuda import groupnorm

    x = (images_last(replicas * 4, channels, size, size) + 0.5).to(dtype)
    weight, bias = normals(replicas, channels, seed=1) + 1, normals(replicas, channels, seed=2)
    tensors = [tensor.requires_grad_(True) for tensor in (x, weight, bias)]
    norm = NormForm(groups, weight, bias, 1e-5, relu)
    y, expected = groupnorm.group_norm(x, norm), norm_exactly(x, norm)
    assert y.dtype == dtype
    assert relative(y, expected) < BOUNDS[dtype]
    upstream = normals(*y.shape, seed=3).to(dtype)
    gradients = torch.autograd.grad(y, tensors, upstream)
    references = torch.autograd.grad(expected, tensors, upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        assert relative(gradient, reference) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 40])
@pytest.mark.parametrize("used", ["both", "norm", "input"])
def test_a_norm_adds_the_gradient_of_its_input(used: str, size: int, dtype: torch.dtype) -> None:
    """Images of 40×40 pixels do not fit into a tile."""
    from testtime.kernels.cuda import groupnorm

    x = images_last(4, 16, size, size).to(dtype).requires_grad_(True)
    weight, bias = normals(2, 16, seed=1).requires_grad_(True), normals(2, 16, seed=2).requires_grad_(True)
    norm = NormForm(8, weight, bias, 1e-5, True)
    y, again = groupnorm.fork_group_norm(x, norm)
    assert torch.equal(again, x)
    one, other = (normals(*x.shape, seed=seed).to(dtype) for seed in (3, 4))
    found, reference = x.new_zeros(()), x.new_zeros(()).double()
    if used != "input":
        found, reference = found + (y * one).sum(), reference + (norm_exactly(x, norm) * one.double()).sum()
    if used != "norm":
        found, reference = found + (again * other).sum(), reference + (x.double() * other.double()).sum()
    gradients = torch.autograd.grad(found, (x, weight, bias))
    references = torch.autograd.grad(reference, (x, weight, bias), materialize_grads=True)
    for gradient, wanted in zip(gradients, references, strict=True):
        difference = (gradient.double() - wanted.double()).norm()
        assert difference <= BOUNDS[dtype] * wanted.norm() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("replicas", "images", "channels", "size", "relu", "training"),
    [
        (1, 5, 64, 4, False, True),
        (2, 3, 16, 7, True, True),
        (3, 2, 32, 8, True, False),
        (2, 40, 16, 16, True, True),
        (1, 2, 4, 5, True, True),
        (2, 2, 1024, 2, False, False),
    ],
)
def test_batch_norm_is_torchs(
    replicas: int, images: int, channels: int, size: int, relu: bool, training: bool, dtype: torch.dtype
) -> None:
    from testtime.kernels.cuda import batchnorm

    x = images_last(replicas * images, channels, size, size) * 2 + 30  # far from zero
    x = x.to(dtype).requires_grad_(True)
    # As in a network's flat memory, where the rows of a parameter do not follow each other.
    flat = torch.cat([normals(replicas, channels, seed=1) + 1, normals(replicas, channels, seed=2)], 1)
    weight, bias = (piece.detach().requires_grad_(True) for piece in flat.split(channels, 1))
    mean, variance = normals(replicas, channels, seed=3) + 29, normals(replicas, channels, seed=4).square() + 0.5
    tracked = mean.double(), variance.double()
    y = batchnorm.batch_norm(x, mean, variance, weight, bias, training, 0.1, 1e-5, relu)
    pieces = zip(x.double().chunk(replicas), *tracked, weight.double(), bias.double(), strict=True)
    expected = torch.cat([F.batch_norm(*piece, training, 0.1, 1e-5) for piece in pieces])
    expected = F.relu(expected) if relu else expected
    assert y.dtype == dtype
    assert relative(y, expected) < BOUNDS[dtype]
    assert relative(mean, tracked[0]) < 1e-6
    assert relative(variance, tracked[1]) < 1e-5
    upstream = normals(*y.shape, seed=5).to(dtype)
    found = torch.autograd.grad(y, (x, weight, bias), upstream)
    references = torch.autograd.grad(expected, (x, weight, bias), upstream.double())
    for gradient, reference in zip(found, references, strict=True):
        assert relative(gradient, reference) < 2 * BOUNDS[dtype]


def test_only_the_gradient_that_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from testtime.kernels.cuda import batchnorm

    x = images_last(4, 16, 8, 8)
    weight, mean, variance = (torch.ones(2, 16, device=DEVICE) for _ in range(3))
    bias = torch.zeros(2, 16, device=DEVICE)
    weight.requires_grad_(True)
    y = batchnorm.batch_norm(x, mean.clone(), variance.clone(), weight, bias, True, 0.1, 1e-5, False)
    (gradient,) = torch.autograd.grad(y.square().sum(), weight)  # twice the sum of squares of normalised pixels
    torch.testing.assert_close(gradient, torch.full((2, 16), 2.0 * 2 * 64, device=DEVICE), rtol=1e-4, atol=0)

    def never(*_: Any) -> None:
        raise AssertionError("sums that nobody asked for")

    monkeypatch.setattr(batchnorm, "gradient_sums", never)
    x.requires_grad_(True)
    y = batchnorm.batch_norm(x, mean, variance, weight.detach(), bias, False, 0.1, 1e-5, True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, (x > 1).float() / (1 + 1e-5) ** 0.5)


def test_batch_norm_is_the_same_every_time() -> None:
    from testtime.kernels.cuda import batchnorm

    size = 8 if INTERPRETED else 32
    x = images_last(12, 16, size, size).bfloat16()
    answers = []
    for _ in range(2):
        weight, bias = (torch.ones(3, 16, device=DEVICE, requires_grad=True) for _ in range(2))
        mean, variance = torch.zeros(3, 16, device=DEVICE), torch.ones(3, 16, device=DEVICE)
        y = batchnorm.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5, True)
        answers.append([y, mean, variance, *torch.autograd.grad(y.float().square().sum(), (weight, bias))])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
