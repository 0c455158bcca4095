"""Alternatives to the plain implementations, in torch, each faster on one kind of device under its condition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.kernels import ConvolutionForm, NormForm


def convolve_grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None
) -> Tensor:
    """Convolve all replicas at once, as groups of channels."""
    count = len(weight)
    wide = x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)  # (B, S·I, H, W)
    flat = None if bias is None else bias.to(x.dtype).flatten()
    rest = form.stride, form.padding, form.dilation, form.groups * count
    wide = F.conv2d(wide, weight.to(x.dtype).flatten(0, 1), flat, *rest)
    y = wide.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)
    return y if plus is None else y + plus


def convolve_pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None
) -> Tensor:
    """Convolve with filters of 1×1 by one batched matrix product, without copies if x has its channels last."""
    rows = x[:, :, :: form.stride[0], :: form.stride[1]].permute(0, 2, 3, 1)  # (S·B, h, w, inputs)
    matrices = weight.to(x.dtype).flatten(2).transpose(1, 2)  # (S, inputs, outputs)
    flat = rows.reshape(len(weight), -1, rows.shape[-1])  # (S, B·h·w, inputs)
    y = flat @ matrices if bias is None else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), flat, matrices)
    y = y.view(*rows.shape[:3], -1).permute(0, 3, 1, 2)
    return y if plus is None else y + plus


def convolve_unfolded(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None
) -> Tensor:
    """Convolve by matrix products: for few images of many replicas, where calls cost more than copies."""
    weight = weight.to(x.dtype)
    padding = (0, 0) if isinstance(form.padding, str) else form.padding
    patches = F.unfold(x, weight.shape[-2:], form.dilation, padding, form.stride)  # (S·B, inputs·k·k, P)
    y = weight.flatten(2).unsqueeze(1) @ patches.unflatten(0, (len(weight), -1))  # (S, B, outputs, P)
    y = y if bias is None else y + bias.to(x.dtype)[:, None, :, None]
    sides = zip(x.shape[-2:], padding, form.dilation, weight.shape[-2:], form.stride, strict=True)
    shape = [(side + 2 * pad - gap * (k - 1) - 1) // step + 1 for side, pad, gap, k, step in sides]
    y = y.flatten(0, 1).unflatten(2, shape).contiguous(memory_format=torch.channels_last)
    return y if plus is None else y + plus


def convolve_in_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None
) -> Tensor:
    """Convolve replica by replica on contiguous images: with channels last, torch reorders wide filters."""
    weight, biases = weight.to(x.dtype), [None] * len(weight) if bias is None else bias.to(x.dtype)
    pieces = zip(x.contiguous().chunk(len(weight)), weight, biases, strict=True)
    y = concatenate([F.conv2d(piece, w, b, *form) for piece, w, b in pieces])
    return y if plus is None else y + plus


def group_norm_by_replica(x: Tensor, norm: NormForm) -> Tensor:
    """GroupNorm replica by replica, with scale and shift inside torch's operator, which saves two passes."""
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    if not x.requires_grad:
        x = x.contiguous()  # with channels last, torch crashes in backward if x needs no gradient
    pieces = zip(x.chunk(len(weight)), weight, bias, strict=True)
    y = concatenate([F.group_norm(piece, norm.groups, w, b, norm.eps) for piece, w, b in pieces])
    return F.relu_(y) if norm.relu else y


def halve_pairs(x: Tensor, extra: int) -> Tensor:
    """Average 2×2 pixels by reshaping, so that the gradient is a copy, and append `extra` channels of zeros."""
    pairs = x.permute(0, 2, 3, 1).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (N, h, 2, w, 2, C)
    return F.pad(pairs.mean((2, 4)), (0, extra)).permute(0, 3, 1, 2)


def concatenate(pieces: list[Tensor]) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
