"""The paper's residual networks, built as `YNet`s (paper, section 3, "Network details").

`resnet26` is the CIFAR network: pre-activation basic blocks in three groups, split after the second. `resnet18` and
`resnet50` are the ImageNet networks: post-activation blocks in four groups, split after the third. The paper uses Group
Normalization, because the batch statistics of a single image are useless; Batch Normalization is the alternative.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.checks import format_value
from testtime.networks.card import LARGEST_SIZE, Card, check_integer
from testtime.networks.ynet import YNet

Norm = Literal["group", "batch"]
Device = torch.device | str
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOST = {
    "classes": 10**6,
    "outputs": 10**6,
    "width": 1000,
    "depth": 2000,
    "channels": LARGEST_SIZE,
    "size": LARGEST_SIZE,
}
_DTYPE = torch.float32  # of every layer, whatever torch's default dtype


class GroupNormReLU(nn.GroupNorm):
    """GroupNorm followed by ReLU, as one layer that a kernel can fuse."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # torch calls the argument `input`
        return F.relu(super().forward(x))


class BatchNormReLU(nn.Sequential):
    """BatchNorm followed by ReLU, as one layer that a kernel can fuse."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.BatchNorm2d(channels, dtype=_DTYPE), nn.ReLU())


class AddingConv2d(nn.Conv2d):
    """Convolution plus shortcut, as one layer that a kernel can fuse."""

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + shortcut


class ZeroPadShortcut(nn.Module):
    """The parameter-free shortcut of a strided block: average pooling and zero-padded channels."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)  # rounds sizes as the strided convolution does
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))


class PreActivationBlock(nn.Module):
    """Two times norm, ReLU and 3×3 convolution, with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = _norm_relu(norm, inputs, groups=8)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False, dtype=_DTYPE)
        self.norm2 = _norm_relu(norm, outputs, groups=8)
        self.conv2 = AddingConv2d(outputs, outputs, 3, padding=1, bias=False, dtype=_DTYPE)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else ZeroPadShortcut(stride, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.norm1(x))
        return self.conv2(self.norm2(y), self.shortcut(x))


class PostActivationBlock(nn.Module):
    """ResNet-18's basic block or, with `bottleneck`, ResNet-50's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.layers = nn.Sequential()
        for index, (ins, outs, kernel, step) in enumerate(shapes):
            self.layers.append(nn.Conv2d(ins, outs, kernel, step, padding=kernel // 2, bias=False, dtype=_DTYPE))
            between = index < len(shapes) - 1
            self.layers.append(_norm_relu(norm, outs, groups=32) if between else _norm(norm, outs, groups=32))
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False, dtype=_DTYPE), _norm(norm, outputs, groups=32)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet26(
    classes: int = 10,
    *,
    norm: Norm = "group",
    width: int = 1,
    channels: int = 3,
    depth: int = 26,
    size: int = 32,
    outputs: int = 4,
    seed: int = 0,
    device: Device = "cpu",
) -> YNet:
    """Build the paper's CIFAR network; the demo uses a shallower one.

    Args:
        classes: Number of classes.
        norm: "group" (8 groups) or "batch".
        width: Multiplier of the 16, 32 and 64 channels of the three groups.
        channels: Channels of the images.
        depth: 6n + 2, for n blocks of two convolutions per group.
        size: Side of the images; recorded on the card, the network accepts any.
        outputs: Outputs of the self-supervised branch.
        seed: Seed of the initial weights, which are the same on every device.
        device: Device of the parameters; "meta" for shapes without values.

    Raises:
        ValueError: An argument is out of range.
    """
    _check(norm, classes=classes, width=width, channels=channels, depth=depth, size=size, outputs=outputs)
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"`depth` must be 6n + 2 with n at least 1 (8, 14, 20, 26, …), got {depth}.")
    blocks, widths = (depth - 2) // 6, [16 * width, 32 * width, 64 * width]

    def group(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        first = PreActivationBlock(inputs, outputs, stride, norm)
        return nn.Sequential(first, *(PreActivationBlock(outputs, outputs, 1, norm) for _ in range(blocks - 1)))

    with building(seed, device):
        encoder = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False, dtype=_DTYPE),
            group(widths[0], widths[0], 1),
            group(widths[0], widths[1], 2),
        )
        trunk = nn.Sequential(
            group(widths[1], widths[2], 2),
            _norm_relu(norm, widths[2], groups=8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        arguments = {"classes": classes, "norm": norm, "width": width, "channels": channels, "depth": depth}
        card = Card(
            architecture={"name": "resnet26", **arguments, "size": size, "outputs": outputs},
            size=size,
            mean=(0.5,) * channels,
            std=(0.5,) * channels,
            augment={"name": "crop-flip", "padding": max(1, size // 8)},
        )
        return _assemble(encoder, trunk, widths[2], classes, outputs, card).to(device)


def resnet18(
    classes: int = 1000,
    *,
    norm: Norm = "group",
    size: int = 224,
    outputs: int = 4,
    seed: int = 0,
    device: Device = "cpu",
) -> YNet:
    """Build the paper's ImageNet network: 18 layers, split after the third group.

    Args:
        classes: Number of classes.
        norm: "group" (32 groups) or "batch".
        size: Side of the images; recorded on the card, the network accepts any.
        outputs: Outputs of the self-supervised branch.
        seed: Seed of the initial weights, which are the same on every device.
        device: Device of the parameters; "meta" for shapes without values.

    Raises:
        ValueError: An argument is out of range.
    """
    return _imagenet_resnet("resnet18", [2, 2, 2, 2], False, classes, norm, size, outputs, seed, device)


def resnet50(
    classes: int = 1000,
    *,
    norm: Norm = "group",
    size: int = 224,
    outputs: int = 4,
    seed: int = 0,
    device: Device = "cpu",
) -> YNet:
    """Build the 50-layer ImageNet network with bottleneck blocks; arguments as for `resnet18`."""
    return _imagenet_resnet("resnet50", [3, 4, 6, 3], True, classes, norm, size, outputs, seed, device)


def _imagenet_resnet(
    name: str,
    blocks: list[int],
    bottleneck: bool,
    classes: int,
    norm: Norm,
    size: int,
    outputs: int,
    seed: int,
    device: Device,
) -> YNet:
    _check(norm, classes=classes, size=size, outputs=outputs)
    expansion = 4 if bottleneck else 1

    def group(inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
        first = PostActivationBlock(inputs, width, stride, norm, bottleneck)
        rest = (PostActivationBlock(width * expansion, width, 1, norm, bottleneck) for _ in range(count - 1))
        return nn.Sequential(first, *rest)

    with building(seed, device):
        encoder = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False, dtype=_DTYPE),
            _norm_relu(norm, 64, groups=32),
            nn.MaxPool2d(3, 2, padding=1),
            group(64, 64, blocks[0], 1),
            group(64 * expansion, 128, blocks[1], 2),
            group(128 * expansion, 256, blocks[2], 2),
        )
        trunk = nn.Sequential(
            group(256 * expansion, 512, blocks[3], 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        card = Card(
            architecture={"name": name, "classes": classes, "norm": norm, "size": size, "outputs": outputs},
            size=size,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            augment={"name": "resized-crop-flip"},
        )
        return _assemble(encoder, trunk, 512 * expansion, classes, outputs, card).to(device)


@contextlib.contextmanager
def building(seed: int, device: Device) -> Iterator[None]:
    """Initialise layers from a seed on the CPU, or on the meta device, whatever torch's defaults."""
    built_on = "meta" if torch.device(device).type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(built_on), torch.inference_mode(False):
        torch.manual_seed(seed)
        yield


def _assemble(encoder: nn.Module, trunk: nn.Sequential, features: int, classes: int, outputs: int, card: Card) -> YNet:
    for module in [*encoder.modules(), *trunk.modules()]:
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:  # on meta, it would import a compiler
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    # θs starts as a copy of θm, except for the last layer.
    classifier = nn.Sequential(*trunk, nn.Linear(features, classes, dtype=_DTYPE))
    ssl = nn.Sequential(*copy.deepcopy(trunk), nn.Linear(features, outputs, dtype=_DTYPE))
    return YNet(encoder, classifier, ssl, card)


def _norm(norm: Norm, channels: int, groups: int) -> nn.Module:
    return nn.GroupNorm(groups, channels, dtype=_DTYPE) if norm == "group" else nn.BatchNorm2d(channels, dtype=_DTYPE)


def _norm_relu(norm: Norm, channels: int, groups: int) -> nn.Module:
    return GroupNormReLU(groups, channels, dtype=_DTYPE) if norm == "group" else BatchNormReLU(channels)


def _check(norm: str, **counts: int) -> None:
    if norm not in get_args(Norm):
        raise ValueError(f'`norm` must be "group" or "batch", got {format_value(norm)}.')
    for name, count in counts.items():
        check_integer(name, count, _MOST[name])
