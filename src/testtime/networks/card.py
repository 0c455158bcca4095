"""The metadata of a checkpoint, and its validation.

Files are not trusted: every field of a card has a type and limits, and the tensors must match the network before any
memory is allocated for it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from testtime import augment as augmentations
from testtime.checks import format_value
from testtime.storage import FileError

KEY, FORMAT = "testtime", 1
"""Metadata key of a network's file, and the version of its format."""
LARGEST_SIZE = 65_536
"""Maximum side of an image in pixels, and maximum number of channels."""
_LONGEST_TEXT = 1_000
_DEEPEST = 50
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AUGMENTATIONS = ("crop-flip", "resized-crop-flip")


class CheckpointError(FileError):
    """A file that is not a testtime checkpoint, or not one for this network."""


@dataclass(frozen=True)
class Card:
    """The metadata of a network.

    Attributes:
        architecture: The builder's name and arguments; empty for a custom model.
        classes: Class names in the order of the logits; empty if unknown.
        size: Side of the training images in pixels.
        mean: Mean of each channel, on pixels in [0, 1].
        std: Standard deviation of each channel, on pixels in [0, 1].
        task: Name of the self-supervised task.
        augment: Name and arguments of the augmentation for training and adaptation.
        record: The training record: settings, data, seeds, loss and error by epoch.

    Raises:
        ValueError: A field has the wrong type or is out of range.
    """

    architecture: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    size: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    task: str = "rotation"
    augment: dict[str, Any] = field(default_factory=lambda: {"name": "crop-flip"})
    record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("classes", "mean", "std"):
            object.__setattr__(self, name, _make_tuple(name, getattr(self, name)))
        _check_numbers("mean", self.mean, -1e6, 1e6)
        _check_numbers("std", self.std, 1e-6, 1e6)
        for name in self.classes:
            _check_text("classes", name)
        _check_text("task", self.task)
        if self.size is not None:
            check_integer("size", self.size, LARGEST_SIZE)
        for name in ("architecture", "augment", "record"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"`{name}` must be a dictionary, got {format_value(getattr(self, name))}.")
        _check_augment(self.augment)


def check_integer(name: str, value: object, most: int) -> None:
    """Check that a value is an integer from 1 to `most`.

    Raises:
        ValueError: It is not; the message contains `name`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
        raise ValueError(f"`{name}` must be an integer from 1 to {most:,}, got {format_value(value)}.")


def _make_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"`{name}` must be a list, got {format_value(values)}.")
    return tuple(value.item() if hasattr(value, "item") else value for value in values)  # an array or a tensor


def _check_numbers(name: str, values: tuple[Any, ...], low: float, high: float) -> None:
    sound = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high for value in values
    )
    if not (1 <= len(values) <= LARGEST_SIZE and all(sound)):
        raise ValueError(
            f"`{name}` must be one number from {low:g} to {high:g}, or one per channel, got {format_value(values)}."
        )


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise ValueError(f"`{name}` must be text of at most {_LONGEST_TEXT:,} characters, got {format_value(text)}.")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text):
        raise ValueError(f"`{name}` must be text without control characters, got {format_value(text)}.")


def _check_augment(augment: Mapping[str, Any]) -> None:
    """Check that an augmentation of this package can be built; custom ones are only checked for range."""
    values = [inner for one in augment.values() for inner in (one if isinstance(one, (list, tuple)) else [one])]
    sound = all(abs(value) <= LARGEST_SIZE for value in values if isinstance(value, (int, float)))
    name = augment.get("name", "")
    if sound and isinstance(name, str) and name in _AUGMENTATIONS:
        try:
            augmentations.make(augment)
        except (TypeError, ValueError):
            sound = False
    if not sound or not isinstance(name, str):
        raise ValueError(f"`augment` must be the name and arguments of an augmentation, got {format_value(augment)}.")


def read_card(about: Mapping[str, Any]) -> Card:
    """Parse the description of a file.

    Raises:
        ValueError: A field is missing, unknown or invalid.
    """
    check_plain(about)
    known = {one.name for one in fields(Card)}
    for name in about:
        if name not in known:
            raise ValueError(f"the description has an unknown field {format_value(name)}")
    for name in ("classes", "mean", "std"):
        if name not in about:
            raise ValueError(f"the description has no field `{name}`")
    return Card(**about)


def check_plain(description: object) -> None:
    """Check that the numbers of a description are finite, and that it is not nested too deeply.

    Raises:
        ValueError: One is not, or it is.
    """
    level = [description]
    for _ in range(_DEEPEST):
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise ValueError("the description has numbers that are not finite")
        level = [inner for value in level for inner in _list_inner(value)]
        if not level:
            return
    raise ValueError("the description is nested too deeply")


def _list_inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def compare_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check that tensors from a file can replace others; floating-point dtypes may differ.

    Args:
        found: The tensors of the file, by name.
        wanted: The tensors to replace, by name; their values are not read.

    Raises:
        ValueError: One is missing, unknown, of another shape or dtype, or has values that are not finite.
    """
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            raise ValueError(f"tensor {format_value(name)} is missing")
        if name not in wanted:
            raise ValueError(f"tensor {format_value(name)} does not belong to this network")
        tensor, own = found[name], wanted[name]
        if tensor.shape != own.shape:
            shapes = f"{format_value(tuple(tensor.shape))}, the network needs {tuple(own.shape)}"
            raise ValueError(f"tensor {format_value(name)} has shape {shapes}")
        if tensor.dtype != own.dtype and not (tensor.dtype in _FLOATS and own.dtype in _FLOATS):
            raise ValueError(f"tensor {format_value(name)} has dtype {tensor.dtype}, the network needs {own.dtype}")
        if not torch.isfinite(tensor.to(own.dtype)).all():
            raise ValueError(f"tensor {format_value(name)} has values that are not finite")
