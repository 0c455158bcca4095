"""The metadata and statistics of a checkpoint, and their validation.

Files are not trusted: every field of a card has a type and limits, and the tensors must match the network before any
memory is allocated for it.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from testtime import augment as augmentations
from testtime.checks import format_value, is_integer, is_number, is_table, is_table_of
from testtime.storage import FileError

KEY, FORMAT = "testtime", 1
"""Metadata key of a network's file, and the version of its format."""
LARGEST_SIZE = 65_536
"""Maximum side of an image in pixels, and maximum number of channels."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of weights."""
FEATURES = "features"
"""Name of the classifier's features in `Statistics`."""
STATISTICS = "statistics"
"""Field of a file's description and prefix of the names of its tensors, if it has statistics."""
_LONGEST_TEXT = 1_000
_LONGEST_TABLE = 20_000
_DEEPEST = 50
_AUGMENTATIONS = ("crop-flip", "resized-crop-flip")
_LARGEST_VIEW = 4_096  # of images of unknown size
_MOST = {"copies": 4_096, "steps": 1_000}  # recommended
_LARGEST_CONSTANT = 4_096  # such as the images that a method stores


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
        task: Name of the self-supervised task, or its name and arguments, see `testtime.tasks.make`.
        augment: Name and arguments of the augmentation for training and adaptation.
        record: The training record: settings, data, seeds, loss and error by epoch.
        settings: Recommended settings by method or mode, e.g. `{"ttt": {"lr": 0.001, "steps": 1}}`; plain JSON. Of
            their values, only what determines the memory and the time of a step is checked here.

    Raises:
        ValueError: A field has the wrong type or is out of range.
    """

    architecture: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    size: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    task: str | dict[str, Any] = "rotation"
    augment: dict[str, Any] = field(default_factory=lambda: {"name": "crop-flip"})
    record: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("classes", "mean", "std"):
            object.__setattr__(self, name, _make_tuple(name, getattr(self, name)))
        _check_numbers("mean", self.mean, -1e6, 1e6)
        _check_numbers("std", self.std, 1e-6, 1e6)
        for name in self.classes:
            _check_text("classes", name)
        if isinstance(self.task, dict):
            object.__setattr__(self, "task", _make_plain("task", self.task))
        _check_text("task", self.task.get("name") if isinstance(self.task, dict) else self.task)
        if self.size is not None:
            check_integer("size", self.size, LARGEST_SIZE)
        for name in ("architecture", "augment", "record"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"`{name}` must be a dictionary, got {format_value(getattr(self, name))}.")
        _check_augment(self.augment, self.size)
        if not is_table_of(is_table)(self.settings):
            raise ValueError(f"`settings` must have a dictionary by method, got {format_value(self.settings)}.")
        for name in self.settings:
            _check_text("settings", name)
        object.__setattr__(self, "settings", _make_plain("settings", self.settings))
        for settings in self.settings.values():
            _check_settings(settings, self.size)

    def require_size(self) -> int:
        """Return the side of the images, to which pictures are resized.

        Raises:
            ValueError: It is unknown.
        """
        if self.size is None:
            raise ValueError(
                "The network's image size is unknown: set it with net.describe(size=…), or with -m FILE.py:FUNCTION "
                "let FUNCTION return tt.wrap(model, size=…, mean=…, std=…) or tt.split(…)."
            )
        return self.size


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of a network on images like those it was trained on, made by `testtime.collect`.

    The tensors are float32 on the CPU, wherever the network is; move them where they are used.

    Attributes:
        fisher: Parameter name → diagonal of the empirical Fisher information, of the parameter's shape.
        means: Name of a normalisation layer → mean of its output per channel `(C,)`, before any fused ReLU; "features"
            → mean of the input `(D,)` of the classifier's last linear layer.
        variances: The variances of the same, over images and positions.
        about: The record: `images`, `set`, `hash`, `seed`, `energy`, `task`, `task_loss`, `unseen`; plain JSON.

    Raises:
        ValueError: A value is of the wrong type or shape, not finite, or negative where it cannot be.
    """

    fisher: dict[str, Tensor]
    means: dict[str, Tensor]
    variances: dict[str, Tensor]
    about: dict[str, Any]

    def __post_init__(self) -> None:
        for group in ("fisher", "means", "variances"):
            tensors = {name: _make_float(f"{group}/{name}", tensor) for name, tensor in getattr(self, group).items()}
            object.__setattr__(self, group, tensors)
            if group != "means" and any((tensor < 0).any() for tensor in tensors.values()):
                raise ValueError(f"`{group}` must not be negative.")
        shapes = [{name: tensor.shape for name, tensor in group.items()} for group in (self.means, self.variances)]
        if shapes[0] != shapes[1] or any(len(shape) != 1 for shape in shapes[0].values()):
            raise ValueError("`means` and `variances` must have a number per channel of the same layers.")
        if not is_table(self.about):
            raise ValueError(f"`about` must be a dictionary, got {format_value(self.about)}.")
        object.__setattr__(self, "about", _make_plain("about", self.about))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a file; the Fisher information in bfloat16."""
        groups = {"fisher": self.fisher, "means": self.means, "variances": self.variances}
        return {
            f"{STATISTICS}/{group}/{name}": tensor.to(torch.bfloat16) if group == "fisher" else tensor
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], about: Any) -> Statistics:
        """Make statistics from the tensors and the record of a file.

        Raises:
            ValueError: A tensor has an unknown name, or as for the class.
        """
        groups: dict[str, dict[str, Tensor]] = {"fisher": {}, "means": {}, "variances": {}}
        for path, tensor in tensors.items():
            _, group, name = [*path.split("/", 2), "", ""][:3]
            if group not in groups or not name:
                raise ValueError(f"tensor {format_value(path)} does not belong to this network")
            groups[group][name] = tensor
        return cls(**groups, about=about)


def _make_float(name: str, tensor: Any) -> Tensor:
    """Return a tensor as float32 on the CPU."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"`{STATISTICS}` must be floating-point tensors, got {kind} for {format_value(name)}.")
    tensor = tensor.detach().to("cpu", torch.float32)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"`{STATISTICS}` must be finite, {format_value(name)} is not.")
    return tensor


def _make_plain(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a dictionary that is plain JSON and not too long."""
    try:
        check_plain(table)
        text = json.dumps(table, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be plain JSON, got {format_value(table)}.") from None
    if len(text) > _LONGEST_TABLE:
        raise ValueError(f"`{name}` must be at most {_LONGEST_TABLE:,} characters of JSON, got {len(text):,}.")
    return json.loads(text)


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


def _check_augment(augment: Mapping[str, Any], size: int | None) -> None:
    """Check that an augmentation of this package can be built; custom ones are only checked for range.

    Views can be up to four times larger than the images, whose side is `size`.
    """
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
    most = _LARGEST_VIEW if size is None else 4 * size
    for key in ("padding", "size"):
        if is_integer(augment.get(key), most + 1):
            raise ValueError(f"`augment` must have a `{key}` of at most {most:,}, got {augment[key]}.")


def _check_settings(settings: Mapping[str, Any], size: int | None) -> None:
    """Check what makes a step expensive in the recommended settings of a method."""
    for name, most in _MOST.items():
        if name in settings and not is_integer(settings[name], 0, most):
            value = format_value(settings[name])
            raise ValueError(f"`settings` must have `{name}` as an integer from 0 to {most:,}, got {value}.")
    constants = settings.get("constants", {})
    if not is_table_of(is_number)(constants) or any(abs(value) > _LARGEST_CONSTANT for value in constants.values()):
        raise ValueError(
            f"`settings` must have `constants` of at most {_LARGEST_CONSTANT:,}, got {format_value(constants)}."
        )
    if is_table(settings.get("augment")):
        _check_augment(settings["augment"], size)


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
        if tensor.dtype != own.dtype and not (tensor.dtype in FLOATS and own.dtype in FLOATS):
            raise ValueError(f"tensor {format_value(name)} has dtype {tensor.dtype}, the network needs {own.dtype}")
        if not torch.isfinite(tensor.to(own.dtype)).all():
            raise ValueError(f"tensor {format_value(name)} has values that are not finite")
