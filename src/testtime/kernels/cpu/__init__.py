"""Convolution and GroupNorm of replicas on a CPU, in C++.

A step of test-time training on a CPU is mostly 3×3 convolutions of few channels, which torch computes at peak speed,
and GroupNorm, which it does not. kernels.cpp needs fewer multiplications for the first (Winograd) and fewer passes over
the images for the second, and handles replicas without copies. Everything is float32; the rounding error of a
convolution is up to four times that of torch, that of a norm no larger.

build.py compiles it with the system's C++ compiler on first use, in about ten seconds, and caches the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from testtime.kernels import CPU_CHANNELS, CPU_LARGEST, Convolution, ConvolutionForm, NormForm
from testtime.kernels.cpu.build import Chain, Filters, Layer, Norm, kernels
from testtime.kernels.pointers import pointer


def group_norm(x: Tensor, norm: NormForm) -> Tensor:
    """Apply GroupNorm to x `(S·B, C, H, W)`, float32; C is a multiple of 16."""
    return _GroupNorm.apply(x, norm.weight, norm.bias, norm)  # type: ignore[return-value]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None) -> Tensor:
    """Apply a float32 3×3 convolution with stride and padding 1 and equal input and output `CPU_CHANNELS`."""
    return convolve_chain(x, [Convolution(weight)], plus)


def convolve_chain(x: Tensor, layers: Sequence[Convolution], plus: Tensor | None = None) -> Tensor:
    """Apply a chain of such convolutions to x `(S·B, C, H, W)`.

    If their number is odd, `plus` is added to the output of the first. The others form pairs, the residual blocks: the
    input of a pair is added to its output.

    Args:
        x: Images.
        layers: The convolutions; those in pairs have norms, all with the same number of groups.
        plus: Images of x's shape.
    """
    assert all(layer.norm is not None for layer in layers[len(layers) % 2 :])
    assert plus is None or len(layers) % 2
    if not torch.is_grad_enabled():
        x, layers = _channels_last(x), _in_rows(layers)
        return _forward(x, layers, _moments(x, layers), plus, None)
    tensors = [t for one in layers for t in (one.weight, *((one.norm.weight, one.norm.bias) if one.norm else ()))]
    return _Convolve.apply(x, plus, layers, *tensors)  # type: ignore[return-value]


def convolve_strided(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None
) -> Tensor:
    """Apply a float32 3×3 convolution of any stride and padding; the number of outputs is a multiple of 16.

    If the filters are an expanded tensor, shared by all replicas, the gradient is still computed per replica.
    """
    y = _ConvolveStrided.apply(x, weight, form.stride[0], int(form.padding[0]))
    return y if plus is None else y + plus  # type: ignore[return-value,operator]


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: NormForm) -> Tensor:
        x, norm = _channels_last(x), _norm_in_rows(norm)
        y, moments = torch.empty_like(x), x.new_empty(len(x), norm.groups, 2)
        count, *rest = _sizes(x, *norm.weight.shape)
        kernels().norm_forward(_norm(x, count, norm, moments), _images(x, x.shape), _images(y, x.shape), count, *rest)
        ctx.save_for_backward(x, norm.weight, norm.bias, moments)
        ctx.norm = norm
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, _, moments = ctx.saved_tensors
        grad, grad_x, parts = _channels_last(grads[0]), torch.empty_like(x), x.new_empty(len(x), 2, x.shape[1])
        pointers = *(_images(tensor, x.shape) for tensor in (x, grad, grad_x)), pointer(parts, (len(x), 2, x.shape[1]))
        count, *rest = _sizes(x, *weight.shape)
        kernels().norm_backward(_norm(x, count, ctx.norm, moments), *pointers, count, *rest)
        return grad_x, *parts.unflatten(0, (len(weight), -1)).sum(1).unbind(1), None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plus: Any, layers: Any, *tensors: Tensor) -> Tensor:
        x, layers = _channels_last(x), _in_rows(layers)
        moments, inner = _moments(x, layers), x.new_empty(len(layers) - 1, *x.shape)  # raw memory, whatever its axes
        ctx.save_for_backward(x, moments, inner, *tensors)  # the tensors, so that in-place changes are detected
        ctx.layers = layers
        return _forward(x, layers, moments, plus, inner)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, moments, inner, *_), layers = ctx.saved_tensors, ctx.layers
        of_x, of_plus, _, *of_tensors = ctx.needs_input_grad
        grad, weight, alone = _channels_last(grads[0]), layers[0].weight, len(layers) == 1
        first_norm = layers[0].norm is not None and any(of_tensors[1:3])
        grad_x = torch.empty_like(x) if of_x or first_norm else None
        grad_plus = torch.empty_like(x) if of_plus and not alone else None
        grad_weights = x.new_empty(len(layers), *weight.shape) if any(of_tensors) else None
        parts = x.new_empty(len(layers), len(x), 2, x.shape[1])
        kernels().chain_backward(
            _chain(x, layers, moments),
            _images(x, x.shape),
            _inner(inner, x, layers),
            *(None if tensor is None else _images(tensor, x.shape) for tensor in (grad, grad_x, grad_plus)),
            None if grad_weights is None else pointer(grad_weights, (len(layers), *weight.shape)),
            pointer(parts, (len(layers), len(x), 2, x.shape[1])),
        )
        of_norms = parts.unflatten(1, (len(weight), -1)).sum(2).unbind(0)  # (S, 2, C) for each layer
        gradients: list[Tensor | None] = []
        for index, layer in enumerate(layers):
            gradients.append(None if grad_weights is None else grad_weights[index])
            if layer.norm is not None:
                gradients += of_norms[index].unbind(1)
        return grad_x, grad if of_plus and alone else grad_plus, None, *gradients


class _ConvolveStrided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        x, weight = _channels_last(x), weight if weight[0].is_contiguous() else weight.contiguous()
        count, images, threads = _sizes(x, len(weight), weight.shape[2])
        if weight.shape[3:] != (3, 3) or weight.shape[1] % 16 or stride < 1 or padding < 0:
            raise ValueError(f"`convolve_strided` does not support filters {tuple(weight.shape)} and stride {stride}.")
        sides = [(side + 2 * padding - 3) // stride + 1 for side in x.shape[2:]]
        if min(sides) < 1 or weight.shape[1] * sides[0] * sides[1] >= CPU_LARGEST:
            raise ValueError(f"Images {tuple(x.shape)} are too small or too large for a 3×3 convolution.")
        y = _empty_images(x, len(x), weight.shape[1], *sides)
        inner = x.shape[2], x.shape[3], x.shape[1], *sides, weight.shape[1]
        ctx.filters = Filters(count, images, *inner, stride, padding, threads, weight.stride(0))
        ctx.save_for_backward(x, weight)
        ctx.outputs = y.shape
        kernels().strided_forward(ctx.filters, _images(x, x.shape), _rows(weight), _images(y, y.shape))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weight), grad = ctx.saved_tensors, _channels_last(grads[0])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            kernels().strided_backward(ctx.filters, _images(grad, ctx.outputs), _rows(weight), _images(grad_x, x.shape))
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            pointers = _images(x, x.shape), _images(grad, ctx.outputs), pointer(grad_weight, weight.shape)
            kernels().strided_filters(ctx.filters, *pointers)
        return grad_x, grad_weight, None, None


def _forward(
    x: Tensor, layers: Sequence[Convolution], moments: Tensor, plus: Tensor | None, inner: Tensor | None
) -> Tensor:
    """Return the output; the outputs of all layers but the last are written to `inner`, if given."""
    y, plus = torch.empty_like(x), None if plus is None else _channels_last(plus)
    added = None if plus is None else _images(plus, x.shape)
    saved = None if inner is None else _inner(inner, x, layers)
    kernels().chain_forward(_chain(x, layers, moments), _images(x, x.shape), added, saved, _images(y, x.shape))
    return y


def _chain(x: Tensor, layers: Sequence[Convolution], moments: Tensor) -> Chain:
    replicas, images, threads = _sizes(x, *layers[0].weight.shape[:2])
    if x.shape[1] not in CPU_CHANNELS:
        raise ValueError(f"`convolve` is not compiled for {x.shape[1]} channels; it is for {CPU_CHANNELS}.")
    array = (Layer * len(layers))(*(_layer(x, replicas, *both) for both in zip(layers, moments, strict=True)))
    return Chain(array, len(layers), len(layers) % 2, replicas, images, *x.shape[2:], x.shape[1], threads)


def _layer(x: Tensor, count: int, layer: Convolution, moments: Tensor) -> Layer:
    norm = Norm() if layer.norm is None else _norm(x, count, layer.norm, moments)
    filters = pointer(layer.weight, (count, x.shape[1], x.shape[1], 3, 3), "rows")
    return Layer(norm, filters, layer.weight.stride(0))


def _norm(x: Tensor, count: int, norm: NormForm, moments: Tensor) -> Norm:
    channels, apart = x.shape[1], norm.weight.stride(0)
    alike = count == 1 or norm.bias.stride(0) == apart  # the stride of a single row is arbitrary
    if channels % 16 or norm.groups < 1 or channels % norm.groups or not alike:
        raise ValueError(f"GroupNorm of {norm.groups} groups does not fit images {tuple(x.shape)}.")
    scales = (pointer(tensor, (count, channels), "rows") for tensor in (norm.weight, norm.bias))
    known = pointer(moments, (len(x), norm.groups, 2))
    sizes = x.shape[2] * x.shape[3], channels, norm.groups
    return Norm(*scales, apart, known, *sizes, norm.eps, norm.relu, norm.moments is not None)


def _moments(x: Tensor, layers: Sequence[Convolution]) -> Tensor:
    groups = max(0 if layer.norm is None else layer.norm.groups for layer in layers)
    moments = x.new_empty(len(layers), len(x), groups, 2)
    for layer, own in zip(layers, moments, strict=True):
        if layer.norm is not None and layer.norm.moments is not None:  # known, the same for all images of a replica
            own.unflatten(0, (len(layer.norm.moments), -1)).copy_(layer.norm.moments.unsqueeze(1))
    return moments


def _images(tensor: Tensor, shape: torch.Size) -> int:
    return pointer(tensor, shape, "channels_last")


def _rows(weight: Tensor) -> int:
    return pointer(weight, weight.shape, "rows")


def _inner(inner: Tensor, x: Tensor, layers: Sequence[Convolution]) -> int:
    return pointer(inner, (len(layers) - 1, *x.shape))


def _sizes(x: Tensor, count: int, channels: int) -> tuple[int, int, int]:
    """Return the numbers of replicas, images per replica, and threads.

    Raises:
        ValueError: There are no images, they are too large, differ in channels from the layer, or cannot be divided
            evenly among the replicas.
    """
    if x.numel() == 0 or len(x) % count or x.shape[1] != channels or x[0].numel() >= CPU_LARGEST:
        raise ValueError(f"Images {tuple(x.shape)} do not fit a layer of {count} replicas and {channels} channels.")
    return count, len(x) // count, torch.get_num_threads()


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _empty_images(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _in_rows(layers: Sequence[Convolution]) -> Sequence[Convolution]:
    """Return the layers, with copies of parameters whose rows, one per replica, are not contiguous."""
    if all(
        one.weight[0].is_contiguous() and (one.norm is None or _norm_in_rows(one.norm) is one.norm) for one in layers
    ):
        return layers
    norms = [None if one.norm is None else _norm_in_rows(one.norm) for one in layers]
    return [Convolution(one.weight.contiguous(), norm) for one, norm in zip(layers, norms, strict=True)]


def _norm_in_rows(norm: NormForm) -> NormForm:
    """Return the norm, with contiguous rows of scale and shift that have the same stride."""
    weight, bias = norm.weight, norm.bias
    if weight.stride() == bias.stride() and weight.stride(1) == 1:
        return norm
    return norm._replace(weight=weight.contiguous(), bias=bias.contiguous())
