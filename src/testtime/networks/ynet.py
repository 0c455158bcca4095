"""The Y-shaped network of Test-Time Training: one encoder, two branches (paper, section 2).

`YNet` holds the shared feature extractor θe (`encoder`), the main branch θm (`classifier`) and the self-supervised
branch θs (`ssl`). It accepts raw images, uint8 or float in [0, 1], and normalises them itself: the normalisation is
saved with the weights.

Its `Card` holds the metadata: architecture, classes, normalisation, task, training record and recommended settings;
its `Statistics`, if it has them, were made by `collect` (statistics.py). checkpoint.py loads networks from files,
wrap.py makes them from other models.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from testtime.networks.card import FLOATS, FORMAT, KEY, STATISTICS, Card, Statistics, check_plain
from testtime.tasks import Task
from testtime.tensorfile import write_tensors

_FIXED = ("architecture", "mean", "std")
_CHANGEABLE = tuple(field.name for field in fields(Card) if field.name not in _FIXED)


class YNet(nn.Module):
    """A shared encoder with a classifier branch and, for methods that need one, a self-supervised branch.

    Args:
        encoder: θe, from normalised images `(N, C, H, W)` to features.
        classifier: θm, from features to class logits `(N, K)`.
        ssl: θs, from features to the task's outputs, `(N, outputs)` for tasks with classes, or None.
        card: Metadata; its `mean` and `std` normalise the images.
        channels: Channels of the images; None: those of the encoder's first convolution, if it has one.

    Attributes:
        cut: Name of the layer that `testtime.split` split the original model at, or None.
        statistics: Made by `testtime.collect`, or None; saved and copied with the network, but not in its `state_dict`.

    Raises:
        ValueError: The card does not fit the encoder's channels or the classifier's outputs.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        classifier: nn.Module,
        ssl: nn.Module | None = None,
        card: Card | None = None,
        *,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier
        self.ssl: nn.Module | None = ssl
        self.card = card or Card()
        self.statistics: Statistics | None = None
        self.cut: str | None = None
        first = next((module for module in encoder.modules() if isinstance(module, nn.Conv2d)), None)
        self.channels = channels if channels is not None or first is None else first.in_channels
        """Channels of the input images, or None if unknown."""
        self.check_card(self.card)
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        with torch.inference_mode(False):
            for name in ("mean", "std"):
                values = torch.tensor(getattr(self.card, name), dtype=torch.float32, device=device)
                self.register_buffer(name, values.view(-1, 1, 1), persistent=False)

    @property
    def has_branch(self) -> bool:
        """Whether there is a self-supervised branch."""
        return self.ssl is not None

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images `(..., C, H, W)`, uint8 or float in [0, 1], for the encoder.

        Channels beyond the network's, such as the coordinates in the views of `tasks.Masked`, stay unchanged.
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        if self.channels is None or images.shape[-3] <= self.channels:
            return (images - self.mean) / self.std
        pixels, others = images.tensor_split([self.channels], dim=-3)
        return torch.cat([(pixels - self.mean) / self.std, others.to(pixels.dtype)], dim=-3)

    def forward(self, images: Tensor) -> Tensor:
        """Return class logits `(N, K)` of images `(N, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """Return the self-supervised outputs `(N, ...)` of a task's views; see `supervise`."""
        return self.supervise(self.encode(views))

    def encode(self, images: Tensor) -> Tensor:
        """Return features of images `(N, C, H, W)`, uint8 or float in [0, 1]."""
        return self.encoder(self.normalise(images))

    def classify(self, features: Tensor) -> Tensor:
        """Return class logits `(N, K)` of features."""
        return self.classifier(features)

    def supervise(self, features: Tensor) -> Tensor:
        """Return the self-supervised outputs `(N, ...)` of features.

        Raises:
            ValueError: There is no self-supervised branch.
        """
        if self.ssl is None:
            raise ValueError("The network has no self-supervised branch: make it with testtime.split(model).")
        return self.ssl(features)

    def check_range(self, name: str, images: Tensor) -> None:
        """Check that float images are raw pixels, not already normalised; non-finite values are ignored.

        Raises:
            ValueError: They do not lie in [0, 1]; the message contains `name`.
        """
        normalises = any(self.card.mean) or any(value != 1 for value in self.card.std)
        if not (normalises and images.is_floating_point() and images.numel()):
            return
        low, high = (float(value) for value in images.detach().nan_to_num(0.5, 0.5, 0.5).aminmax())
        if low < 0 or high > 1:
            raise ValueError(
                f"Float `{name}` must be in [0, 1], got {low:.3g} to {high:.3g}: "
                "pass raw pixels, the network normalises them itself."
            )

    def check_card(self, card: Card) -> None:
        """Check that a card fits this network.

        Raises:
            ValueError: It does not fit the encoder's channels or the classifier's outputs, if these are known.
        """
        for name in ("mean", "std"):
            count = len(getattr(card, name))
            if count != 1 and count != (self.channels or count):
                raise ValueError(f"`{name}` must have a number for each of {self.channels} channels, got {count}.")
        outputs = _count_outputs(self.classifier)
        if card.classes and outputs not in (None, len(card.classes)):
            raise ValueError(f"`classes` must name the network's {outputs} outputs, got {len(card.classes)} names.")

    def describe(self, **changes: Any) -> YNet:
        """Change fields of the card that do not affect the computation.

        Args:
            **changes: `classes`, `size`, `task`, `augment`, `record` or `settings`.

        Raises:
            ValueError: A field is unknown, cannot be changed, is of the wrong type, or does not fit the network.
        """
        fixed = set(_FIXED) & changes.keys()
        if fixed:
            raise ValueError(f"`{sorted(fixed)[0]}` is fixed when a network is built and cannot be changed.")
        for name, value in changes.items():
            if name not in _CHANGEABLE:
                raise ValueError(f"`{name}` is not a field of the card ({', '.join(_CHANGEABLE)}), got {value!r}.")
        card = replace(self.card, **changes)
        self.check_card(card)
        self.card = card
        return self

    def fingerprint(self) -> str:
        """Return a hash of the weights and the normalisation, 16 hexadecimal digits."""
        digest = hashlib.sha256(repr((self.card.mean, self.card.std)).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())  # numpy has no bfloat16
        return digest.hexdigest()[:16]

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Save weights, card and statistics to one safetensors file, atomically.

        Args:
            path: The file.
            dtype: Floating-point type to store the parameters in, e.g. `torch.float16` for a file of half the size;
                None: their own. Buffers are stored as they are.

        Raises:
            ValueError: The card has numbers that are not finite, or `dtype` cannot represent the parameters.
            OSError: The file cannot be written.
        """
        about: dict[str, Any] = {"format": FORMAT, **asdict(self.card)}
        tensors = self.state_dict()
        if dtype is not None:
            names = [name for name, _ in self.named_parameters(remove_duplicate=False)]
            tensors |= {name: _convert(name, tensors[name], dtype) for name in names if name in tensors}
        if self.statistics is not None:
            about[STATISTICS] = self.statistics.about
            tensors |= self.statistics.to_tensors()
        check_plain(about)
        write_tensors(path, tensors, KEY, about)


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in another floating-point type, if that can represent it; others as they are."""
    if dtype not in FLOATS:
        raise ValueError(f"`dtype` must be one of {', '.join(map(str, FLOATS))}, got {dtype}.")
    converted = tensor.to(dtype) if tensor.dtype in FLOATS else tensor
    if converted.isfinite().sum() != tensor.isfinite().sum():
        raise ValueError(f"`dtype` {dtype} is too small for the values of {name}.")
    return converted


def _count_outputs(branch: nn.Module) -> int | None:
    """Return the number of outputs of a branch, or None if unknown."""
    last: nn.Module | None = branch
    while type(last) is nn.Sequential and len(last):
        last = last[-1]
    if isinstance(last, fx.GraphModule):
        (end,) = (node.args[0] for node in last.graph.nodes if node.op == "output")
        is_layer = isinstance(end, fx.Node) and end.op == "call_module"
        last = last.get_submodule(str(end.target)) if is_layer else None
    outputs = getattr(last, "out_features", None)
    return outputs if isinstance(outputs, int) else None


def check_task(net: YNet, task: Task) -> None:
    """Raise a ValueError if the self-supervised branch is known not to have the outputs that a task needs."""
    outputs = None if net.ssl is None else _count_outputs(net.ssl)
    patch, wanted = getattr(net.ssl, "patch", None), getattr(task, "patch", None)  # of a decoder
    if patch is not None and patch != wanted:
        needs = f"{task.outputs} outputs" if wanted is None else f"patches of {wanted} pixels"
        raise ValueError(
            f"The task {task.name!r} needs {needs}, the self-supervised branch is a decoder for patches of {patch}."
        )
    if task.outputs is None and outputs is not None:
        raise ValueError(
            f"The task {task.name!r} needs a decoder, the self-supervised branch has {outputs} outputs: "
            "testtime.vit(outputs=None) has one."
        )
    if outputs not in (None, task.outputs):
        raise ValueError(
            f"The task {task.name!r} needs {task.outputs} outputs, the self-supervised branch has {outputs}: "
            f"make it with testtime.split(model, outputs={task.outputs})."
        )


def check_no_lazy_layers(model: nn.Module) -> None:
    """Raise a ValueError if a model has lazy layers that are not initialised."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("The model has lazy layers without weights: call it on an image first.")
