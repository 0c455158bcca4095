"""Per-image gradients of the two losses on the shared encoder, and their inner products.

`ImageGradients` gives the result of a loop over single images from one backward pass per chunk: each image passes
through its own replica of the encoder (networks/replicas.py), so that the replicas' gradients are those of the images.
Layers without a stacked implementation use `torch.func`. On a CPU the images are distributed over threads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime import kernels
from testtime.networks.replicas import Replicas
from testtime.networks.ynet import YNet
from testtime.tasks import Task

_PIXELS = 1 << 14  # per thread and chunk; beyond it the allocator returns memory to the system
_VALUES = 1 << 25  # parameters of all replicas of a chunk
_WORKERS = 8


class Products(NamedTuple):
    """Inner products of gradients, per layer of the encoder and per image.

    Attributes:
        inner: ⟨∇l_m, ∇l_s⟩ for K sets of labels, float `(K, L, N)`.
        main: ‖∇l_m‖², `(K, L, N)`.
        task: ‖∇l_s‖², `(L, N)`.
    """

    inner: Tensor
    main: Tensor
    task: Tensor

    @staticmethod
    def join(parts: Sequence[Products]) -> Products:
        """Concatenate products along the images."""
        return Products(*(torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True)))


def name_layers(encoder: nn.Module) -> dict[str, list[str]]:
    """Return the encoder's layers with parameters, and the parameter names of each."""
    layers: dict[str, list[str]] = {}
    for name, _ in encoder.named_parameters():
        layers.setdefault(name.rpartition(".")[0] or "encoder", []).append(name)
    return layers


def freeze(net: YNet) -> YNet:
    """Return a copy of a network in evaluation mode, without gradients."""
    with torch.inference_mode(False):
        return copy.deepcopy(net).eval().requires_grad_(False)


def split_views(task: Task, images: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return the views of the task that the classifier does not already encode.

    Args:
        task: The self-supervised task.
        images: `(N, C, H, W)`.

    Returns:
        Views `(N·W, C, h, w)` to encode in addition to the images; all targets `(N·V, ...)`; and whether the images are
        the first views (W = V - 1), which holds unless the task changes their shape.
    """
    views, targets = task.probe(images)
    if views.shape[1:] != images.shape[1:]:
        return views, targets, False
    others = views.unflatten(0, (len(images), -1))[:, 1:]
    return others.flatten(0, 1), targets, True


def join_features(plain: Tensor, others: Tensor, shared: bool) -> Tensor:
    """Combine the features of the images and of the other views into those of all views, `(N·V, ...)`."""
    if not shared:
        return others
    return torch.cat([plain.unsqueeze(1), others.unflatten(0, (len(plain), -1))], dim=1).flatten(0, 1)


def differentiate(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a loss by parameter, zero for those it does not depend on; its graph is retained."""
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


class ImageGradients:
    """Per-image inner products of the two losses' gradients.

    Args:
        net: The network; it is copied and used in evaluation mode.
        task: The self-supervised task; the loss is computed on its probe's views, which are deterministic.
    """

    def __init__(self, net: YNet, task: Task) -> None:
        self.net, self.task = freeze(net), task
        self.layers = name_layers(self.net.encoder)
        parameters = list(self.net.encoder.parameters())
        self._on_cpu = not kernels.tuning(parameters[0].device).waits
        self._workers = min(torch.get_num_threads(), _WORKERS) if self._on_cpu else 1
        values = max(1, sum(parameter.numel() for parameter in parameters))
        pixels = (self.net.card.size or 32) ** 2
        self.chunk = self._workers * max(1, min(512, _PIXELS // pixels, _VALUES // values // self._workers))
        """Images per chunk."""
        self._replicas: dict[tuple[int, ...], Replicas] = {}
        self._pool: ThreadPoolExecutor | None = None

    def products(self, images: Tensor, labels: Tensor) -> Products:
        """Return the inner products for a chunk of images.

        Args:
            images: `(N, C, H, W)`, uint8 or float in [0, 1]; one replica is allocated per image.
            labels: K sets of labels for the main loss, int `(K, N)`.
        """
        count = min(self._workers, len(images))
        parts = list(zip(images.tensor_split(count), labels.tensor_split(count, dim=1), strict=True))
        replicas = [self._replicate(part) for part, _ in parts]
        if count == 1:
            return self._measure(replicas[0], *parts[0])
        # Parallel over images rather than within each layer, so that the work between layers is parallel too.
        threads = torch.get_num_threads()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(count, "gradients", lambda: torch.set_num_threads(max(1, threads // count)))
        try:
            return Products.join(list(self._pool.map(self._measure, replicas, *zip(*parts, strict=True))))
        finally:
            torch.set_num_threads(threads)  # set_num_threads in a worker changes the default of new threads

    def _measure(self, replicas: Replicas, images: Tensor, labels: Tensor) -> Products:
        """Return the inner products for one image per replica."""
        with torch.inference_mode(False), torch.enable_grad():
            parameters = replicas.parameters(("encoder",))
            others, targets, shared = split_views(self.task, images)
            plain = replicas.encode(images[:, None])  # (N, 1, ...)
            outputs = replicas.supervise(replicas.encode(others.unflatten(0, (len(images), -1))))
            if shared:
                outputs = torch.cat([replicas.supervise(plain), outputs], dim=1)  # (N, V, ...)
            losses = self.task.loss(outputs.flatten(0, 1), targets)
            logits = replicas.classify(plain)[:, 0].float()
            task = differentiate(losses.sum() / (len(targets) // len(images)), parameters)
            mains = [differentiate(F.cross_entropy(logits, row, reduction="sum"), parameters) for row in labels]
        return Products(
            torch.stack([self._sums(main, task) for main in mains]),
            torch.stack([self._sums(main, main) for main in mains]),
            self._sums(task, task),
        )

    def _replicate(self, images: Tensor) -> Replicas:
        """Return one replica per image; the replicas of the last two shapes are cached."""
        key = tuple(images.shape)
        if key not in self._replicas:
            while len(self._replicas) > 1:
                self._replicas.pop(next(iter(self._replicas)))
            example = images[:1].expand(2, *images.shape[1:])
            dtype = next(self.net.parameters()).dtype
            with torch.inference_mode(False):
                made = self._replicas[key] = Replicas(self.net, len(images), ("encoder",), example, dtype)
                for parameter in made.parameters(("encoder",)).values():
                    if self._on_cpu:  # read-only, so all share one: see cpu.convolve_strided
                        parameter.data = parameter.data[:1].expand_as(parameter)
                    parameter.requires_grad_(True)
        return self._replicas[key]

    def _sums(self, one: dict[str, Tensor], two: dict[str, Tensor]) -> Tensor:
        """Return inner products per layer and image, `(L, N)`."""
        layers = []
        for names in self.layers.values():
            pairs = [(one[f"encoder.{name}"].flatten(1), two[f"encoder.{name}"].flatten(1)) for name in names]
            layers.append(torch.stack([torch.linalg.vecdot(a, b) for a, b in pairs]).sum(0))
        return torch.stack(layers)
