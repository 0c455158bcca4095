"""Gradients collected in one buffer are those of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from testtime.kernels import ConvolutionForm, NormForm
from triton_device import DEVICE, MARKS, images_last, normals

pytestmark = MARKS
FILTERS = 9 * 16 * 16
PLAIN = ConvolutionForm((1, 1), (1, 1), (1, 1), 1)


def split(numbers: Tensor) -> list[Tensor]:
    """Filters with their channels innermost, a scale, a shift, and what no kernel uses; there is a gap."""
    filters = numbers[:, :FILTERS].view(-1, 3, 3, 16, 16).permute(0, 4, 3, 1, 2)
    return [filters, *(numbers[:, FILTERS + start : FILTERS + start + 16] for start in (0, 16, 36))]


def compute(x: Tensor, parameters: list[Tensor], uses: int) -> Tensor:
    from testtime.kernels.cuda import convolution, groupnorm

    filters, scale, shift, other = parameters
    for _ in range(uses):
        x = convolution.convolve(x, filters, None, PLAIN, None)
        x = groupnorm.group_norm(x, NormForm(8, scale, shift, 1e-5, True))
    return (x.unflatten(0, (len(other), -1)) * other[:, None, :, None, None]).square().sum()


@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 9])
def test_of_convolutions_and_group_norms(replicas: int, uses: int) -> None:
    from testtime.kernels.cuda.gradient_buffer import GradientBuffer

    numbers = normals(replicas, FILTERS + 60, seed=1)
    parameters = [part.requires_grad_(True) for part in split(numbers)]
    x = images_last(2 * replicas, 16, 8, 8)
    expected = torch.autograd.grad(compute(x, parameters, uses), parameters)
    buffer, results = GradientBuffer(numbers), []
    for _ in range(2):
        with buffer:
            attacked = x.clone().requires_grad_(True)
            torch.autograd.grad(compute(attacked, parameters, 1), attacked)  # no part of the gradient
            loss = compute(x, parameters, uses)
            idle = compute(x, parameters, 1)  # nobody asks for its gradient
            buffer.begin()
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            results.append(buffer.collect())
            del idle
        assert [gradient is None for gradient in found] == [True] * 3 + [False]
        assert not results[-1][:, FILTERS + 32 :].any()
        for collected, rest, reference in zip(split(results[-1]), found, expected, strict=True):
            piece = collected if rest is None else collected + rest
            assert torch.allclose(piece, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))
    assert torch.equal(*results)


@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_of_batch_norms(replicas: int, uses: int) -> None:
    from testtime.kernels.cuda.batchnorm import batch_norm
    from testtime.kernels.cuda.gradient_buffer import GradientBuffer

    numbers = normals(replicas, 40) + 1
    weight, bias = (numbers[:, start : start + 16].requires_grad_(True) for start in (4, 20))
    x = images_last(replicas * 3, 16, 6, 6, seed=1)

    def loss() -> Tensor:
        y = x
        for _ in range(uses):
            statistics = torch.zeros(replicas, 16, device=DEVICE), torch.ones(replicas, 16, device=DEVICE)
            y = batch_norm(y, *statistics, weight, bias, True, 0.1, 1e-5, True)
        return y.square().sum()

    expected = torch.autograd.grad(loss(), (weight, bias))
    with GradientBuffer(numbers) as buffer:
        value = loss()
        buffer.begin()
        given = torch.autograd.grad(value, (weight, bias), allow_unused=True)
        result = buffer.collect()
    assert given == (None, None)
    torch.testing.assert_close(result[:, 4:20], expected[0])
    torch.testing.assert_close(result[:, 20:36], expected[1])
    assert not result[:, :4].any()
    assert not result[:, 36:].any()
