"""Gradients of the two losses on the shared encoder, for each image by itself, and what they have in common.

A gradient for each image is what a loop over single images gives, one backward pass at a time. `ImageGradients` has the
same numbers from one backward pass of a chunk: the layers of the encoder note what goes in, autograd gives the gradient
of what comes out, and a layer's gradient for image n is made of the two at image n alone. Only inner products are kept,
so the gradients themselves never lie in memory for more than one layer. Networks with layers that have no such rule, or
that change tensors in place, go through `torch.func` (`vmap` of `grad`), which needs no rules and takes more time.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.grad import conv2d_weight

from testtime.networks.resnet import AddingConv2d, GroupNormReLU
from testtime.networks.ynet import YNet
from testtime.tasks import Task

log = logging.getLogger(__name__)


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
        self._mapped = _unknown_layer(self.net.encoder)
        if self._mapped:
            log.info("gradients of single images go through torch.func: %s", self._mapped)

    @property
    def through_func(self) -> bool:
        """Whether the network's layers have no rule, so that `torch.func` does the work."""
        return self._mapped is not None

    def products(self, images: Tensor, labels: Tensor) -> Products:
        """The inner products for a chunk of images.

        Args:
            images: `(N, C, H, W)`, uint8 or floats in [0, 1]; all are in memory at once, with what the layers note.
            labels: K sets of labels for the main loss, int `(K, N)`.
        """
        with torch.inference_mode(False), torch.enable_grad():
            if self._mapped is None:
                try:
                    return self._by_rules(images, labels)
                except _ChangedInPlace as reason:
                    self._mapped = str(reason)
                    log.info("gradients of single images go through torch.func: %s", reason)
            return self._by_func(images, labels)

    def _by_rules(self, images: Tensor, labels: Tensor) -> Products:
        others, targets, shared = split_views(self.task, images)
        with _note(self.net.encoder) as plain_notes:
            plain = self.net.encoder(self._pixels(images))
        with _note(self.net.encoder) as other_notes:
            turned = self.net.encoder(self._pixels(others))
        outputs = self.net.ssl(join_features(plain, turned, shared))
        task_loss = self.task.loss(outputs, targets.flatten()).sum() / targets.shape[1]
        logits = self.net.classifier(plain).float()
        main_losses = [F.cross_entropy(logits, own, reduction="sum") for own in labels]
        for note in (*plain_notes, *other_notes):
            note.check()
        seen = [*plain_notes, *other_notes] if shared else other_notes
        task_slopes = _slopes(task_loss, seen)
        main_slopes = [_slopes(loss, plain_notes) for loss in main_losses]
        inner, main, task = [], [], []
        for place, (note, other) in enumerate(zip(plain_notes, other_notes, strict=True)):
            slopes = [own[place] for own in main_slopes] + ([task_slopes[place]] if shared else [])
            found = note.gradients(slopes, len(images))  # (N, P) each
            (own,) = other.gradients([task_slopes[place - len(other_notes)]], len(images))
            own = own + found.pop() if shared else own
            inner.append(torch.stack([(one * own).sum(1) for one in found]))
            main.append(torch.stack([(one * one).sum(1) for one in found]))
            task.append((own * own).sum(1))
        order = {note.name: place for place, note in enumerate(plain_notes)}
        places = [order[name] for name in self.layers]  # as the layers are listed, not as they are called
        return Products(
            torch.stack([inner[place] for place in places], dim=1),
            torch.stack([main[place] for place in places], dim=1),
            torch.stack([task[place] for place in places]),
        )

    def _by_func(self, images: Tensor, labels: Tensor) -> Products:
        parameters: dict[str, Tensor] = dict(self.net.encoder.named_parameters())
        others, targets, shared = split_views(self.task, images)
        others = others.unflatten(0, (len(images), -1))  # (N, W, C, h, w)

        def encode(tensors: dict[str, Tensor], pixels: Tensor) -> Tensor:
            return functional_call(self.net.encoder, tensors, self.net.normalise(pixels))

        def main_loss(tensors: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = self.net.classifier(encode(tensors, image[None])).float()
            return F.cross_entropy(logits, label[None])

        def task_loss(tensors: dict[str, Tensor], image: Tensor, turned: Tensor, target: Tensor) -> Tensor:
            views = torch.cat([image[None], turned]) if shared else turned
            return self.task.loss(self.net.ssl(encode(tensors, views)), target).mean()

        with sdpa_kernel(SDPBackend.MATH):  # the fused forms of attention have no rule for mapping
            task = vmap(grad(task_loss), (None, 0, 0, 0))(parameters, images, others, targets)
            mains = [vmap(grad(main_loss), (None, 0, 0))(parameters, images, own) for own in labels]

        def sums(one: dict[str, Tensor], two: dict[str, Tensor]) -> Tensor:
            """By layer, `(L, N)`."""
            by_name = {name: (one[name] * two[name]).flatten(1).sum(1) for name in parameters}
            return torch.stack([torch.stack([by_name[name] for name in own]).sum(0) for own in self.layers.values()])

        return Products(
            torch.stack([sums(main, task) for main in mains]),
            torch.stack([sums(main, main) for main in mains]),
            sums(task, task),
        )

    def _pixels(self, images: Tensor) -> Tensor:
        # Channels innermost is how convolutions compute; given so, nothing has to be put in order on the way.
        # Nothing in the network learns, so the graph must begin with the pixels; their own gradient is never asked for.
        return self.net.normalise(images).contiguous(memory_format=torch.channels_last).requires_grad_()


class _ChangedInPlace(Exception):
    """A tensor that a layer noted was changed afterwards, so that the rules do not hold."""


class _Note:
    """One layer on one pass: what went in, and what came out."""

    def __init__(self, name: str, layer: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        self.name, self.layer, self.inputs, self.outputs = name, layer, inputs, outputs
        self.versions = inputs._version, outputs._version

    def check(self) -> None:
        if (self.inputs._version, self.outputs._version) != self.versions:
            raise _ChangedInPlace(f"something changes the inputs or outputs of {self.name} in place")

    def gradients(self, slopes: Sequence[Tensor], count: int) -> list[Tensor]:
        """The layer's gradient for each of `count` images, `(N, P)`, from each gradient of its outputs.

        The order of the P numbers is the layer's own: it means nothing, but is the same on every call.
        """
        return _RULES[type(self.layer)](self.layer, self.inputs.detach(), self.outputs.detach(), slopes, count)


@contextlib.contextmanager
def _note(encoder: nn.Module) -> Iterator[list[_Note]]:
    """Let the layers with parameters note their inputs and outputs while the encoder runs."""
    notes: list[_Note] = []
    handles, thread = [], threading.get_ident()
    for name, layer in encoder.named_modules():
        if next(layer.parameters(recurse=False), None) is None:
            continue

        def write(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor, name: str = name) -> None:
            if threading.get_ident() != thread:  # another chunk, on its way at the same time
                return
            notes.append(_Note(name or "encoder", layer, inputs[0], outputs))

        handles.append(layer.register_forward_hook(write))
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


def _slopes(loss: Tensor, notes: Sequence[_Note]) -> list[Tensor]:
    outputs = [note.outputs for note in notes]
    found = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(out) if slope is None else slope for out, slope in zip(outputs, found, strict=True)]


def _conv(layer: Any, inputs: Tensor, outputs: Tensor, slopes: Sequence[Tensor], count: int) -> list[Tensor]:
    views, places = len(inputs) // count, outputs.shape[2] * outputs.shape[3]
    together = torch.cat(list(slopes), dim=1) if len(slopes) > 1 else slopes[0]  # as if of more filters
    if views * places * layer.weight[0].numel() > _LARGE and not inputs.is_cuda:
        shape = (together.shape[1], *layer.weight.shape[1:])
        pieces = zip(inputs.split(views), together.split(views), strict=True)
        rest = layer.stride, layer.padding, layer.dilation
        weights = torch.stack([conv2d_weight(piece, shape, slope, *rest) for piece, slope in pieces])
        weights = weights.permute(0, 1, 3, 4, 2)  # (N, O, k, k, I), as the patches are
    else:
        patches = _patches(layer, inputs, outputs.shape[2:]).reshape(count, views * places, -1)
        ends = together.permute(0, 2, 3, 1).reshape(count, views * places, -1)  # (N, V·P, O)
        weights = torch.bmm(ends.transpose(1, 2), patches)  # (N, O, k·k·I)
    found = [piece.flatten(1) for piece in weights.split(layer.out_channels, dim=1)]
    if layer.bias is None:
        return found
    ends = [slope.sum((2, 3)).view(count, views, -1).sum(1) for slope in slopes]
    return [torch.cat(pair, dim=1) for pair in zip(found, ends, strict=True)]


_LARGE = 150_000
"""Numbers in the patches of an image from which on a CPU a call for each image is faster than copying them."""


def _patches(layer: nn.Conv2d, inputs: Tensor, size: torch.Size) -> Tensor:
    """What each place of a convolution's output sees, `(M, h, w, k·k·I)`."""
    assert not isinstance(layer.padding, str)
    rows, columns = layer.padding
    padded = F.pad(inputs.permute(0, 2, 3, 1), (0, 0, columns, columns, rows, rows)).contiguous()  # (M, H, W, I)
    image, row, column, channel = padded.stride()
    shape = (len(inputs), *size, *layer.kernel_size, inputs.shape[1])
    steps = (row * layer.stride[0], column * layer.stride[1], row * layer.dilation[0], column * layer.dilation[1])
    return padded.as_strided(shape, (image, *steps, channel)).flatten(3)


def _linear(layer: Any, inputs: Tensor, outputs: Tensor, slopes: Sequence[Tensor], count: int) -> list[Tensor]:
    rows = inputs.reshape(count, -1, layer.in_features)
    ends = [slope.reshape(count, -1, layer.out_features) for slope in slopes]
    found = [torch.bmm(end.transpose(1, 2), rows).flatten(1) for end in ends]
    if layer.bias is None:
        return found
    return [torch.cat([weight, end.sum(1)], dim=1) for weight, end in zip(found, ends, strict=True)]


def _group_norm(layer: Any, inputs: Tensor, outputs: Tensor, slopes: Sequence[Tensor], count: int) -> list[Tensor]:
    if isinstance(layer, GroupNormReLU):
        slopes = [torch.ops.aten.threshold_backward(slope, outputs, 0) for slope in slopes]
    return _scaled(F.group_norm(inputs, layer.num_groups, eps=layer.eps), slopes, count)


def _batch_norm(layer: Any, inputs: Tensor, outputs: Tensor, slopes: Sequence[Tensor], count: int) -> list[Tensor]:
    return _scaled(F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps), slopes, count)


def _scaled(normalised: Tensor, slopes: Sequence[Tensor], count: int) -> list[Tensor]:
    """The gradients of a scale and a shift of each channel."""
    pairs = [torch.cat([(normalised * slope).sum((2, 3)), slope.sum((2, 3))], dim=1) for slope in slopes]
    return [pair.view(count, -1, pair.shape[1]).sum(1) for pair in pairs]


_RULES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Sequence[Tensor], int], list[Tensor]]] = {
    nn.Conv2d: _conv,
    AddingConv2d: _conv,
    nn.GroupNorm: _group_norm,
    GroupNormReLU: _group_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.Linear: _linear,
}


def _unknown_layer(encoder: nn.Module) -> str | None:
    """Why the rules cannot serve an encoder, or None if they can."""
    owners: dict[int, str] = {}
    for name, layer in encoder.named_modules(remove_duplicate=False):
        own = list(layer.parameters(recurse=False))
        if not own:
            continue
        if type(layer) not in _RULES:
            return f"{name or 'the encoder'} ({type(layer).__name__}) has no rule"
        if isinstance(layer, nn.Conv2d) and (
            layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
        ):
            return f"{name} has groups or padding without a rule"
        if isinstance(layer, nn.BatchNorm2d) and not layer.track_running_stats:
            return f"{name} does not track statistics, so images are not apart"
        for parameter in own:
            if owners.setdefault(id(parameter), name) != name:
                return f"{name} shares its weights with {owners[id(parameter)]}"
    return None
