"""The paper's residual networks, built as `YNet`s (paper, section 3, "Network details").

`resnet26` is the CIFAR network: pre-activation basic blocks in three groups, split behind the second. `resnet18` and
`resnet50` are the ImageNet ones: post-activation blocks in four groups, split behind the third. Group Normalization is
the paper's choice, because a batch made of one image has no useful batch statistics; Batch Normalization the variant.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.networks.ynet import Card, YNet

Norm = Literal["group", "batch"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class GroupNormReLU(nn.GroupNorm):
    """GroupNorm and the ReLU behind it as one layer, so that both can be computed in one go."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # torch calls the argument `input`
        return F.relu(super().forward(x))


class BatchNormReLU(nn.Sequential):
    """BatchNorm and the ReLU behind it as one layer, so that both can be computed in one go."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU())


class AddingConv2d(nn.Conv2d):
    """A convolution and the shortcut added to it as one layer, so that both can be computed in one go."""

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + shortcut


class ZeroPadShortcut(nn.Module):
    """The parameter-free shortcut of a strided block: 2×2 average pooling, missing channels are zeros."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.stride == 2 and x.shape[-2] % 2 == 0 and x.shape[-1] % 2 == 0:
            # A mean over pairs of rows and columns, whose gradient is a mere copy; channels last, as images lie.
            pairs = x.permute(0, 2, 3, 1).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (N, h, 2, w, 2, C)
            return F.pad(pairs.mean((2, 4)), (0, self.extra)).permute(0, 3, 1, 2)
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)  # ceil: as the strided convolution rounds
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))


class PreActivationBlock(nn.Module):
    """Norm, ReLU, 3×3 convolution, twice, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = _norm_relu(norm, inputs, groups=8)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = _norm_relu(norm, outputs, groups=8)
        self.conv2 = AddingConv2d(outputs, outputs, 3, padding=1, bias=False)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else ZeroPadShortcut(stride, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.norm1(x))
        return self.conv2(self.norm2(y), self.shortcut(x))


class PostActivationBlock(nn.Module):
    """ResNet-18's basic block or, with `bottleneck`, ResNet-50's block with three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.layers = nn.Sequential()
        for place, (ins, outs, kernel, step) in enumerate(shapes):
            self.layers.append(nn.Conv2d(ins, outs, kernel, step, padding=kernel // 2, bias=False))
            between = place < len(shapes) - 1
            self.layers.append(_norm_relu(norm, outs, groups=32) if between else _norm(norm, outs, groups=32))
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs, groups=32)
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
) -> YNet:
    """The paper's CIFAR network; also the small one of the demo, with another depth.

    Args:
        classes: Number of classes.
        norm: "group" (8 groups) or "batch".
        width: Multiplies the 16, 32, 64 channels of the three groups.
        channels: Channels of the images.
        depth: Any 6n + 2: n blocks of two convolutions in each group.
        size: Side of the images it is meant for; the network itself takes any.
        outputs: Outputs of the self-supervised branch.
        seed: Seed of the initial weights.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"`depth` must be 6n + 2 with n at least 1 (8, 14, 20, 26, …), got {depth}.")
    blocks, widths = (depth - 2) // 6, [16 * width, 32 * width, 64 * width]
    _check(norm, classes=classes, width=width, channels=channels, outputs=outputs)

    def group(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        first = PreActivationBlock(inputs, outputs, stride, norm)
        return nn.Sequential(first, *(PreActivationBlock(outputs, outputs, 1, norm) for _ in range(blocks - 1)))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
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
        return _assemble(encoder, trunk, widths[2], classes, outputs, card)


def resnet18(classes: int = 1000, *, norm: Norm = "group", size: int = 224, outputs: int = 4, seed: int = 0) -> YNet:
    """The paper's ImageNet network: 18 layers, split behind the third group.

    Args:
        classes: Number of classes.
        norm: "group" (32 groups) or "batch".
        size: Side of the images it is meant for; the network itself takes any.
        outputs: Outputs of the self-supervised branch.
        seed: Seed of the initial weights.
    """
    return _imagenet_resnet("resnet18", [2, 2, 2, 2], False, classes, norm, size, outputs, seed)


def resnet50(classes: int = 1000, *, norm: Norm = "group", size: int = 224, outputs: int = 4, seed: int = 0) -> YNet:
    """The 50-layer ImageNet network with bottleneck blocks; arguments as for `resnet18`."""
    return _imagenet_resnet("resnet50", [3, 4, 6, 3], True, classes, norm, size, outputs, seed)


def build(card: Card) -> YNet:
    """The untrained network that a card describes."""
    builders = {"resnet26": resnet26, "resnet18": resnet18, "resnet50": resnet50}
    arguments = dict(card.architecture)
    name = arguments.pop("name", None)
    if name not in builders:
        raise ValueError(f"no builder is called {name!r}")
    net = builders[name](**arguments)
    return YNet(net.encoder, net.classifier, net.ssl, replace(net.card, mean=card.mean, std=card.std))


def _imagenet_resnet(
    name: str, blocks: list[int], bottleneck: bool, classes: int, norm: Norm, size: int, outputs: int, seed: int
) -> YNet:
    _check(norm, classes=classes, outputs=outputs)
    expansion = 4 if bottleneck else 1

    def group(inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
        first = PostActivationBlock(inputs, width, stride, norm, bottleneck)
        rest = (PostActivationBlock(width * expansion, width, 1, norm, bottleneck) for _ in range(count - 1))
        return nn.Sequential(first, *rest)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
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
        return _assemble(encoder, trunk, 512 * expansion, classes, outputs, card)


def _assemble(encoder: nn.Module, trunk: nn.Sequential, features: int, classes: int, outputs: int, card: Card) -> YNet:
    for module in [*encoder.modules(), *trunk.modules()]:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    # θs starts as a copy of θm but for its last layer.
    classifier = nn.Sequential(*trunk, nn.Linear(features, classes))
    ssl = nn.Sequential(*copy.deepcopy(trunk), nn.Linear(features, outputs))
    return YNet(encoder, classifier, ssl, card)


def _norm(norm: Norm, channels: int, groups: int) -> nn.Module:
    return nn.GroupNorm(groups, channels) if norm == "group" else nn.BatchNorm2d(channels)


def _norm_relu(norm: Norm, channels: int, groups: int) -> nn.Module:
    return GroupNormReLU(groups, channels) if norm == "group" else BatchNormReLU(channels)


def _check(norm: str, **counts: int) -> None:
    if norm not in get_args(Norm):
        raise ValueError(f'`norm` must be "group" or "batch", got {norm!r}.')
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"`{name}` must be at least 1, got {count}.")
