"""Small models written by hand, as a user would have them, and pictures to train them with, for several tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.randomness import Draws

CLASSES = 3


def pictures(count: int = 26, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise images `(count, 1, 8, 8)` with a bright bar across, whose height is the class."""
    numbers = torch.arange(count)
    labels = Draws.of(seed, numbers).purpose("label").integers(CLASSES)
    images = Draws.of(seed, numbers).purpose("image").integers(100, 1, 8, 8)
    rows = torch.arange(8) // 3 == labels[:, None]  # (count, 8)
    return (images + 150 * rows[:, None, :, None]).to(torch.uint8), labels


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Residual(nn.Module):
    """A residual network that adds, pools and normalises with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.top = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        x = self.norm(torch.relu(self.left(x)) + self.right(x))
        x = F.avg_pool2d(x, 2) + F.max_pool2d(x, 2)
        return self.head(F.gelu(self.top(x)).mean((2, 3)))


class Flattening(nn.Module):
    """The shape of countless tutorials: convolutions, `view`, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 4 * 4, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = x.view(x.size(0), -1)
        return self.head(F.relu(self.hidden(x)))


class Attention(nn.Module):
    """Residual self-attention and a residual perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(tokens)).unflatten(-1, (3, self.heads, -1))  # (N, T, 3, heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)  # (N, heads, T, d)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """Patches of 4×4 of a 16×16 image, a learned position for each, two blocks, the mean of the tokens."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.1)
        self.block1, self.block2 = Attention(width, heads), Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).transpose(1, 2) + self.position  # (N, 16, width)
        tokens = self.block2(self.block1(tokens))
        return self.head(self.norm(tokens).mean(1))


class LayersOfTorch(nn.Module):
    """Patches, and torch's own transformer layers, which have a fused form, with an even number of heads, for looks."""

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        layers = [nn.TransformerEncoderLayer(width, heads, 24, dropout=0.0, batch_first=True) for _ in range(2)]
        self.first, self.second = layers
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).transpose(1, 2)  # (N, 16, width)
        return self.head(self.second(self.first(tokens)).mean(1))
