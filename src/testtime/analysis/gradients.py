"""Gradients of the two losses on the shared encoder, for each image by itself, and what they have in common.

A gradient for each image is what a loop over single images gives, one backward pass at a time. `ImageGradients` has the
same numbers from one backward pass of a chunk: every image goes through a replica of the encoder of its own
(networks/replicas.py), so that the replicas' gradients are the images'. Layers that replicas do not know go through
`torch.func` there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.networks.replicas import Replicas
from testtime.networks.ynet import YNet
from testtime.tasks import Task

_PIXELS = 1 << 17  # of a chunk's images together
_NUMBERS = 1 << 25  # that the replicas of a chunk may have together


class Products(NamedTuple):
    """Inner products of gradients, by layer of the encoder and by image.

    Attributes:
        inner: ⟨∇l_m, ∇l_s⟩ for each of K sets of labels, float `(K, L, N)`.
        main: ‖∇l_m‖², `(K, L, N)`.
        task: ‖∇l_s‖², `(L, N)`.
    """

    inner: Tensor
    main: Tensor
    task: Tensor

    @staticmethod
    def join(parts: Sequence[Products]) -> Products:
        """One for the images of several, in their order."""
        return Products(*(torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True)))


def name_layers(encoder: nn.Module) -> dict[str, list[str]]:
    """The layers of an encoder that have parameters, and the names of each one's, in its order."""
    layers: dict[str, list[str]] = {}
    for name, _ in encoder.named_parameters():
        layers.setdefault(name.rpartition(".")[0] or "encoder", []).append(name)
    return layers


def freeze(net: YNet) -> YNet:
    """A copy of a network in evaluation mode of which nothing learns."""
    with torch.inference_mode(False):
        return copy.deepcopy(net).eval().requires_grad_(False)


def split_views(task: Task, images: Tensor) -> tuple[Tensor, Tensor, bool]:
    """What the task sees of images, less what the classifier sees as well.

    Args:
        task: The self-supervised task.
        images: `(N, C, H, W)`.

    Returns:
        Views `(N·W, C, h, w)` that need encoding besides the images themselves; all targets `(N, V)`; whether the
        images are their own first views, W = V - 1, as they are unless the task had to cut them.
    """
    views, targets = task.probe(images)
    targets = targets.view(len(images), -1)
    if views.shape[-2:] != images.shape[-2:]:
        return views, targets, False
    others = views.unflatten(0, (len(images), -1))[:, 1:]
    return others.flatten(0, 1), targets, True


def join_features(plain: Tensor, others: Tensor, shared: bool) -> Tensor:
    """Features of all the task's views, `(N·V, ...)`, from those of the images and of the other views."""
    if not shared:
        return others
    return torch.cat([plain.unsqueeze(1), others.unflatten(0, (len(plain), -1))], dim=1).flatten(0, 1)


class ImageGradients:
    """Inner products of the two losses' gradients for every image by itself.

    Args:
        net: The network; it is copied, and measured in evaluation mode.
        task: The self-supervised task; its probe's views, without chance, make the loss.
    """

    def __init__(self, net: YNet, task: Task) -> None:
        self.net, self.task = freeze(net), task
        self.layers = name_layers(self.net.encoder)
        numbers = sum(parameter.numel() for parameter in self.net.encoder.parameters())
        self.chunk = max(1, min(512, _PIXELS // (self.net.card.size or 32) ** 2, _NUMBERS // max(numbers, 1)))
        """How many images to give at a time."""
        self._replicas: dict[tuple[int, ...], Replicas] = {}

    def products(self, images: Tensor, labels: Tensor) -> Products:
        """The inner products for a chunk of images.

        Args:
            images: `(N, C, H, W)`, uint8 or floats in [0, 1]; all are in memory at once, with a replica for each.
            labels: K sets of labels for the main loss, int `(K, N)`.
        """
        with torch.inference_mode(False), torch.enable_grad():
            replicas, count = self._replicate(images), len(images)
            parameters = replicas.parameters(("encoder",))
            others, targets, shared = split_views(self.task, images)
            plain = replicas.encode(images[:, None])  # (N, 1, ...)
            features = replicas.encode(others.unflatten(0, (count, -1)))
            if shared:
                features = torch.cat([plain, features], dim=1)  # (N, V, ...)
            losses = self.task.loss(replicas.supervise(features).flatten(0, 1), targets.flatten())
            logits = replicas.classify(plain)[:, 0].float()
            task = self._gradients(losses.sum() / targets.shape[1], parameters)
            mains = [self._gradients(F.cross_entropy(logits, own, reduction="sum"), parameters) for own in labels]
        return Products(
            torch.stack([self._sums(main, task) for main in mains]),
            torch.stack([self._sums(main, main) for main in mains]),
            self._sums(task, task),
        )

    def _replicate(self, images: Tensor) -> Replicas:
        """As many replicas as images; those of the last two shapes are kept."""
        key = tuple(images.shape)
        if key not in self._replicas:
            while len(self._replicas) > 1:
                self._replicas.pop(next(iter(self._replicas)))
            example = images[:1].expand(2, *images.shape[1:])
            dtype = next(self.net.parameters()).dtype
            self._replicas[key] = Replicas(self.net, len(images), ("encoder",), example, dtype)
            for parameter in self._replicas[key].parameters(("encoder",)).values():
                parameter.requires_grad_(True)
        return self._replicas[key]

    @staticmethod
    def _gradients(loss: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values(), strict=True)]
        return dict(zip(parameters, filled, strict=True))

    def _sums(self, one: dict[str, Tensor], two: dict[str, Tensor]) -> Tensor:
        """Inner products by layer and image, `(L, N)`."""
        layers = []
        for names in self.layers.values():
            pairs = [(one[f"encoder.{name}"].flatten(1), two[f"encoder.{name}"].flatten(1)) for name in names]
            layers.append(torch.stack([torch.linalg.vecdot(a, b) for a, b in pairs]).sum(0))
        return torch.stack(layers)
