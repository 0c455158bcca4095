"""The networks that can be built by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from testtime.networks.card import Card, show
from testtime.networks.resnet import Device, resnet18, resnet26, resnet50
from testtime.networks.ynet import YNet


@dataclass(frozen=True)
class Builder:
    """How to build a network, and its own defaults.

    Attributes:
        make: The function; a checkpoint stores its arguments.
        size: Side of the images that the network is made for.
        crops: Whether it trains on crops of random size, which the card's `augment` describes; otherwise on shifts.
        recipe: The `Recipe` that it is trained by, as a name of its constructors.
    """

    make: Callable[..., YNet]
    size: int
    crops: bool
    recipe: Literal["cifar", "imagenet"]

    def takes(self, argument: str) -> bool:
        """Whether the function has an argument of that name."""
        return argument in inspect.signature(self.make).parameters


BUILDERS: dict[str, Builder] = {
    "resnet26": Builder(resnet26, 32, crops=False, recipe="cifar"),
    "resnet18": Builder(resnet18, 224, crops=True, recipe="imagenet"),
    "resnet50": Builder(resnet50, 224, crops=True, recipe="imagenet"),
}
"""By name."""


def build(card: Card, device: Device = "cpu") -> YNet:
    """The untrained network that a card describes.

    Raises:
        ValueError: There is no such network.
    """
    arguments = dict(card.architecture)
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in BUILDERS:
        raise ValueError(f"there is no architecture {show(name)}")
    builder = BUILDERS[name]
    unknown = sorted(key for key in arguments if key in ("seed", "device") or not builder.takes(key))
    if unknown:
        raise ValueError(f"the architecture {name} has no argument {show(unknown[0])}")
    net = builder.make(**arguments, device=device)
    return YNet(net.encoder, net.classifier, net.ssl, replace(net.card, mean=card.mean, std=card.std))
