"""Networks from files: those that `YNet.save` wrote, and those that are bundled with the package."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from testtime.networks.builders import build
from testtime.networks.card import (
    FORMAT,
    KEY,
    Card,
    CheckpointError,
    check_format,
    compare_tensors,
    read_card,
    show,
)
from testtime.networks.ynet import YNet, refuse_lazy_layers
from testtime.storage import FileError
from testtime.tensorfile import read_tensors

WEIGHTS = Path(__file__).parent.parent / "weights"


def load(source: str | Path, net: YNet | None = None) -> YNet:
    """Read a network from a checkpoint file, or a bundled one by its name.

    Nothing is allocated, and nothing of `net` changed, before the file is known to fit.

    Args:
        source: Path of a file that `YNet.save` wrote, or a name from `bundled()`.
        net: The network to read the weights into; needed only for one that `split` made of the user's own model.

    Raises:
        CheckpointError: The file is missing, damaged, foreign, or does not fit `net`.
    """
    path = find_checkpoint(source)
    card, tensors = read_checkpoint(path)
    if net is None and not card.architecture:
        raise CheckpointError(path, "a network made of a custom model", "build it again as `net` and call load(…, net)")
    try:
        if net is None:
            net = _build(card, tensors)
        else:
            refuse_lazy_layers(net)
            _compare_cards(card, net.card)
            compare_tensors(tensors, net.state_dict())
        card = replace(card, architecture=net.card.architecture or card.architecture)
        net.check_card(card)
    except ValueError as error:
        raise CheckpointError(path, str(error).rstrip(".")) from None
    net.load_state_dict(tensors)
    net.card = card
    return net.eval()


def bundled() -> tuple[str, ...]:
    """Names of the trained networks that are bundled with the package."""
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def find_checkpoint(source: str | Path) -> Path:
    """The file of a network, by its path or as the name of a bundled one."""
    if not os.path.isfile(source) and str(source) in bundled():
        return WEIGHTS / f"{source}.safetensors"
    return Path(source)


def read_checkpoint(path: Path) -> tuple[Card, dict[str, Tensor]]:
    """Card and tensors of a network's file, which need not be one that this package can build.

    Raises:
        CheckpointError: The file is missing, damaged or foreign.
    """
    try:
        about, tensors = read_tensors(path, KEY)
        if about is None:
            raise ValueError("a safetensors file, but not a network of testtime")
        check_format(path, about.pop("format", None), FORMAT)
        return read_card(about), tensors
    except CheckpointError:
        raise
    except FileError as error:
        known = "" if os.path.exists(path) else f"the bundled networks are {', '.join(bundled()) or 'none'}"
        raise CheckpointError(path, error.fault, error.remedy or known) from None
    except ValueError as error:
        raise CheckpointError(path, str(error).rstrip(".")) from None


def _build(card: Card, tensors: dict[str, Tensor]) -> YNet:
    """The network that a card describes, its weights not yet set, once the tensors are known to be its own.

    Raises:
        ValueError: They are not.
    """
    depth = card.architecture.get("depth")
    if isinstance(depth, int) and depth > len(tensors):
        raise ValueError(f"the architecture has {show(depth)} layers, the file {len(tensors)} tensors")
    plan = build(card, "meta")
    compare_tensors(tensors, plan.state_dict())
    with torch.inference_mode(False):
        for part in (plan.encoder, plan.classifier, plan.ssl):
            part.to_empty(device="cpu")
    return YNet(plan.encoder, plan.classifier, plan.ssl, plan.card)


def _compare_cards(card: Card, own: Card) -> None:
    """Check that a network's own card does not contradict the card of a file."""
    if (card.mean, card.std) != (own.mean, own.std):
        raise ValueError(
            f"saved with normalisation mean {show(card.mean)}, std {show(card.std)}; "
            f"this network has mean {own.mean}, std {own.std}"
        )
    there, here = ({**one.architecture, "size": None} for one in (card, own))  # the network takes any size
    if card.architecture and own.architecture and there != here:
        raise ValueError(f"its architecture is {show(card.architecture)}, this network's {show(own.architecture)}")
