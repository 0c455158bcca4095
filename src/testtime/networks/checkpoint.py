"""Load networks: files written by `YNet.save`, and those bundled with the package."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from testtime.checks import check_format, format_value
from testtime.networks.builders import build
from testtime.networks.card import (
    FORMAT,
    KEY,
    STATISTICS,
    Card,
    CheckpointError,
    Statistics,
    compare_tensors,
    read_card,
)
from testtime.networks.statistics import check_statistics
from testtime.networks.ynet import YNet, check_no_lazy_layers
from testtime.storage import FileError
from testtime.tensorfile import read_tensors

WEIGHTS = Path(__file__).parent.parent / "weights"


def load(source: str | Path, net: YNet | None = None) -> YNet:
    """Load a network from a checkpoint file, or a bundled one by name.

    The file is validated before memory is allocated or `net` is changed.

    Args:
        source: Path of a file written by `YNet.save`, or a name from `bundled()`.
        net: The network to load the weights into; needed only for a custom model, made by `split` or `YNet`.

    Raises:
        CheckpointError: The file is missing, damaged, of another kind, or does not fit `net`.
    """
    path = find_checkpoint(source)
    card, tensors, statistics = read_parts(path)
    if net is None and not card.architecture:
        remedy = "build it as `net` and call load(…, net), or pass -m MODEL --weights FILE"
        raise CheckpointError(path, "a network with a custom model", remedy)
    try:
        if net is None:
            net = _build(card, tensors)
        else:
            check_no_lazy_layers(net)
            _compare_cards(card, net.card)
            compare_tensors(tensors, net.state_dict())
        card = replace(card, architecture=net.card.architecture or card.architecture)
        net.check_card(card)
        if statistics is not None:
            check_statistics(net, statistics)
    except ValueError as error:
        raise CheckpointError(path, str(error).rstrip(".")) from None
    net.load_state_dict(tensors)
    net.card, net.statistics = card, statistics
    return net.eval()


def bundled() -> tuple[str, ...]:
    """Return the names of the trained networks bundled with the package."""
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def find_checkpoint(source: str | Path) -> Path:
    """Return the path of a network's file, given its path or the name of a bundled network."""
    if not os.path.isfile(source) and str(source) in bundled():
        return WEIGHTS / f"{source}.safetensors"
    return Path(source)


def read_checkpoint(path: Path) -> tuple[Card, dict[str, Tensor]]:
    """Read the card and the weights of a network's file, also of a custom model.

    Raises:
        CheckpointError: The file is missing, damaged or of another kind.
    """
    return read_parts(path)[:2]


def read_parts(path: Path) -> tuple[Card, dict[str, Tensor], Statistics | None]:
    """Read the card, the weights and, if there are any, the statistics of a network's file.

    Raises:
        CheckpointError: The file is missing, damaged or of another kind.
    """
    try:
        about, tensors = read_tensors(path, KEY)
        if about is None:
            raise ValueError("a safetensors file, but not a testtime network")
        check_format(path, about.pop("format", None), FORMAT)
        statistics = None
        if STATISTICS in about:
            names = [name for name in tensors if name.startswith(f"{STATISTICS}/")]
            statistics = Statistics.from_tensors({name: tensors.pop(name) for name in names}, about.pop(STATISTICS))
        return read_card(about), tensors, statistics
    except CheckpointError:
        raise
    except FileError as error:
        known = "" if os.path.exists(path) else f"the bundled networks are {', '.join(bundled()) or 'none'}"
        raise CheckpointError(path, error.fault, error.remedy or known) from None
    except ValueError as error:
        raise CheckpointError(path, str(error).rstrip(".")) from None


def _build(card: Card, tensors: dict[str, Tensor]) -> YNet:
    """Build the network that a card describes, with uninitialised weights, after checking that the tensors fit it.

    Raises:
        ValueError: They do not.
    """
    depth = card.architecture.get("depth")
    if isinstance(depth, int) and depth > len(tensors):
        raise ValueError(f"the architecture has {format_value(depth)} layers, the file {len(tensors)} tensors")
    plan = build(card, "meta")
    compare_tensors(tensors, plan.state_dict())
    with torch.inference_mode(False):
        for part in plan.children():
            part.to_empty(device="cpu")
    return YNet(plan.encoder, plan.classifier, plan.ssl, plan.card, channels=plan.channels)


def _compare_cards(card: Card, own: Card) -> None:
    """Check that the card of a file is compatible with a network's own."""
    if (card.mean, card.std) != (own.mean, own.std):
        raise ValueError(
            f"saved with normalisation mean {format_value(card.mean)}, std {format_value(card.std)}; "
            f"this network has mean {own.mean}, std {own.std}"
        )
    there, here = ({**one.architecture, "size": None} for one in (card, own))  # networks accept any size
    if card.architecture and own.architecture and there != here:
        raise ValueError(
            f"its architecture is {format_value(card.architecture)}, this network's {format_value(own.architecture)}"
        )
