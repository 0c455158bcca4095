"""The arithmetic of layers: "fp32", "tf32" or "bf16", and the context that applies it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

import torch

Precision = Literal["fp32", "tf32", "bf16"]


def check_precision(precision: str) -> torch.dtype:
    """The dtype that layers compute in; an unknown precision is an error."""
    if precision not in get_args(Precision):
        raise ValueError(f"`precision` must be one of {', '.join(get_args(Precision))}, got {precision!r}.")
    return torch.bfloat16 if precision == "bf16" else torch.float32


@contextlib.contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within it, numbers are computed as `precision` says, whatever the caller has set; outside nothing changes.

    Float32 products on CUDA are exact ("fp32") or take TF32. cuDNN is held to its deterministic algorithms: a stream
    that is resumed must go on bit for bit. The caller's autocast does not reach in.
    """
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        with (
            torch.autocast("cuda", enabled=False),
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=precision != "fp32"),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
