"""How tensors lie in memory for the CUDA kernels: images with their channels last, a row of parameters a replica."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.kernels.pointers import check


def check_images(x: Tensor, replicas: int) -> None:
    """Check that x is as many images for each replica, in numbers that the kernels know."""
    if x.dtype not in (torch.bfloat16, torch.float32) or len(x) % replicas:
        raise ValueError(f"The kernels have no form for {x.dtype} images {tuple(x.shape)} of {replicas} replicas.")


def check_rows(x: Tensor, *parameters: Tensor) -> None:
    """Check parameters or statistics `(S, C)` of a norm of x."""
    for parameter in parameters:
        check(parameter, (len(parameters[0]), x.shape[1]), "rows", device=x.device)


def channels_last(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of a shape, channels last, with another's device and, unless given, dtype."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)
