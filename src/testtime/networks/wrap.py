"""Any classifier as a `YNet`: `wrap` takes it as it is, `split` adds a self-supervised branch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from testtime.networks.branch import Kind, copy_classifier, make_head
from testtime.networks.card import LARGEST_SIZE, Card, check_integer
from testtime.networks.outputs import (
    Logits,
    Refused,
    find_images,
    make_images,
    pick_logits,
    run,
    shorten,
)
from testtime.networks.preprocessing import choose_augment, read_preprocessing
from testtime.networks.recording import Recording
from testtime.networks.traced import Trace
from testtime.networks.ynet import YNet, check_no_lazy_layers

log = logging.getLogger(__name__)

_MOST_ATTEMPTS = 12
"""Cuts that are tried before a model is said to have none."""
_MOST_NAMES = 40
"""Layers that an error message lists."""
_warned: set[str] = set()


@torch.inference_mode(False)  # so that the network can be trained
def wrap(
    model: nn.Module,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: int | None = None,
    classes: Sequence[str] = (),
    augment: dict[str, Any] | None = None,
    preprocessing: object = None,
) -> YNet:
    """Make a `YNet` without a self-supervised branch from any classifier, for methods that need none.

    The model is copied. Models compiled by `torch.compile` and those in `DataParallel` are unwrapped.

    Args:
        model: Returns class logits `(N, K)`: a tensor, or in a tuple, a dictionary or an object with `logits`.
        mean: Channel means that the model's input is normalised with, on pixels in [0, 1].
        std: Channel standard deviations, likewise.
        size: Side of the images.
        classes: Class names.
        augment: Augmentation for the views of a test image, see `testtime.augment.make`. By default it follows the
            size: random resized crops from 96 pixels on, below that moves by up to an eighth of the side.
        preprocessing: What `mean`, `std` and `size` are read from if they are not given: torchvision's
            `weights.transforms()`, or an image processor of transformers. Models of timm have it with them.

    Raises:
        ValueError: The model is not such a classifier, or an argument does not fit it.
    """
    given = _unwrap(model)
    model = _copy_model(given)
    card = _make_card(model, mean, std, size, classes, augment, preprocessing)
    with torch.random.fork_rng(devices=[]):
        images, output = _probe(model, card.size)
    outputs = pick_logits(output).shape[1]
    if classes and outputs != len(card.classes):
        raise ValueError(f"`classes` must name the model's {outputs} outputs, got {len(card.classes)} names.")
    encoder = model if isinstance(output, Tensor) else Logits(model)
    return _finish(YNet(encoder, nn.Identity(), None, card, channels=images.shape[1]), given)


@torch.inference_mode(False)  # so that the parts can be trained
def split(
    model: nn.Module,
    at: str | None = None,
    outputs: int = 4,
    *,
    branch: Kind | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: int | None = None,
    classes: Sequence[str] = (),
    augment: dict[str, Any] | None = None,
    preprocessing: object = None,
    seed: int = 0,
) -> YNet:
    """Make a `YNet` with a self-supervised branch from any classifier, split after one of its layers.

    The encoder is everything up to the layer, the classifier everything after it. The branch is initialised at random:
    train it with `fit_branch` before adapting the network. The model is copied and need not be traceable; a model that
    `torch.fx` cannot trace is run on random images, and may then be tied to images of their size.

    Args:
        model: As for `wrap`.
        at: Name of the last layer of the encoder, as in `model.named_modules()`; None: a block at about two thirds of
            the layers. The attribute `cut` of the network is its name.
        outputs: Outputs of the self-supervised task: 4 for rotation, 24 for jigsaw.
        branch: "copy": a copy of the classifier with a new last layer; "head": a fresh head on the features; None: a
            copy where that is possible.
        mean: As for `wrap`, like the following.
        std: See there.
        size: See there.
        classes: See there.
        augment: See there.
        preprocessing: See there.
        seed: Seed of the new layers.

    Raises:
        ValueError: The model cannot be split there; the message names the layers where it can. Or as for `wrap`.
    """
    if branch not in (None, *get_args(Kind)):
        raise ValueError(f'`branch` must be "copy", "head" or None, got {branch!r}.')
    check_integer("outputs", outputs, LARGEST_SIZE)
    given = _unwrap(model)
    model = _copy_model(given)
    card = _make_card(model, mean, std, size, classes, augment, preprocessing)
    with torch.random.fork_rng(devices=[]):
        try:
            images, _ = _probe(model, card.size)
        except ValueError:
            if at is None or card.size is not None:
                raise
            images = None  # a model that can be traced need not be run
        parts = _split(model, at, card.size, images)
        ssl = _make_branch(parts, outputs, branch, seed)
    log.info("the model is split after %s", parts.at)
    channels = None if images is None else images.shape[1]
    net = YNet(parts.encoder, parts.classifier, ssl, card, channels=channels)
    net.cut = parts.at
    return _finish(net, given)


class _Parts(NamedTuple):
    """A model in two parts, and features that cross the cut if it was run."""

    at: str
    encoder: nn.Module
    classifier: nn.Module
    features: Tensor | None


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile`, `DataParallel` or `DistributedDataParallel` was given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _unwrap(model.module)
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("`model` must not be TorchScript, which cannot be adapted: pass the original torch.nn.Module.")
    compiled = model._modules.get("_orig_mod")
    return model if compiled is None else _unwrap(compiled)


def _copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model in evaluation mode.

    Raises:
        ValueError: Its parameters have no values, or are of a type that is not adapted.
    """
    check_no_lazy_layers(model)
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("`model` must have values, its parameters are on the meta device: load them first.")
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        raise ValueError("`model` must have float32 parameters, got float64: pass model.float().")
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise ValueError("`model` must have real parameters, got complex ones: store torch.view_as_real of them.")
    copied = copy.deepcopy(model)
    for module in copied.modules():  # not .eval(): models may override it
        module.training = False
        for name, parameter in list(module._parameters.items()):
            # Indices do not learn. Subclasses, as those of quantized layers, have code that expects them.
            if type(parameter) is nn.Parameter and not parameter.is_floating_point():
                del module._parameters[name]
                module.register_buffer(name, parameter.detach())
    return copied


@torch.no_grad()
def _probe(model: nn.Module, size: int | None) -> tuple[Tensor, Any]:
    """Return images that a model accepts and its output, and restore buffers that every forward pass changes.

    Buffers that only the first pass changes are caches and stay filled.
    """
    before = _copy_buffers(model)
    images = find_images(model, size)
    first = _copy_buffers(model)
    output = model(images)
    _restore(model, before, first)
    return images, output


@contextlib.contextmanager
def _restored(*modules: nn.Module) -> Iterator[None]:
    """Restore the buffers of modules at the end."""
    stored = [_copy_buffers(module) for module in modules]
    try:
        yield
    finally:
        for module, old in zip(modules, stored, strict=True):
            _restore(module, old, old)


def _copy_buffers(module: nn.Module) -> dict[str, Tensor]:
    comparable = (pair for pair in module.named_buffers() if pair[1].layout is torch.strided)
    return {name: buffer.detach().clone() for name, buffer in comparable}


def _restore(module: nn.Module, old: Mapping[str, Tensor], since: Mapping[str, Tensor]) -> None:
    """Set the buffers that have changed since a copy to their old values."""
    for name, buffer in list(module.named_buffers()):
        if name in old and not (buffer.dtype == since[name].dtype and buffer.equal(since[name])):
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner)._buffers[last] = old[name]


def _make_card(
    model: nn.Module,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    size: int | None,
    classes: Sequence[str],
    augment: dict[str, Any] | None,
    preprocessing: object,
) -> Card:
    """Return the card of a model; arguments that are None are read from its preprocessing."""
    found = read_preprocessing(model, preprocessing)
    is_unknown = all(one is None for one in (mean, std, found.mean, found.std))
    if is_unknown and "normalisation" not in _warned:
        _warned.add("normalisation")
        log.warning(
            "the model's normalisation is unknown, so none is applied; if it has one, pass it to tt.wrap or tt.split "
            "(with -m FILE.py:FUNCTION, let FUNCTION return tt.wrap(model, …)): mean=(0.485, 0.456, 0.406), "
            "std=(0.229, 0.224, 0.225), or preprocessing=weights.transforms()"
        )
    if size is not None:
        check_integer("size", size, LARGEST_SIZE)
        found = found.at(size)
    fields: dict[str, Any] = {} if augment is None else {"augment": augment}
    if augment is None and found.size is not None:
        fields["augment"] = choose_augment(found.size)
    if described := found.describe():
        fields["record"] = {"preprocessing": described}
    mean = next(one for one in (mean, found.mean, (0.0,)) if one is not None)
    std = next(one for one in (std, found.std, (1.0,)) if one is not None)
    return Card(classes=tuple(classes), size=found.size, mean=tuple(mean), std=tuple(std), **fields)


def _split(model: nn.Module, at: str | None, size: int | None, images: Tensor | None) -> _Parts:
    """Return the parts of a model before and after a layer, which is chosen if `at` is None."""
    try:
        trace = Trace(model)
    except ValueError as error:
        log.info("%s, so the model is split by running it", error)
        trace = None
    if trace is not None and at in trace.cuts:
        parts = _cut_trace(trace, at, model, images)
        if isinstance(parts, _Parts):
            return parts
    images = find_images(model, size) if images is None else images
    recording = Recording(model, images)
    if at is not None and recording.find_cut(at) is None:
        raise ValueError(_explain(model, at, recording.find_cuts()))
    fault = "there is no layer whose output alone feeds the rest"
    for name in itertools.islice(recording.rank(), _MOST_ATTEMPTS) if at is None else (at,):
        if at is None and trace is not None and name in trace.cuts:
            parts = _cut_trace(trace, name, model, images)
        else:
            parts = _cut_recording(recording, name, images, size)
        if isinstance(parts, _Parts):
            return parts
        fault = f"after {name!r} {parts}"
    raise ValueError(f"The model cannot be split: {fault}. tt.wrap(model) serves methods that need no branch.")


def _cut_trace(trace: Trace, at: str, model: nn.Module, images: Tensor | None) -> _Parts | str:
    """Return the traced parts of a model, or what is wrong with them."""
    encoder, classifier = trace.cut(at)
    if images is None:
        return _Parts(at, encoder, classifier, None)
    features = _compare(model, encoder, classifier, images)
    return features if isinstance(features, str) else _Parts(at, encoder, classifier, features)


def _cut_recording(recording: Recording, at: str, images: Tensor, size: int | None) -> _Parts | str:
    """Return the recorded parts of a model, or what is wrong with them."""
    model = recording.model
    encoder, classifier = recording.cut(at)
    features = _compare(model, encoder, classifier, images)
    if isinstance(features, str):
        return features
    fixed = True
    for side in (images.shape[-1] + 32, 2 * images.shape[-1]):
        try:
            fixed = isinstance(_compare(model, encoder, classifier, make_images(model, 1, images.shape[1], side)), str)
        except Refused:
            continue
        if fixed and size is None:
            raise ValueError("`size` must be given, the side of your images: the model is split by running it on them.")
        break
    classifier.fixed = fixed
    return _Parts(at, encoder, classifier, features)


def _compare(model: nn.Module, encoder: nn.Module, classifier: nn.Module, images: Tensor) -> Tensor | str:
    """Return the features of images, or how two parts differ from the model on them.

    Raises:
        Refused: The model does not accept the images.
    """
    features = images
    for grad, batch in ((True, images[:1]), (False, images)):
        with torch.set_grad_enabled(grad), _restored(model, encoder, classifier):
            expected = run(model, batch).detach()
            try:
                features = encoder(batch)
                found = classifier(features).detach()
            except Exception as error:  # of code that is not ours
                return f"the parts fail with {type(error).__name__}: {shorten(error)}"
        scale = float(expected.abs().max())
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * scale):
            return "the parts compute something else than the model"
        learns = grad and any(parameter.requires_grad for parameter in encoder.parameters())
        if learns and not features.requires_grad:
            return "the features carry no gradient"
    return features


def _explain(model: nn.Module, at: str, cuts: list[str]) -> str:
    known = "cannot be split after" if at in dict(model.named_modules()) else "has no layer"
    if not cuts:
        return f"The model {known} {at!r}: there is no layer whose output alone feeds the rest."
    names = ", ".join(cuts[:_MOST_NAMES]) + (", …" if len(cuts) > _MOST_NAMES else "")
    return f"The model {known} {at!r}. It can be split at: {names}."


def _make_branch(parts: _Parts, outputs: int, kind: Kind | None, seed: int) -> nn.Module:
    if kind != "head":
        branch = copy_classifier(parts.classifier, outputs, parts.features, seed)
        if branch is not None:
            stored = _copy_buffers(parts.classifier)
            _restore(branch, stored, stored)  # it was tried on random features
            return branch
        if kind == "copy":
            raise ValueError(f'There is no last layer after {parts.at!r} to replace; branch="head" needs none.')
    if parts.features is None:
        raise ValueError("`size` must be given, the side of your images, for a branch with a fresh head.")
    return make_head(parts.features, outputs, seed)


def _finish(net: YNet, model: nn.Module) -> YNet:
    """Return a network on the device, of the dtype and in the mode of the user's model."""
    like = next((tensor for tensor in net.parameters() if tensor.is_floating_point()), None)
    if like is not None:
        net = net.to(like.device)
        net.mean, net.std = net.mean.to(like.dtype), net.std.to(like.dtype)
    for module in net.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(_make_contiguous)
    return net.train(model.training)


def _make_contiguous(norm: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Guard a GroupNorm: with channels last, torch crashes in backward if its input needs no gradient."""
    return None if inputs[0].requires_grad else (inputs[0].contiguous(), *inputs[1:])
