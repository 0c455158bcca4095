"""The precision of layers, "fp32", "tf32" or "bf16", and the context manager that applies it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Precision = Literal["fp32", "tf32", "bf16"]

# Not cuDNN's, whose gradients in bfloat16 are not always finite on Hopper GPUs.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def choose_precision(device: torch.device) -> Precision:
    """Return the default precision of a device: "tf32" on CUDA, as in torch's own convolutions, else "fp32"."""
    return "tf32" if device.type == "cuda" else "fp32"


def check_precision(precision: str | None) -> torch.dtype:
    """Return the dtype that layers compute in; None stands for the default of a device.

    Raises:
        ValueError: The precision is unknown.
    """
    if precision is not None and precision not in get_args(Precision):
        raise ValueError(f"`precision` must be one of {', '.join(get_args(Precision))}, got {precision!r}.")
    return torch.bfloat16 if precision == "bf16" else torch.float32


@contextlib.contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute in `precision` within the context, whatever the caller's settings, which are restored at the end.

    Float32 products on CUDA use full precision ("fp32") or TF32. cuDNN is restricted to deterministic algorithms,
    because a resumed stream must continue bit for bit, and not used for attention. Autocast is disabled.
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
            sdpa_kernel(_ATTENTION),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def mixed_precision(device: torch.device, enabled: bool) -> torch.autocast:
    """Return torch's bfloat16 autocast, without its cache: within `arithmetic` that is not cleared after a step."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)
