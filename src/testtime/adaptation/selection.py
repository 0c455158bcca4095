"""What learns in a network: its parameters and the statistics of Batch Normalization; safe defaults and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from testtime.adaptation.settings import Settings, Update
from testtime.checks import format_value
from testtime.networks.replicas import PARTS, Part, Statistics
from testtime.networks.stacked import NORMS
from testtime.networks.ynet import YNet

_SHOWN = 8  # names in a message
_PARTS: dict[str, tuple[Part, ...]] = {
    "norm": ("encoder", "classifier"),
    "encoder": ("encoder",),
    "encoder+ssl": ("encoder", "ssl"),
    "all": ("encoder", "classifier"),
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
        norms = set(_list_norms(net)) if update == "norm" else free
        chosen = [name for name in free if name.split(".")[0] in _PARTS[update] and name in norms]
    if not chosen:
        more = f" and {len(free) - _SHOWN} more" if len(free) > _SHOWN else ""
        hint = f"those with `requires_grad` are {', '.join(list(free)[:_SHOWN])}{more}"
        if not free:
            hint = "none has `requires_grad`; call net.requires_grad_(True)"
        raise ValueError(f"`update` selects no parameters of the network, got {format_value(update)}: {hint}.")
    return chosen


def find_parts(net: YNet, settings: Settings, needs_branch: bool) -> tuple[Part, ...]:
    """Return the parts of a network that learning changes, by updates or by moving their statistics.

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
    if settings.statistics in (None, "running"):
        run: tuple[Part, ...] = ("encoder", "ssl" if needs_branch else "classifier")
        moving |= {part for part in run if has_batch_norm(getattr(net, part))}
    return tuple(part for part in PARTS if part in moving)


def _list_norms(net: YNet) -> Iterator[str]:
    """Yield the names of the affine parameters of normalization layers, also those of other libraries."""
    for owner, module in net.named_modules():
        if isinstance(module, NORMS) or "norm" in type(module).__name__.lower():
            yield from (f"{owner}.{name}" for name, _ in module.named_parameters(recurse=False))


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a module has Batch Normalization."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


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
    """Warn if the self-supervised branch of a split model was never trained."""
    unknown = not net.card.architecture and not net.card.record.keys() & {"configuration", "branch"}
    if unknown and getattr(net, "cut", None):  # others may have been trained elsewhere
        warnings.warn("The self-supervised branch is not trained: tt.fit_branch(net, images).", stacklevel=4)
