"""The kernels for the CPU under AddressSanitizer and UBSan, on random shapes, dtypes and strides.

Run by test_sanitizers.py with the sanitizers' libraries preloaded; ends with the number of calls as its last line.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.kernels import Convolution, ConvolutionForm, NormForm, cpu
from testtime.kernels.cpu import build

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1")


def lay_out(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same numbers, lying in memory in another way."""
    way = rng.randrange(5)
    if way == 0:
        return tensor.contiguous()
    if way == 1 and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if way == 2:  # every second number of a larger tensor
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if way == 3:  # rows with gaps between them
        wide = torch.zeros(len(tensor), tensor[0].numel() + rng.randrange(1, 9), dtype=tensor.dtype)
        rows = wide[:, : tensor[0].numel()]
        rows[:] = tensor.flatten(1)
        return rows.as_strided(tensor.shape, (wide.stride(0), *tensor[0].contiguous().stride()))
    return tensor.flip(0).contiguous().flip(0)


def images_of(rng: random.Random, count: int, channels: int) -> Tensor:
    height, width = (rng.choice((1, 2, 3, 4, 5, 7, 8, 9, 16)) for _ in range(2))
    return lay_out(torch.randn(count, channels, height, width), rng)


def norm_of(rng: random.Random, replicas: int, channels: int) -> NormForm:
    groups = rng.choice([count for count in (1, 2, 4, 8, 16) if channels % count == 0])
    weight, bias = (lay_out(torch.randn(replicas, channels), rng).requires_grad_() for _ in range(2))
    return NormForm(groups, weight, bias, 1e-5, rng.random() < 0.5)


def norm_alone(x: Tensor, norm: NormForm) -> Tensor:
    pieces = zip(x.chunk(len(norm.weight)), norm.weight.double(), norm.bias.double(), strict=True)
    # Contiguous: torch's own GroupNorm crashes on channels-last images whose gradient nobody asks for.
    y = torch.cat([F.group_norm(piece.contiguous(), norm.groups, w, b, norm.eps) for piece, w, b in pieces])
    return F.relu(y) if norm.relu else y


def convolve_alone(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    pieces = zip(x.chunk(len(weight)), weight.double(), strict=True)
    return torch.cat([F.conv2d(piece, w, None, stride, padding) for piece, w in pieces])


def convolve_strided(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    form = ConvolutionForm((stride, stride), (padding, padding), (1, 1), 1)
    return cpu.convolve_strided(x, weight, None, form, None)


def try_norm(rng: random.Random) -> tuple[Tensor, Tensor, list[Tensor]]:
    replicas, channels = rng.randrange(1, 4), rng.choice((16, 32, 48, 128))
    x = images_of(rng, replicas * rng.randrange(1, 5), channels).requires_grad_()
    norm = norm_of(rng, replicas, channels)
    return cpu.group_norm(x, norm), norm_alone(x.double(), norm), [x, norm.weight, norm.bias]


def try_chain(rng: random.Random) -> tuple[Tensor, Tensor, list[Tensor]]:
    replicas, channels, length = rng.randrange(1, 4), rng.choice((16, 16, 32, 64, 128)), rng.randrange(1, 6)
    x = images_of(rng, replicas * rng.randrange(1, 5), channels).requires_grad_()
    plus = lay_out(torch.randn(x.shape), rng).requires_grad_() if length % 2 and rng.random() < 0.5 else None
    groups = norm_of(rng, 1, channels).groups
    layers = []
    for place in range(length):
        made = norm_of(rng, replicas, channels)
        norm = NormForm(groups, made.weight, made.bias, made.eps, made.relu)
        weight = lay_out(torch.randn(replicas, channels, channels, 3, 3) / (3 * channels**0.5), rng).requires_grad_()
        layers.append(Convolution(weight, None if place == 0 and length % 2 and rng.random() < 0.5 else norm))
    y = block = x.double()
    for place, layer in enumerate(layers):
        opens = place >= length % 2 and (place - length % 2) % 2 == 0
        block = y if opens else block
        y = convolve_alone(y if layer.norm is None else norm_alone(y, layer.norm), layer.weight)
        if place < length % 2:
            y = y if plus is None else y + plus.double()
        elif not opens:
            y = y + block
    used = [
        tensor
        for layer in layers
        for tensor in (layer.weight, *((layer.norm.weight, layer.norm.bias) if layer.norm else ()))
    ]
    return cpu.convolve_chain(x, layers, plus), y, [x, *([] if plus is None else [plus]), *used]


def try_strided(rng: random.Random) -> tuple[Tensor, Tensor, list[Tensor]]:
    replicas, inputs, outputs = rng.randrange(1, 4), rng.choice((1, 3, 5, 16, 20, 64)), rng.choice((16, 32, 48))
    stride, padding = rng.randrange(1, 4), rng.randrange(0, 3)
    x = images_of(rng, replicas * rng.randrange(1, 5), inputs)
    x = F.pad(x, (0, 2, 0, 2)).requires_grad_()  # no smaller than the filters
    weight = torch.randn(replicas, outputs, inputs, 3, 3) / (3 * inputs**0.5)
    weight = (weight[:1].expand_as(weight) if rng.random() < 0.3 else lay_out(weight, rng)).requires_grad_()
    return (
        convolve_strided(x, weight, stride, padding),
        convolve_alone(x.double(), weight, stride, padding),
        [x, weight],
    )


def check(found: Tensor, expected: Tensor, inputs: list[Tensor], rng: random.Random) -> None:
    """Outputs and gradients against torch's in double precision."""
    assert found.shape == expected.shape
    grad = lay_out(torch.randn(found.shape), rng)
    pairs = [(found, expected)]
    wanted = [tensor for tensor in inputs if rng.random() < 0.8] or inputs
    exact = torch.autograd.grad(expected, wanted, grad.double(), allow_unused=True)
    pairs += zip(torch.autograd.grad(found, wanted, grad, allow_unused=True), exact, strict=True)
    for one, two in pairs:
        scale = float(two.detach().abs().max()) + 1e-6
        assert torch.allclose(one.double(), two.double(), rtol=0, atol=2e-3 * scale), (one - two).abs().max() / scale


def try_wrong(rng: random.Random) -> None:
    """What the kernels must refuse: another dtype, device, number of replicas, channels or groups, an odd shape."""
    x, weight = torch.randn(4, 16, 5, 5), torch.randn(2, 16, 16, 3, 3)
    norm = NormForm(4, torch.randn(2, 16), torch.randn(2, 16), 1e-5, True)
    dtype = rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8))
    wrong: list[Callable[[], Tensor]] = [
        lambda: cpu.group_norm(x.to(dtype), norm),
        lambda: cpu.group_norm(x, NormForm(4, norm.weight.to(dtype), norm.bias, 1e-5, True)),
        lambda: cpu.group_norm(x, NormForm(4, norm.weight, norm.bias.to(dtype), 1e-5, True)),
        lambda: cpu.group_norm(x, NormForm(rng.choice((0, -1, 3, 5, 32)), norm.weight, norm.bias, 1e-5, True)),
        lambda: cpu.group_norm(x, NormForm(4, norm.weight, norm.bias[:1], 1e-5, True)),
        lambda: cpu.group_norm(x, NormForm(4, norm.weight[:, :8], norm.bias[:, :8], 1e-5, True)),
        lambda: cpu.group_norm(x[:3], norm),
        lambda: cpu.group_norm(x[:0], norm),
        lambda: cpu.group_norm(x.to("meta"), norm),
        lambda: cpu.convolve_chain(x.to(dtype), [Convolution(weight)]),
        lambda: cpu.convolve_chain(x, [Convolution(weight.to(dtype))]),
        lambda: cpu.convolve_chain(x, [Convolution(weight[:, :8])]),
        lambda: cpu.convolve_chain(x, [Convolution(weight[..., :2])]),
        lambda: cpu.convolve_chain(x, [Convolution(weight, norm), Convolution(weight[:1], norm)]),
        lambda: cpu.convolve_chain(x, [Convolution(weight)], x[..., :4]),
        lambda: cpu.convolve_chain(x, [Convolution(weight)], x.to(dtype)),
        lambda: cpu.convolve_chain(x[:, :8], [Convolution(weight[:, :8, :8])]),
        lambda: cpu.convolve_chain(x, [Convolution(weight.to("meta"))]),
        lambda: convolve_strided(x.to(dtype), weight, 2, 1),
        lambda: convolve_strided(x, weight.to(dtype), 2, 1),
        lambda: convolve_strided(x, weight[:, :10], 2, 1),
        lambda: convolve_strided(x, weight[:, :, :8], 2, 1),
        lambda: convolve_strided(x, weight, rng.choice((0, -1)), 1),
        lambda: convolve_strided(x, weight, 1, -1),
        lambda: convolve_strided(x[..., :2], weight, 1, 0),
        lambda: convolve_strided(x[:, :, :0], weight, 1, 2),
    ]
    call = rng.choice(wrong)
    try:
        with torch.set_grad_enabled(rng.random() < 0.5):
            call()
    except (ValueError, TypeError, RuntimeError):
        return
    raise AssertionError("the kernels took what they must refuse")


def main(cases: int) -> None:
    build._FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build._FLAGS) + SANITIZERS
    assert build.available()
    rng = random.Random(0)
    torch.manual_seed(0)
    for case in range(cases):
        torch.set_num_threads(rng.randrange(1, 4))
        if case % 5 == 4:
            try_wrong(rng)
        else:
            found, expected, inputs = rng.choice((try_norm, try_chain, try_strided))(rng)
            check(found, expected, inputs, rng)
        print(f"\r{case + 1}/{cases}", end="", file=sys.stderr)
    print(cases)


if __name__ == "__main__":
    main(int(sys.argv[1]))
