"""Convolution and GroupNorm of replicas on a CPU, in C++.

A step of test-time training on a CPU is 3×3 convolutions of few channels, which torch computes at the processor's peak,
and GroupNorm, which it does not. kernels.cpp needs fewer products for the first (Winograd's) and fewer passes over the
images for the second, and takes the replicas as they lie. Everything is float32 and exact but for rounding, with sums
that are no less accurate than torch's.

build.py compiles it with the machine's own C++ compiler when it is first needed, in about a second, and keeps the
result. Without a compiler, or with `TESTTIME_COMPILE=0` set, `available` says no and torch's own layers do the work.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from testtime.cpu.build import Job, Norm, available, kernels

__all__ = ["CHANNELS", "GroupNorm", "available", "convolve", "group_norm"]

CHANNELS = (16, 32, 64, 128)  # that `convolve` is compiled for


@dataclass(frozen=True)
class GroupNorm:
    """Settings and parameters of GroupNorm, with ReLU behind it or not.

    Attributes:
        groups: How many groups.
        weight: Scale `(S, C)`.
        bias: Shift `(S, C)`.
        eps: Added to the variance.
        relu: Whether ReLU follows.
    """

    groups: int
    weight: Tensor
    bias: Tensor
    eps: float
    relu: bool


def group_norm(x: Tensor, norm: GroupNorm) -> Tensor:
    """GroupNorm of x `(S·B, C, H, W)`, float32; C is a multiple of 16."""
    return _GroupNorm.apply(x, norm.weight, norm.bias, norm)  # type: ignore[return-value]


def convolve(x: Tensor, weight: Tensor, plus: Tensor | None = None, norm: GroupNorm | None = None) -> Tensor:
    """3×3 convolution, stride and padding 1, of x `(S·B, C, H, W)` with weights `(S, C, C, 3, 3)`.

    Args:
        x: Images, float32; C is one of `CHANNELS`.
        weight: Filters, float32.
        plus: Added to the result, of its shape.
        norm: Applied to x first.
    """
    if not torch.is_grad_enabled():
        return _convolve(x, weight, plus, norm)[0]
    scale, shift = (None, None) if norm is None else (norm.weight, norm.bias)
    return _Convolve.apply(x, weight, plus, scale, shift, norm)  # type: ignore[return-value]


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: GroupNorm) -> Tensor:
        x, (weight, bias) = _channels_last(x), _rows(weight, bias)
        y, moments = torch.empty_like(x), _moments(x, norm)
        job = _norm(x, weight, bias, moments, norm)
        kernels().norm_forward(job, x.data_ptr(), y.data_ptr(), *_sizes(x, weight))
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.norm = norm
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, moments = ctx.saved_tensors
        grad, grad_x, parts = _channels_last(grads[0]), torch.empty_like(x), _parts(x)
        job = _norm(x, weight, bias, moments, ctx.norm)
        pointers = x.data_ptr(), grad.data_ptr(), grad_x.data_ptr(), parts.data_ptr()
        kernels().norm_backward(job, *pointers, *_sizes(x, weight))
        return grad_x, *_sum_parts(parts, len(weight)), None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plus: Any, scale: Any, shift: Any, norm: Any) -> Tensor:
        y, *kept = _convolve(x, weight, plus, norm)
        ctx.save_for_backward(*kept)
        ctx.norm = norm
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale, shift, moments = ctx.saved_tensors
        of_x, of_weight, of_plus, *of_norm, _ = ctx.needs_input_grad
        grad, job = _channels_last(grads[0]), _job(x, weight)
        grad_x = torch.empty_like(x) if of_x or any(of_norm) else None
        grad_weight = x.new_empty(weight.shape) if of_weight else None
        norm_parts = None
        if ctx.norm is not None:
            job.norm = ctypes.pointer(_norm(x, scale, shift, moments, ctx.norm))
            norm_parts = _parts(x)
        kernels().convolve_backward(job, x.shape[1], *_pointers(grad, grad_x, grad_weight, norm_parts))
        grad_norm = _sum_parts(norm_parts, len(weight)) if norm_parts is not None and any(of_norm) else (None, None)
        return grad_x, grad_weight, grad if of_plus else None, *grad_norm, None


def _convolve(
    x: Tensor, weight: Tensor, plus: Tensor | None, norm: GroupNorm | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The result, and what its gradient needs: inputs as they were read, the norm's moments."""
    x, (weight,) = _channels_last(x), _rows(weight)
    job, scale, shift, moments = _job(x, weight), None, None, None
    if norm is not None:
        (scale, shift), moments = _rows(norm.weight, norm.bias), _moments(x, norm)
        job.norm = ctypes.pointer(_norm(x, scale, shift, moments, norm))
    y, plus = torch.empty_like(x), None if plus is None else _channels_last(plus)
    kernels().convolve_forward(job, x.shape[1], *_pointers(plus, y))
    return y, x, weight, scale, shift, moments


def _norm(x: Tensor, weight: Tensor, bias: Tensor, moments: Tensor, norm: GroupNorm) -> Norm:
    pointers = weight.data_ptr(), bias.data_ptr(), weight.stride(0), moments.data_ptr()
    return Norm(*pointers, x.shape[2] * x.shape[3], x.shape[1], norm.groups, norm.eps, norm.relu)


def _job(x: Tensor, weight: Tensor) -> Job:
    replicas, images, threads = _sizes(x, weight)
    return Job(None, x.data_ptr(), weight.data_ptr(), weight.stride(0), replicas, images, *x.shape[2:], threads)


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """How many replicas, images of each, and threads."""
    count = weight.shape[0]
    return count, x.shape[0] // count, torch.get_num_threads()


def _moments(x: Tensor, norm: GroupNorm) -> Tensor:
    return x.new_empty(len(x), norm.groups, 2)


def _parts(x: Tensor) -> Tensor:
    """Room for each image's part of the gradients by scale and shift."""
    return x.new_empty(len(x), 2, x.shape[1])


def _sum_parts(parts: Tensor, count: int) -> tuple[Tensor, ...]:
    """The gradients by scale and shift, `(S, C)` each."""
    return parts.unflatten(0, (count, -1)).sum(1).unbind(1)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _rows(*stacked: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose rows are each in one piece, as far apart in one as in the other."""
    apart = stacked[0].stride(0)
    for tensor in stacked:
        if tensor.stride(0) != apart or not tensor[0].is_contiguous():
            return tuple(tensor.contiguous() for tensor in stacked)
    return stacked
