"""The memory layout of the CUDA kernels: images channels last, parameters one row per replica."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.kernels.pointers import check


def check_images(x: Tensor, replicas: int) -> None:
    """Check that x has a supported dtype and as many images for each replica."""
    if x.dtype not in (torch.bfloat16, torch.float32) or len(x) % replicas:
        raise ValueError(f"The kernels do not support {x.dtype} images {tuple(x.shape)} of {replicas} replicas.")


def check_rows(x: Tensor, *parameters: Tensor) -> None:
    """Check the parameters or statistics `(S, C)` of a norm of x."""
    for parameter in parameters:
        check(parameter, (len(parameters[0]), x.shape[1]), "rows", device=x.device)


def channels_last(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty channels-last tensor with the device and, unless given, the dtype of another."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)
