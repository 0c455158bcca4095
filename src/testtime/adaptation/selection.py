"""What learns in a network: its parameters and the statistics of Batch Normalization; safe defaults and warnings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from testtime.adaptation.settings import Settings, Update
from testtime.checks import format_value
from testtime.networks.batch_norms import Statistics
from testtime.networks.replicas import PARTS, Part
from testtime.networks.stacked_norms import NORMS
from testtime.networks.task_loss import find_entry
from testtime.networks.ynet import YNet

_SHOWN = 8  # names in a message
_PARTS: dict[str, tuple[Part, ...]] = {
    "norm": ("encoder", "classifier"),
    "norm-early": ("encoder", "classifier"),
    "encoder": ("encoder",),
    "encoder+ssl": ("encoder", "ssl"),
    "all": ("encoder", "classifier"),
    "none": (),
}


def select_parameters(net: YNet, update: Update) -> list[str]:
    """Return the names of the parameters that learn; those without `requires_grad` never do.

    Raises:
        ValueError: There are none.
    """
    free = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    if callable(update):
        chosen = [name for name, parameter in free.items() if update(name, parameter)]
    elif isinstance(update, tuple):
        chosen = [name for name in free if any(fnmatchcase(name, pattern) for pattern in update)]
    else:
        chosen = [name for name in free if name.split(".")[0] in _PARTS[update]]
        if update in ("norm", "norm-early"):
            norms = set(_list_norms(net))
            if not norms:
                raise ValueError(
                    f"`update` is {format_value(update)}, but the network has no normalisation layers with parameters: "
                    'update="encoder" adapts all layers of the encoder.'
                )
            chosen = [name for name in chosen if name in norms]
        if update == "norm-early":
            chosen = _leave_out_last(chosen)
    if not chosen and update != "none":
        more = f" and {len(free) - _SHOWN} more" if len(free) > _SHOWN else ""
        hint = f"those with `requires_grad` are {', '.join(list(free)[:_SHOWN])}{more}"
        if not free:
            hint = "none has `requires_grad`; call net.requires_grad_(True)"
        raise ValueError(f"`update` selects no parameters of the network, got {format_value(update)}: {hint}.")
    return chosen


def find_parts(net: YNet, settings: Settings, needs_branch: bool) -> tuple[Part, ...]:
    """Return the parts of a network that differ between replicas, by updates or by the statistics of their batches.

    Args:
        net: The network.
        settings: The settings.
        needs_branch: Whether a step runs the self-supervised branch, rather than the classifier.
    """
    update = settings.update
    if isinstance(update, str):
        moving = {part for part in _PARTS[update] if getattr(net, part) is not None}
    else:
        moving = {name.split(".")[0] for name in select_parameters(net, update)}
    if settings.statistics != "source":
        run: tuple[Part, ...] = ("encoder", "ssl") if needs_branch else ("encoder", "classifier")
        if settings.statistics == "batch":
            run = (*run, "classifier")  # which observes batches, too
        moving |= {part for part in run if has_batch_norm(getattr(net, part))}
    return tuple(part for part in PARTS if part in moving)


def find_layers(net: YNet, settings: Settings, parts: Sequence[Part]) -> set[str] | None:
    """Return the names of the layers that differ between replicas in some parts of a network; None: possibly all.

    The other layers are shared. Buffers other than those of Batch Normalization may change in any forward pass.
    """
    moving = {id(net.get_parameter(name)) for name in select_parameters(net, settings.update)}
    is_whole = isinstance(settings.update, str) and not settings.update.startswith("norm")
    whole = _PARTS[str(settings.update)] if is_whole else ()  # parts of which all layers learn
    if whole and settings.statistics != "batch":
        return None
    layers = set()
    for name, layer in net.named_modules():
        is_still = settings.statistics == "source" and isinstance(layer, nn.modules.batchnorm._BatchNorm)
        differs = bool(layer._buffers) and not is_still
        differs |= any(id(parameter) in moving for parameter in layer.parameters(recurse=False))
        part = name.split(".")[0]
        if part in whole or (differs and part in list(parts)):
            layers.add(name)
    return layers


def _list_norms(net: YNet) -> Iterator[str]:
    """Yield the names of the affine parameters of normalization layers, also those of other libraries."""
    for owner, module in net.named_modules():
        if isinstance(module, NORMS) or "norm" in type(module).__name__.lower():
            yield from (f"{owner}.{name}" for name, _ in module.named_parameters(recurse=False))


def _leave_out_last(names: list[str]) -> list[str]:
    """Return the parameters of normalization layers without the last quarter of the stages, and what follows them.

    Stages are the outermost modules, at least three of them, that have several layers each, e.g. the groups of a ResNet
    or the blocks of a transformer; without such, every layer is a stage.
    """
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    stages = layers
    for depth in range(2, max((len(layer.split(".")) for layer in layers), default=0)):
        counts = Counter(".".join(layer.split(".")[:depth]) for layer in layers)
        groups = [stage for stage, count in counts.items() if count > 1]
        if len(groups) > 2:
            stages = groups
            break
    kept = max(1, len(stages) * 3 // 4)
    if len(stages) > kept:
        first = next(name for name in names if f"{name}.".startswith(f"{stages[kept]}."))
        names = names[: names.index(first)]
    return names


def has_batch_norm(module: nn.Module | None) -> bool:
    """Return whether a module has Batch Normalization."""
    return module is not None and any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def choose_statistics(net: YNet, settings: Settings) -> Statistics:
    """Return the default of `Settings.statistics` for a network."""
    record = net.card.record
    jointly = "configuration" in record and "branch" not in record  # by `train`, not by `fit_branch`
    moves = settings.steps > 0 and settings.share == "image" and has_batch_norm(net)
    return "source" if moves and not jointly else "running"


def warn_about_statistics(net: YNet, settings: Settings) -> None:
    """Warn if a stream of single images moves the running statistics of Batch Normalization."""
    if settings.statistics == "running" and settings.share == "image" and settings.steps and has_batch_norm(net):
        warnings.warn(
            "A stream of single images moves the running statistics of Batch Normalization, which degrades it: "
            'pass statistics="source".',
            stacklevel=4,
        )


def warn_about_branch(net: YNet) -> None:
    """Warn if the self-supervised branch was never trained: of a split model, or by a method without the task."""
    record = net.card.record
    unknown = not net.card.architecture and not record.keys() & {"configuration", "branch"}
    split = unknown and getattr(net, "cut", None)  # others may have been trained elsewhere
    method = find_entry(record, "configuration", "recipe", "method")
    if split or (method in ("plain", "alp") and "branch" not in record):
        warnings.warn("The self-supervised branch is not trained: tt.fit_branch(net, images).", stacklevel=4)


def warn_about_batch(method: str) -> None:
    """Warn about a batch of one image for a method that needs several."""
    warnings.warn(
        f"The method {method!r} needs several images per call; with one, it may do nothing or degrade.", stacklevel=4
    )


def warn_about_batch_norm(net: YNet, method: str) -> None:
    """Warn if a method that changes only Batch Normalization has nothing to change."""
    if not has_batch_norm(net):
        warnings.warn(f"The network has no Batch Normalization, so the method {method!r} has no effect.", stacklevel=4)
