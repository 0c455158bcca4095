"""The one door through which tensors reach compiled code: their address, once they are what the code will touch.

A kernel in C++, CUDA C++ or Triton gets bare addresses and believes every size it is told. A tensor of another dtype,
on another device, shorter or in another order would be read and written beyond its end; here it is refused instead.
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
    """The tensor itself, if it is what a kernel will touch.

    Args:
        tensor: The tensor.
        shape: The shape that the kernel takes it to have.
        layout: How the kernel takes its numbers to lie: "contiguous"; "channels_last" for images `(N, C, H, W)`; or
            "rows", where every entry of the first axis is contiguous and the entries are any distance apart.
        dtype: What the kernel takes its numbers for.
        device: Where the kernel runs; None for the CPU.

    Raises:
        ValueError: It is not that; the kernel must not be called.
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
        raise ValueError(f"A kernel for {layout} numbers got strides {tensor.stride()} of shape {tuple(tensor.shape)}.")
    return tensor


def pointer(
    tensor: Tensor,
    shape: Sequence[int],
    layout: Layout = "contiguous",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> int:
    """The address of a tensor's first number, if it is what a kernel will touch; arguments and errors of `check`."""
    return check(tensor, shape, layout, dtype, device).data_ptr()
