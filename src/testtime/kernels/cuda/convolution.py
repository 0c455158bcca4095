"""3×3 convolution for replicas, up to 64 channels, with an optional tensor added to the result.

The gradient w.r.t. the input uses the same kernel with reversed taps; the gradient w.r.t. the filters sums tiles of
pixels in a fixed order, without atomics, so that results are reproducible. CUDA C++ (nvrtc.py) computes the cases that
it supports, Triton (triton_convolution.py) the rest.

Filters are float32 in memory and rounded to the images' dtype when read. Products of bfloat16 images are accumulated in
float32; products of float32 images use TF32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from testtime.kernels import ConvolutionForm
from testtime.kernels.cuda import gradient_buffer, nvrtc, triton_convolution
from testtime.kernels.cuda.gradient_buffer import GradientBuffer
from testtime.kernels.cuda.layout import channels_last, check_images
from testtime.kernels.pointers import check


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, plus: Tensor | None) -> Tensor:
    """Convolve x `(S·B, I, H, W)` with 3×3 filters `(S, O, I, 3, 3)` → `(S·B, O, h, w)`.

    The weights are best a permuted view of `(S, 3, 3, I, O)` in memory; other layouts are copied.

    Args:
        x: Images, bfloat16 or float32.
        weight: Filters, float32.
        bias: None.
        form: Stride and padding, the same for rows and columns.
        plus: Added to the result, of the same shape.
    """
    outputs, inputs = weight.shape[1:3]
    if weight.stride()[1:] != (1, outputs, 3 * inputs * outputs, inputs * outputs):
        weight = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    stride, padding = form.stride[0], int(form.padding[0])
    return _Convolve.apply(x, weight, stride, padding, plus, gradient_buffer.current())  # type: ignore[return-value]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: int,
        padding: int,
        plus: Tensor | None,
        buffer: GradientBuffer | None,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        images, channels, height, width = x.shape
        check_images(x, len(weight))
        check(weight.permute(0, 3, 4, 2, 1), (len(weight), 3, 3, channels, weight.shape[1]), "rows", device=x.device)
        out = ((height + 2 * padding - 3) // stride + 1, (width + 2 * padding - 3) // stride + 1)
        y = channels_last(x, images, weight.shape[1], *out)
        if plus is not None:
            plus = plus.contiguous(memory_format=torch.channels_last)
            check(plus, y.shape, "channels_last", x.dtype, x.device)
        kind = nvrtc if nvrtc.convolves(x, weight, stride, padding) else triton_convolution
        kind.convolve(x, weight, y, stride, padding, plus, transposed=False)
        ctx.buffer, ctx.share = buffer, None
        if buffer is not None and ctx.needs_input_grad[1]:
            kind = nvrtc if nvrtc.gives_gradient(x, weight, stride, padding) else triton_convolution
            ctx.share = buffer.reserve(weight, kind.gradient_rows(x, y, weight))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        given = x, weight, ctx.stride, ctx.padding
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            kind = nvrtc if nvrtc.gives_gradient(*given) else triton_convolution
            rest = weight, ctx.stride, ctx.padding
            if ctx.share is not None and ctx.buffer.collects:
                ctx.buffer.later(kind.filter_gradient, x, grad, *rest, ctx.buffer.rows(ctx.share))
            else:
                replicas, outputs, inputs = weight.shape[:3]
                shape = kind.gradient_rows(x, grad, weight), replicas, 3, 3, inputs, outputs
                parts = torch.empty(shape, dtype=torch.float32, device=x.device)
                kind.filter_gradient(x, grad, *rest, parts)
                grad_weight = (parts[0] if len(parts) == 1 else parts.sum(0)).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[0]:
            grad_x = channels_last(x, *x.shape)
            kind = nvrtc if nvrtc.convolves(*given) else triton_convolution
            kind.convolve(grad, weight, grad_x, ctx.stride, ctx.padding, None, transposed=True)
        return grad_x, grad_weight, None, None, grad if ctx.needs_input_grad[4] else None, None
