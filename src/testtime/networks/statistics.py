"""Statistics of a network on images like those it was trained on, for methods that compare with them at test time.

The Fisher information says which parameters matter to the predictions (EATA, Niu et al. 2022); the moments of the
activations say what the layers usually see (CFA, Kojima et al. 2022; ActMAD, Mirza et al. 2023). Moments are per
channel, not per position: the latter would fit only one image size, and outgrow the weights for large images.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from testtime.augment import narrow
from testtime.checks import format_value, is_integer
from testtime.data.sets import TestSet
from testtime.networks.card import FEATURES, STATISTICS, Statistics, compare_tensors
from testtime.networks.replica_parts import plain_attention
from testtime.networks.resnet import GroupNormReLU
from testtime.networks.stacked_norms import NORMS
from testtime.networks.task_loss import measure_task
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic
from testtime.progress import Progress
from testtime.randomness import Draws

RARE = 0.01
"""Fraction of the images that have less than the recorded `energy`, or more than the recorded `task_loss`."""
_UNSEEN = ("images", "set", "task", "accuracy", "confidence")
_SEED = 0
_CHUNK = 64
_VALUES = 1 << 27  # gradients of a chunk of images


def collect(
    net: YNet,
    images: Tensor | TestSet,
    *,
    unseen: Tensor | TestSet | None = None,
    count: int = 2000,
    progress: Progress | None = None,
) -> YNet:
    """Collect a network's statistics on unlabelled images, on its device, and attach them as `net.statistics`.

    These are the diagonal of the empirical Fisher information of encoder and classifier, i.e. the mean over images of
    the squared gradient of the cross-entropy to the predicted class; and mean and variance, per channel, of the output
    of each normalisation layer (before a fused ReLU) and of the input of the last linear layer. `about` also has the
    `energy`, the log of the sum of the exponentials of the logits (Liu et al. 2020), that 1% of the images fall below;
    and, if there is a self-supervised branch, the mean loss of its `task` on augmented copies and on plain images, and
    the `task_loss` that 1% of the plain images exceed. Images beyond these are unlike them.

    A network knows the images it was trained on by heart. `about["unseen"]` has the loss of the `task` on others, and
    if these have labels, its `accuracy`, and the `confidence` that so large a fraction of them exceeds, i.e. the
    probability of the predicted class. The network is in evaluation mode for all this; its weights, buffers and mode
    are not changed.

    Args:
        net: The network.
        images: `(N, C, H, W)`, uint8 or float in [0, 1], or a set: images like those it was trained on.
        unseen: Images like them that it was not trained on.
        count: Maximum number of images, of either kind, chosen at random with a fixed seed.
        progress: Called with the images done, their number, and "statistics".

    Returns:
        The same network.

    Raises:
        TypeError: `images` or `unseen` is neither a tensor nor a set.
        ValueError: `images` or `unseen` does not fit the network, or `count` is less than 1.
    """
    _check_images(net, images, "images")
    if unseen is not None:
        _check_images(net, unseen, "unseen")
    if not is_integer(count, 1):
        raise ValueError(f"`count` must be an integer of at least 1, got {format_value(count)}.")
    chosen = _choose(images, count)
    others = chosen[:0] if unseen is None else _choose(unseen, count)
    total = len(chosen) + len(others)
    device, report = net.mean.device, progress or (lambda *_: None)
    with torch.inference_mode(False), arithmetic("fp32", device), plain_attention():
        model = copy.deepcopy(net).eval().requires_grad_(False)
        parameters = _list_parameters(model)
        squares = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in parameters.items()}
        moments: dict[str, _Moments] = {}
        seen, new, digest = _Measured(model), _Measured(model), hashlib.sha256()
        size = max(1, min(_CHUNK, _VALUES // max(1, sum(tensor.numel() for tensor in parameters.values()))))
        for numbers in chosen.split(size):
            chunk = _read(images, numbers)
            digest.update(chunk.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            chunk = chunk.detach().to(device)
            seen.add(chunk, _add_moments(model, chunk, moments), numbers)
            for name, gradients in _find_gradients(model, parameters, chunk).items():
                squares[name] += gradients.float().square().sum(0)
            report(seen.count, total, "statistics")
        about = {"images": seen.count, "set": _name(images), "hash": digest.hexdigest()[:16], "seed": _SEED}
        about |= seen.describe()
        if unseen is not None:
            for numbers in others.split(_CHUNK):
                chunk = _read(unseen, numbers).detach().to(device)
                new.add(chunk, _run(model, chunk), numbers, unseen)
                report(seen.count + new.count, total, "statistics")
            found = {"images": new.count, "set": _name(unseen), **new.describe()}
            about["unseen"] = {key: found[key] for key in _UNSEEN if key in found}
        net.statistics = Statistics(
            fisher={name: tensor / seen.count for name, tensor in squares.items()},
            means={name: one.mean for name, one in moments.items()},
            variances={name: one.squares / one.count for name, one in moments.items()},
            about=about,
        )
    return net


def find_statistics(net: YNet) -> Statistics:
    """Return the statistics of a network.

    Raises:
        ValueError: They were not collected.
    """
    if net.statistics is None:
        raise ValueError("The network has no statistics of training images: tt.collect(net, images) adds them.")
    return net.statistics


def check_statistics(net: YNet, statistics: Statistics) -> None:
    """Check that statistics fit a network.

    Raises:
        ValueError: A parameter is missing, or a name or a shape is not the network's.
    """
    wanted = {f"{STATISTICS}/fisher/{name}": tensor for name, tensor in _list_parameters(net).items()}
    widths = {name: {_count_channels(layer)} for name, layer in _list_norms(net).items()}
    widths[FEATURES] = {layer.in_features for layer in _list_linear(net)}
    for name, mean in statistics.means.items():
        if len(mean) in widths.get(name, ()):
            wanted |= {f"{STATISTICS}/{group}/{name}": mean for group in ("means", "variances")}
    compare_tensors(statistics.to_tensors(), wanted)


def _check_images(net: YNet, images: Any, name: str) -> None:
    """Check the images for `collect`, except for their size."""
    if not isinstance(images, (Tensor, TestSet)):
        raise TypeError(f"`{name}` must be a tensor or a set of testtime.data, got {type(images).__name__}.")
    if isinstance(images, Tensor):
        if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            found = f"{images.dtype} {tuple(images.shape)}"
            raise ValueError(f"`{name}` must be (N, C, H, W), uint8 or floats in [0, 1], got {found}.")
        if not images.isfinite().all():
            raise ValueError(f"`{name}` must be finite.")
        net.check_range(name, images)
    if not len(images):
        raise ValueError(f"`{name}` must not be empty.")
    channels = images.shape[-3]
    if net.channels not in (None, channels):
        raise ValueError(f"`{name}` must have {net.channels} channels, got {channels}.")


def _choose(images: Tensor | TestSet, count: int) -> Tensor:
    """Return up to `count` sample numbers, in ascending order."""
    keys = Draws.of(_SEED, torch.arange(len(images), device="cpu")).purpose("collect").keys
    return keys.argsort()[:count].sort().values


def _read(images: Tensor | TestSet, numbers: Tensor) -> Tensor:
    return images.images(numbers) if isinstance(images, TestSet) else narrow(images[numbers.to(images.device)])


def _name(images: Tensor | TestSet) -> str | None:
    return images.name if isinstance(images, TestSet) else None


def _find_gradients(model: YNet, parameters: dict[str, Tensor], images: Tensor) -> dict[str, Tensor]:
    """Return each image's gradient `(N, *shape)` of the cross-entropy to the predicted class."""

    def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (image.unsqueeze(0),)).float()
        return F.cross_entropy(logits, logits.detach().argmax(1))

    return vmap(grad(loss), in_dims=(None, 0))(parameters, images)


class _Measured:
    """Energy, with a branch the loss of the task, and with labels the accuracy, of images that come in batches."""

    def __init__(self, model: YNet) -> None:
        self._model, self.count = model, 0
        self._energies: list[Tensor] = []
        self._right: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._losses: dict[str, list[Tensor]] = {}

    def add(self, images: Tensor, logits: Tensor, numbers: Tensor, source: Tensor | TestSet | None = None) -> None:
        """Add images, their logits, their sample numbers `(n,)`, and the set whose labels count."""
        self.count += len(images)
        logits = logits.float().cpu()
        self._energies.append(logits.logsumexp(1))
        if isinstance(source, TestSet) and source.labels is not None:
            scores = source.scores(logits)
            self._right.append(source.is_correct(scores.argmax(1), numbers))
            self._probabilities.append(scores.softmax(1).amax(1))
        draws = Draws.of(_SEED, numbers.to(images.device))
        for kind, values in (measure_task(self._model, images, draws) or {}).items():
            self._losses.setdefault(kind, []).append(values.double().cpu())

    def describe(self) -> dict[str, Any]:
        """Return the entries of the record."""
        about: dict[str, Any] = {"energy": round(float(torch.cat(self._energies).quantile(RARE)), 4)}
        if self._losses:
            about["task"] = {kind: float(torch.cat(values).mean()) for kind, values in self._losses.items()}
            about["task_loss"] = round(float(torch.cat(self._losses["plain"]).quantile(1 - RARE)), 4)
        if self._right:
            about["accuracy"] = accuracy = float(torch.cat(self._right).double().mean())
            about["confidence"] = round(float(torch.cat(self._probabilities).quantile(1 - accuracy)), 4)
        return about


class _Moments:
    """Mean and sum of squared deviations per channel, of values that come in batches (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Add values `(n, C)`."""
        exact = values.dtype if values.dtype == torch.float64 else torch.float32
        variance, mean = (t.to("cpu", torch.float64) for t in torch.var_mean(values.to(exact), 0, correction=0))
        count, total = len(values), self.count + len(values)
        difference = mean - self.mean
        self.squares = self.squares + variance * count + difference.square() * (self.count * count / total)
        self.mean = self.mean + difference * (count / total)
        self.count = total


@torch.no_grad()
def _add_moments(model: YNet, images: Tensor, moments: dict[str, _Moments]) -> Tensor:
    """Run the network and add the activations of its layers to their moments; returns its logits."""
    features: list[Tensor] = []

    def add(name: str, values: Tensor, axis: int) -> None:
        moments.setdefault(name, _Moments()).add(values.movedim(axis, -1).flatten(0, -2))

    def make_hook(name: str, axis: int) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            fused = isinstance(layer, GroupNormReLU)
            add(name, nn.GroupNorm.forward(layer, *inputs) if fused else output, axis)

        return hook

    def store(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features[:] = inputs

    with contextlib.ExitStack() as stack:
        for name, layer in _list_norms(model).items():
            axis = -len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else 1
            stack.callback(layer.register_forward_hook(make_hook(name, axis)).remove)
        for layer in _list_linear(model):
            stack.callback(layer.register_forward_pre_hook(store).remove)
        logits = _run(model, images)
    if features:
        add(FEATURES, features[0], -1)  # of the linear layer that was called last
    return logits


@torch.no_grad()
def _run(model: YNet, images: Tensor) -> Tensor:
    try:
        return model(images)
    except RuntimeError as error:
        shape = tuple(images.shape[1:])
        raise ValueError(f"The network does not accept images of shape {shape}: {error}") from None


def _list_parameters(net: YNet) -> dict[str, Tensor]:
    """Return the parameters of encoder and classifier by name."""
    named = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return {name: tensor for name, tensor in named.items() if name.startswith(("encoder.", "classifier."))}


def _list_norms(net: YNet) -> dict[str, nn.Module]:
    """Return the normalisation layers of encoder and classifier by name."""
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, NORMS)}
    return {name: layer for name, layer in layers.items() if name.split(".")[0] in ("encoder", "classifier")}


def _list_linear(net: YNet) -> Iterator[nn.Linear]:
    return (layer for layer in net.classifier.modules() if isinstance(layer, nn.Linear))


def _count_channels(layer: Any) -> int:
    if isinstance(layer, nn.LayerNorm):
        return layer.normalized_shape[0]
    return layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.num_features
