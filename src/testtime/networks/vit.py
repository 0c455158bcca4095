"""A vision transformer for small images, built as a `YNet`.

Patches are embedded by a linear layer, with a learned position each; blocks of attention and perceptron follow
(Dosovitskiy et al. 2021), with the norms first; the class logits are a linear function of the mean of the tokens. The
encoder processes any of an image's patches, so that for the task `Masked` it sees the visible ones alone, and the
self-supervised branch is a small decoder (He et al. 2022). For tasks with classes, the branch is a copy of the
classifier with a new last layer, as in the ResNets.

All parameters are in linear layers and norms, the positions too: so replicas are computed as stacked layers.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.networks.branch import Pool
from testtime.networks.card import LARGEST_SIZE, Card, check_integer
from testtime.networks.resnet import Device, building
from testtime.networks.ynet import YNet
from testtime.tasks import Masked, describe
from testtime.tasks.masked import COORDINATES, cut_patches

_DTYPE = torch.float32  # of every layer, whatever torch's default dtype
_MOST = {"classes": 10**6, "outputs": 10**6, "width": 10**5, "depth": 2000, "heads": 1000}
_DECODER_BLOCKS = 2


class Block(nn.Module):
    """Residual self-attention and a residual perceptron, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = _norm(width), _norm(width)
        self.qkv, self.out = _linear(width, 3 * width, bias=False), _linear(width, width)  # a key has no use for a bias
        self.expand, self.reduce = _linear(width, 4 * width), _linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(tokens)).unflatten(-1, (3, self.heads, -1))  # (N, T, 3, heads, d)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)  # (N, heads, T, d)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        return tokens + self.reduce(F.gelu(self.expand(self.norm2(tokens))))


class Encoder(nn.Module):
    """Patches with positions, and blocks.

    Args:
        size: Side of the images.
        patch: Side of a patch.
        channels: Channels of the images.
        width: Width of the tokens.
        depth: Number of blocks.
        heads: Attention heads of a block.
    """

    def __init__(self, size: int, patch: int, channels: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.size, self.patch, self.channels, self.side = size, patch, channels, size // patch
        self.embed = _linear(channels * patch**2, width)
        self.position = _positions(self.side, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens `(N, T, width)` of images `(N, C, H, W)`, or `(N, v, width)` of the views of `Masked`."""
        if images.shape[1] == self.channels + COORDINATES:
            pixels, places = images.tensor_split([self.channels], dim=1)
            patches = pixels.transpose(1, 2)  # (N, v, C, patch²)
            rows, columns = places[..., 0].long().unbind(1)  # (N, v) each
            numbers = rows * self.side + columns
        else:
            if images.shape[-2:] != (self.size, self.size):
                found = "×".join(map(str, images.shape[-2:]))
                raise ValueError(f"This network is for images of {self.size}×{self.size}, got {found}.")
            patches = cut_patches(images, self.patch)  # (N, T, C, patch²)
            numbers = torch.arange(self.side**2, device=images.device).expand(len(images), -1)
        # A product with one-hot vectors, because the gradient of an index is not deterministic on a GPU.
        one_hot = numbers.unsqueeze(-1) == torch.arange(self.side**2, device=images.device)
        return self.blocks(self.embed(patches.flatten(2)) + self.position(one_hot.to(images.dtype)))


class Decoder(nn.Module):
    """Reconstructs the pixels of all patches from the tokens of some.

    A query for every patch, its learned position, is decoded together with the encoder's tokens, which know theirs.

    Args:
        patch: Side of a patch.
        side: Patches per side of an image.
        channels: Channels of the images.
        inputs: Width of the encoder's tokens.
        heads: Attention heads of a block.
    """

    def __init__(self, patch: int, side: int, channels: int, inputs: int, heads: int) -> None:
        super().__init__()
        self.patch, self.patches = patch, side**2
        width = inputs // 2
        self.norm, self.embed = _norm(inputs), _linear(inputs, width)
        self.query = _positions(side, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(_DECODER_BLOCKS)))
        self.last_norm, self.head = _norm(width), _linear(width, channels * patch**2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return pixels `(N, T, C·patch²)` of encoded tokens `(N, v, width)`."""
        one_hot = torch.eye(self.patches, dtype=tokens.dtype, device=tokens.device)
        queries = self.query(one_hot.expand(len(tokens), -1, -1))
        decoded = self.blocks(torch.cat([self.embed(self.norm(tokens)), queries], dim=1))
        return self.head(self.last_norm(decoded[:, -self.patches :]))


def vit(
    classes: int = 10,
    *,
    size: int = 32,
    patch: int = 4,
    width: int = 192,
    depth: int = 10,
    heads: int = 3,
    channels: int = 3,
    outputs: int | None = 4,
    seed: int = 0,
    device: Device = "cpu",
) -> YNet:
    """Build a vision transformer; by default for CIFAR, with 5.4 million parameters.

    Args:
        classes: Number of classes.
        size: Side of the images.
        patch: Side of a patch, which divides `size`.
        width: Width of the tokens, a multiple of twice `heads`.
        depth: Number of blocks, at least 2; the last quarter of them belongs to the branches.
        heads: Attention heads of a block.
        channels: Channels of the images.
        outputs: Outputs of the self-supervised branch; None: a decoder, for the task `Masked`.
        seed: Seed of the initial weights, which are the same on every device.
        device: Device of the parameters; "meta" for shapes without values.

    Raises:
        ValueError: An argument is out of range.
    """
    counts = {"classes": classes, "size": size, "patch": patch, "width": width, "depth": depth, "heads": heads}
    for name, count in {**counts, "channels": channels, "outputs": 1 if outputs is None else outputs}.items():
        check_integer(name, count, _MOST.get(name, LARGEST_SIZE))
    if size % patch or size == patch:
        raise ValueError(f"`patch` must divide `size` into at least 2, got {patch} and {size}.")
    if width % (2 * heads):
        raise ValueError(f"`width` must be a multiple of twice `heads`, got {width} and {heads}.")
    if depth < 2:
        raise ValueError(f"`depth` must be at least 2, got {depth}.")
    last = max(1, depth // 4)
    with building(seed, device):
        encoder = Encoder(size, patch, channels, width, depth - last, heads)
        trunk = nn.Sequential(*(Block(width, heads) for _ in range(last)), _norm(width), Pool((-2,)))
        classifier = nn.Sequential(*trunk, _linear(width, classes))
        if outputs is None:
            ssl: nn.Module = Decoder(patch, size // patch, channels, width, heads)
        else:
            ssl = nn.Sequential(*copy.deepcopy(trunk), _linear(width, outputs))
        card = Card(
            architecture={"name": "vit", **counts, "channels": channels, "outputs": outputs},
            size=size,
            mean=(0.5,) * channels,
            std=(0.5,) * channels,
            task=describe(Masked(patch=patch)) if outputs is None else "rotation",
            augment={"name": "crop-flip", "padding": max(1, size // 8)},
        )
        return YNet(encoder, classifier, ssl, card, channels=channels).to(device)


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias, dtype=_DTYPE)
    if not layer.weight.is_meta:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer


def _positions(side: int, width: int) -> nn.Linear:
    """Return the positions of `side²` patches, as a function of one-hot vectors.

    They start as sines and cosines of row and column, with wavelengths from 2π to 2π·10⁴ (Vaswani et al. 2017).
    """
    layer = nn.Linear(side**2, width, bias=False, dtype=_DTYPE)
    if not layer.weight.is_meta:
        rates = 10_000 ** -torch.linspace(0, 1, max(1, width // 4), dtype=_DTYPE, device="cpu")
        angles = torch.arange(side, dtype=_DTYPE, device="cpu")[:, None] * rates  # (side, rates)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        rows, columns = waves.repeat_interleave(side, 0), waves.repeat(side, 1)  # (T, 2·rates) each
        values = torch.cat([rows, columns], dim=1).T[:width]
        with torch.no_grad():
            layer.weight.zero_()[: len(values)] = values
    return layer


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, dtype=_DTYPE)
