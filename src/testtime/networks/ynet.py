"""The Y-shaped network of Test-Time Training: one encoder, two branches (paper, section 2).

`YNet` holds the shared feature extractor θe (`encoder`), the main branch θm (`classifier`) and the self-supervised
branch θs (`ssl`). It takes images as they come, uint8 or floats in [0, 1], and normalises them itself: the
normalisation is part of what was learned, so it travels with the weights.

Its `Card` describes it: architecture, classes, normalisation, task and training record. checkpoint.py reads networks
from files, wrap.py makes one of a model the user has.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from testtime.networks.card import FORMAT, KEY, Card, check_plain
from testtime.tensorfile import write_tensors


class YNet(nn.Module):
    """A shared encoder with a classifier branch and a self-supervised branch.

    Args:
        encoder: θe, from normalised images `(N, C, H, W)` to features.
        classifier: θm, from features to class logits `(N, K)`.
        ssl: θs, from features to the task's outputs `(N, outputs)`.
        card: What to remember about the network; its `mean` and `std` normalise the images.

    Raises:
        ValueError: The card does not fit the encoder's channels or the classifier's outputs.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, classifier: nn.Module, ssl: nn.Module, card: Card | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier
        self.ssl = ssl
        self.card = card or Card()
        self.check_card(self.card)
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        with torch.inference_mode(False):
            for name in ("mean", "std"):
                numbers = torch.tensor(getattr(self.card, name), dtype=torch.float32, device=device)
                self.register_buffer(name, numbers.view(-1, 1, 1), persistent=False)

    @property
    def channels(self) -> int | None:
        """Channels of the images it takes, or None where that cannot be told."""
        first = next((module for module in self.encoder.modules() if isinstance(module, nn.Conv2d)), None)
        return None if first is None else first.in_channels

    def normalise(self, images: Tensor) -> Tensor:
        """Images `(..., C, H, W)`, uint8 or floats in [0, 1], as the encoder expects them."""
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        return (images - self.mean) / self.std

    def forward(self, images: Tensor) -> Tensor:
        """Class logits `(N, K)` of images `(N, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """The self-supervised task's outputs `(N, outputs)` of views `(N, C, H, W)`."""
        return self.supervise(self.encode(views))

    def encode(self, images: Tensor) -> Tensor:
        """Features of images `(N, C, H, W)`, uint8 or floats in [0, 1]."""
        return self.encoder(self.normalise(images))

    def classify(self, features: Tensor) -> Tensor:
        """Class logits `(N, K)` of features."""
        return self.classifier(features)

    def supervise(self, features: Tensor) -> Tensor:
        """The self-supervised task's outputs `(N, outputs)` of features."""
        return self.ssl(features)

    def check_range(self, name: str, images: Tensor) -> None:
        """Check that floats are plain pixels and not normalised already; numbers that are not finite do not count.

        Raises:
            ValueError: They do not lie in [0, 1]; the message calls them by `name`.
        """
        normalises = any(self.card.mean) or any(value != 1 for value in self.card.std)
        if not (normalises and images.is_floating_point() and images.numel()):
            return
        low, high = (float(value) for value in images.detach().nan_to_num(0.5, 0.5, 0.5).aminmax())
        if low < 0 or high > 1:
            raise ValueError(
                f"Float `{name}` must lie in [0, 1], got {low:.3g} to {high:.3g}: "
                "give plain pixels, the network normalises them itself."
            )

    def check_card(self, card: Card) -> None:
        """Check that a card fits this network.

        Raises:
            ValueError: It does not fit the encoder's channels or the classifier's outputs, where those are known.
        """
        for name in ("mean", "std"):
            count = len(getattr(card, name))
            if count != 1 and count != (self.channels or count):
                raise ValueError(f"`{name}` must have a number for each of {self.channels} channels, got {count}.")
        outputs = _count_outputs(self.classifier)
        if card.classes and outputs not in (None, len(card.classes)):
            raise ValueError(f"`classes` must name the network's {outputs} outputs, got {len(card.classes)} names.")

    def describe(self, **changes: Any) -> YNet:
        """Change fields of the card that are not arithmetic (`classes`, `size`, `task`, `augment`, `record`).

        Raises:
            ValueError: A field cannot be changed, is of the wrong type, or does not fit the network.
        """
        fixed = {"mean", "std", "architecture"} & changes.keys()
        if fixed:
            raise ValueError(f"`{sorted(fixed)[0]}` is fixed when a network is made and cannot be described anew.")
        card = replace(self.card, **changes)
        self.check_card(card)
        self.card = card
        return self

    def fingerprint(self) -> str:
        """A short text that tells this network's numbers from any other's."""
        digest = hashlib.sha256(repr((self.card.mean, self.card.std)).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())  # numpy has no bfloat16
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write weights and card to one safetensors file, whole or not at all.

        Raises:
            ValueError: The card has numbers that are not finite.
            OSError: The file cannot be written.
        """
        about = {"format": FORMAT, **asdict(self.card)}
        check_plain(about)
        write_tensors(path, self.state_dict(), KEY, about)


def _count_outputs(classifier: nn.Module) -> int | None:
    """How many classes a classifier distinguishes, None where that cannot be told."""
    last: nn.Module | None = classifier
    while type(last) is nn.Sequential and len(last):
        last = last[-1]
    if isinstance(last, fx.GraphModule):
        (end,) = (node.args[0] for node in last.graph.nodes if node.op == "output")
        is_layer = isinstance(end, fx.Node) and end.op == "call_module"
        last = last.get_submodule(str(end.target)) if is_layer else None
    return last.out_features if isinstance(last, nn.Linear) else None


def refuse_lazy_layers(model: nn.Module) -> None:
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("The model has lazy layers, which have no weights yet: call it on an image first.")
