"""The networks that can be built by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from testtime.checks import format_value
from testtime.networks.card import Card
from testtime.networks.resnet import Device, resnet18, resnet26, resnet50
from testtime.networks.vit import vit
from testtime.networks.ynet import YNet


@dataclass(frozen=True)
class Builder:
    """How to build a network, and its defaults.

    Attributes:
        make: The function; a checkpoint stores its arguments.
        size: Default side of the images.
        crops: Whether training uses crops of random size, described by the card's `augment`, rather than shifts.
        recipe: Name of the `Recipe` constructor to train it with.
        digits: Arguments for the built-in digits.
    """

    make: Callable[..., YNet]
    size: int
    crops: bool
    recipe: Literal["cifar", "imagenet", "vit"]
    digits: dict[str, int] = field(default_factory=dict)

    def takes(self, argument: str) -> bool:
        """Whether `make` has an argument of that name."""
        return argument in inspect.signature(self.make).parameters


BUILDERS: dict[str, Builder] = {
    "resnet26": Builder(resnet26, 32, crops=False, recipe="cifar", digits={"depth": 8}),
    "resnet18": Builder(resnet18, 224, crops=True, recipe="imagenet"),
    "resnet50": Builder(resnet50, 224, crops=True, recipe="imagenet"),
    "vit": Builder(vit, 32, crops=False, recipe="vit", digits={"width": 48, "depth": 4}),
}
"""Architecture name → builder."""


def build(card: Card, device: Device = "cpu") -> YNet:
    """Build the untrained network that a card describes.

    Raises:
        ValueError: The architecture or one of its arguments is unknown.
    """
    arguments = dict(card.architecture)
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in BUILDERS:
        raise ValueError(f"there is no architecture {format_value(name)}")
    builder = BUILDERS[name]
    unknown = sorted(key for key in arguments if key in ("seed", "device") or not builder.takes(key))
    if unknown:
        raise ValueError(f"the architecture {name} has no argument {format_value(unknown[0])}")
    net = builder.make(**arguments, device=device)
    described = replace(net.card, mean=card.mean, std=card.std)
    return YNet(net.encoder, net.classifier, net.ssl, described, channels=net.channels)
