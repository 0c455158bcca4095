"""Validation of tensors whose addresses are passed to compiled code.

Kernels in C++, CUDA C++ and Triton receive raw addresses and sizes. With a tensor of another dtype, device, shape or
layout they would access memory out of bounds; here it raises an error instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["contiguous", "channels_last", "rows"]


def check(
    tensor: Tensor,
    shape: Sequence[int],
    layout: Layout = "contiguous",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Check that a tensor is what a kernel assumes, and return it.

    Args:
        tensor: The tensor.
        shape: The shape that the kernel assumes.
        layout: The memory layout that the kernel assumes: "contiguous"; "channels_last" for images `(N, C, H, W)`; or
            "rows", where every entry of the first axis is contiguous and the entries are any distance apart.
        dtype: The dtype that the kernel assumes.
        device: The device of the kernel; None for the CPU.

    Raises:
        ValueError: The tensor differs; the kernel must not be called.
    """
    if (not tensor.is_cpu) if device is None else (tensor.device != device):
        raise ValueError(f"A kernel on {device or 'cpu'} got a tensor on {tensor.device}.")
    if tensor.dtype != dtype or tensor.layout != torch.strided or tensor.is_neg():
        raise ValueError(f"A kernel for dense {dtype} got {tensor.layout} {tensor.dtype}.")
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"A kernel for shape {tuple(shape)} got {tuple(tensor.shape)}.")
    if layout == "channels_last":
        fits = tensor.is_contiguous(memory_format=torch.channels_last)
    elif layout == "rows":
        fits = len(tensor) > 0 and tensor[0].is_contiguous()
    else:
        fits = tensor.is_contiguous()
    if not fits:
        raise ValueError(f"A kernel for {layout} tensors got strides {tensor.stride()} of shape {tuple(tensor.shape)}.")
    return tensor


def pointer(
    tensor: Tensor,
    shape: Sequence[int],
    layout: Layout = "contiguous",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> int:
    """Return the address of a tensor after `check`, with the same arguments and errors."""
    return check(tensor, shape, layout, dtype, device).data_ptr()
