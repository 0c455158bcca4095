"""Pooling kernels on CUDA against torch in double precision."""

from __future__ import annotations

import pytest
import torch

from testtime.networks.resnet import ZeroPadShortcut
from triton_device import DTYPES, MARKS, images_last, normals

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "outputs", "size"), [(64, 4, 8), (16, 10, 5), (1024, 3, 3)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_means_through_a_linear_layer_are_torchs(
    replicas: int, channels: int, outputs: int, size: int, dtype: torch.dtype
) -> None:
    from testtime.kernels.cuda.pooling import pool_linear

    x = images_last(2 * replicas, channels, size, size).to(dtype).requires_grad_(True)
    weight = normals(replicas, outputs, channels, seed=1).requires_grad_(True)
    bias = normals(replicas, outputs, seed=2).requires_grad_(True)
    y = pool_linear(x, weight, bias)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "extra", "height", "width"), [(16, 16, 8, 8), (3, 0, 4, 6), (32, 32, 34, 2)])
def test_a_shortcut_that_halves_is_torchs(
    channels: int, extra: int, height: int, width: int, dtype: torch.dtype
) -> None:
    from testtime.kernels.cuda.pooling import halve

    x = images_last(3, channels, height, width).to(dtype).requires_grad_(True)
    y, expected = halve(x, extra), ZeroPadShortcut(2, extra)(x.double())
    bound = 1e-6 if dtype == torch.float32 else 2.0**-7
    assert torch.allclose(y.double(), expected, rtol=bound, atol=1e-6)
    upstream = normals(*y.shape, seed=1).to(dtype)
    found = torch.autograd.grad(y, x, upstream)[0]
    assert torch.equal(found, torch.autograd.grad(expected, x, upstream.double())[0].to(dtype))
