"""The hash of randomness.py in one Triton kernel."""

# pyright: reportIndexIssue=false
# (kernels are launched as kernel[grid](...), which cannot be typed without triton installed)

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""SplitMix64's golden ratio as a signed integer, as in randomness.py."""


def mix(state: Tensor, factor: int, plus: int) -> Tensor:
    """Apply Stafford's finaliser to `state * factor + plus`, int64."""
    state = state.contiguous()
    result = torch.empty_like(state)
    _mix[(triton.cdiv(state.numel(), 1024),)](state, result, state.numel(), plus, FACTOR=factor, BLOCK=1024)
    return result


@triton.jit
def scramble(state):
    """Stafford's finaliser."""
    # The shifts are arithmetic; the masks make them logical. The factors are SplitMix64's, as signed integers.
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _mix(x_ptr, y_ptr, count, plus, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(x_ptr + place, mask=place < count, other=0)
    tl.store(y_ptr + place, scramble(state * FACTOR + plus), mask=place < count)
