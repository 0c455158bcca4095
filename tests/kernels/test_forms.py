"""Other forms of the plain bodies: the same numbers as the plain ones, each where it is the fastest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.kernels import cpu, forms
from testtime.kernels.cpu import build
from testtime.networks.resnet import GroupNormReLU, ZeroPadShortcut
from testtime.networks.stacked import stack_layers
from testtime.networks.stacking import Stacking
from testtime.randomness import Draws

# inputs, outputs, stride, images of a replica, side, groups
Shape = tuple[int, int, int, int, int, int]


def numbers(seed: int, *shape: int) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:])


def stack(layer: nn.Module, count: int) -> nn.Module:
    """The layer's stacked form, with parameters of its own for each replica."""
    stacked = stack_layers(layer, Stacking(count))
    with torch.no_grad():
        for parameter in stacked.parameters():
            parameter.mul_(1 + torch.arange(count).view(-1, *[1] * (parameter.dim() - 1)))
    return stacked.requires_grad_(True)


def answer(stacked: nn.Module, x: Tensor, *more: Tensor) -> list[Tensor]:
    """What a stacked layer gives, and its gradients."""
    moving = [x.clone().requires_grad_(True), *stacked.parameters()]
    y = stacked(moving[0], *more)
    return [y.detach(), *torch.autograd.grad(y, moving, numbers(9, *y.shape))]


def check(stacked: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch, *more: Tensor) -> None:
    """Compare with the plain bodies."""
    found = answer(stacked, x, *more)
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    for ours, expected in zip(found, answer(stacked, x, *more), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def use_cuda_rows(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU take the forms in torch that are meant for CUDA."""
    rows = kernels.TABLE[operation, "cuda"]
    monkeypatch.setitem(kernels.TABLE, (operation, "cpu"), tuple(row for row in rows if row.code.startswith("forms:")))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((16, 32, 1, 2, 8, 1), forms.convolve_grouped),
        ((16, 64, 2, 2, 16, 4), forms.convolve_grouped),
        ((64, 128, 2, 2, 8, 1), None),
        ((128, 16, 1, 2, 4, 1), None),
        ((1, 64, 1, 2, 128, 1), None),
    ],
)
def test_small_convolutions_on_cuda_are_one_of_many_groups(
    shape: Shape, form: object, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, outputs, stride, images, side, groups = shape
    use_cuda_rows("convolve", monkeypatch)
    layer = stack(nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=bias), 3)
    x = numbers(0, 3 * images, inputs, side, side)
    assert kernels.find("convolve", x, layer.weight, layer.bias, layer.form, None) is form
    check(layer, x, monkeypatch, numbers(1, *layer(x).shape))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, (2, 3)])
def test_convolutions_of_single_pixels_on_cuda_are_matrix_products(
    stride: int | tuple[int, int], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda_rows("convolve", monkeypatch)
    layer = stack(nn.Conv2d(5, 7, 1, stride, bias=bias), 3)
    x = numbers(0, 6, 5, 9, 7).contiguous(memory_format=torch.channels_last)
    assert kernels.find("convolve", x, layer.weight, layer.bias, layer.form, None) is forms.convolve_pointwise
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    check(layer, x, monkeypatch, numbers(1, *layer(x).shape))


@pytest.mark.skipif(not build.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((128, 128, 1, 1, 4, 1), cpu.convolve),
        ((256, 256, 1, 4, 16, 1), cpu.convolve),
        ((256, 256, 1, 3, 16, 1), forms.convolve_in_rows),
        ((512, 512, 1, 2, 4, 1), forms.convolve_in_rows),
        ((64, 128, 2, 1, 8, 1), cpu.convolve_strided),
        ((128, 256, 2, 4, 8, 1), None),
        ((8, 12, 2, 2, 9, 1), forms.convolve_unfolded),
        ((8, 12, 2, 4, 9, 1), None),
        ((16, 16, 1, 2, 4, 4), None),
    ],
)
def test_convolutions_on_a_cpu_take_the_form_that_is_fastest(
    shape: Shape, form: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, outputs, stride, images, side, groups = shape
    layer = stack(nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False), 2)
    x = numbers(0, 2 * images, inputs, side, side)
    assert kernels.find("convolve", x, layer.weight, layer.bias, layer.form, None) is form
    check(layer, x, monkeypatch, numbers(1, *layer(x).shape))


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 2), (3, 2, 1)])
def test_unfolded_convolutions_of_any_geometry(
    stride: int, padding: int, dilation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = stack(nn.Conv2d(3, 5, (3, 2), stride, padding, dilation), 2)
    x = numbers(0, 4, 3, 9, 7)
    assert kernels.find("convolve", x, layer.weight, layer.bias, layer.form, None) is forms.convolve_unfolded
    check(layer, x, monkeypatch, numbers(1, *layer(x).shape))


@pytest.mark.parametrize("kind", [nn.GroupNorm, GroupNormReLU])
@pytest.mark.parametrize("channels_last", [True, False])
def test_group_norm_by_replica(kind: type[nn.GroupNorm], channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = stack(kind(3, 12), 3), 2 + numbers(0, 6, 12, 5, 4)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    assert kernels.find("group_norm", x, layer.form) is forms.group_norm_by_replica
    with torch.enable_grad():  # of images that need no gradient as well
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    check(layer, x, monkeypatch)


def test_pairs_are_halved_as_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_rows("halve", monkeypatch)
    layer, x = stack(ZeroPadShortcut(2, 5), 2), numbers(0, 4, 3, 6, 8)
    assert kernels.find("halve", x, 5) is forms.halve_pairs
    assert kernels.find("halve", x[..., :7], 5) is None
    check(layer, x, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "given",
    [
        {"kernel_size": 1},
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 3, "padding": "valid", "bias": False},
        {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 2)},
        {"kernel_size": 3, "groups": 16, "padding": 1},
        {"kernel_size": 3, "dilation": 3, "padding": 3, "bias": False},
    ],
)
def test_convolutions_of_any_geometry_are_the_layers(
    given: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        use_cuda_rows("convolve", monkeypatch)
    check(stack(nn.Conv2d(16, 16, **given), 2), numbers(0, 4, 16, 9, 9), monkeypatch)
