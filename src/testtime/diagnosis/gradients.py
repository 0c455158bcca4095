"""Gradients of the two losses on the shared encoder, for each image by itself, and what they have in common.

A gradient for each image is what a loop over single images gives, one backward pass at a time. `ImageGradients` has the
same numbers from one backward pass of a chunk: every image goes through a replica of the encoder of its own
(networks/replicas.py), so that the replicas' gradients are the images'. Layers that replicas do not know go through
`torch.func` there. On a CPU the threads share the images, each with a backward pass of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.networks.replicas import Replicas
from testtime.networks.ynet import YNet
from testtime.tasks import Task

_PIXELS = 1 << 14  # of the images that a thread takes at once: more, and memory is given back and asked for anew
_NUMBERS = 1 << 25  # that the replicas of a chunk may have together
_WORKERS = 8


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
        parameters = list(self.net.encoder.parameters())
        self._on_cpu = all(parameter.is_cpu for parameter in parameters)
        self._workers = min(torch.get_num_threads(), _WORKERS) if self._on_cpu else 1
        numbers = max(1, sum(parameter.numel() for parameter in parameters))
        pixels = (self.net.card.size or 32) ** 2
        self.chunk = self._workers * max(1, min(512, _PIXELS // pixels, _NUMBERS // numbers // self._workers))
        """How many images to give at a time."""
        self._replicas: dict[tuple[int, ...], Replicas] = {}
        self._pool: ThreadPoolExecutor | None = None

    def products(self, images: Tensor, labels: Tensor) -> Products:
        """The inner products for a chunk of images.

        Args:
            images: `(N, C, H, W)`, uint8 or floats in [0, 1]; all are in memory at once, with a replica for each.
            labels: K sets of labels for the main loss, int `(K, N)`.
        """
        count = min(self._workers, len(images))
        parts = list(zip(images.tensor_split(count), labels.tensor_split(count, dim=1), strict=True))
        replicas = [self._replicate(part) for part, _ in parts]
        if count == 1:
            return self._measure(replicas[0], *parts[0])
        # The threads share the images rather than every layer, and with them all that is between the layers.
        threads = torch.get_num_threads()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(count, "gradients", lambda: torch.set_num_threads(max(1, threads // count)))
        try:
            return Products.join(list(self._pool.map(self._measure, replicas, *zip(*parts, strict=True))))
        finally:
            torch.set_num_threads(threads)  # a worker's number would become that of threads to come

    def _measure(self, replicas: Replicas, images: Tensor, labels: Tensor) -> Products:
        """The inner products for as many images as there are replicas."""
        with torch.inference_mode(False), torch.enable_grad():
            parameters = replicas.parameters(("encoder",))
            others, targets, shared = split_views(self.task, images)
            plain = replicas.encode(images[:, None])  # (N, 1, ...)
            outputs = replicas.supervise(replicas.encode(others.unflatten(0, (len(images), -1))))
            if shared:
                outputs = torch.cat([replicas.supervise(plain), outputs], dim=1)  # (N, V, outputs)
            losses = self.task.loss(outputs.flatten(0, 1), targets.flatten())
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
            with torch.inference_mode(False):
                made = self._replicas[key] = Replicas(self.net, len(images), ("encoder",), example, dtype)
                for parameter in made.parameters(("encoder",)).values():
                    if self._on_cpu:  # nobody learns, so one will do for all: see cpu.convolve_strided
                        parameter.data = parameter.data[:1].expand_as(parameter)
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
