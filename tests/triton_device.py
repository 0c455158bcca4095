"""Where tests of the Triton kernels run: on a GPU, or by Triton's interpreter on a CPU (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from testtime.randomness import Draws

pytest.importorskip("triton", reason="needs a CUDA device, or Triton as make test-extras installs it")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16]
PRODUCTS = [torch.float32] if INTERPRETED else DTYPES  # the interpreter has no products of bfloat16
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"),
]


def normals(*shape: int, seed: int = 0) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:]).to(DEVICE)


def images_last(*shape: int, seed: int = 0) -> Tensor:
    return normals(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
