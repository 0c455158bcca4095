"""The Triton kernels: on a GPU, or on a CPU by Triton's interpreter (`TRITON_INTERPRET=1`), against torch."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from testtime.randomness import Draws

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
            loss = compute(x, parameters, uses)
            compute(x, parameters, 1)  # nobody asks for its gradient
            found = torch.autograd.grad(loss, parameters)
            results.append(gathering.collect())
        assert [gathering.is_nothing(gradient) for gradient in found] == [uses == 1] * 3 + [False]
        for kept, rest, reference in zip(split(results[-1]), found, expected, strict=True):
            assert torch.allclose(kept + rest, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))
        assert not results[-1][:, FILTERS + 32 :].any()
    assert torch.equal(*results)
