"""The preprocessing that a model was trained with, as timm, torchvision and transformers describe it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

_RESIZED_CROPS_FROM = 96
"""Side from which views are random resized crops; networks for smaller images train with moves by a few pixels."""
_SMALLEST_CROP = 0.25
"""Least area of such a crop: half of each side, so that the object is still in view and its orientation visible."""
_PIL_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before a model; None where it is not known.

    Attributes:
        mean: Mean of each channel, on pixels in [0, 1].
        std: Standard deviation of each channel, on pixels in [0, 1].
        size: Side of the model's images.
        resize: Length that the short side is resized to before the central square of `size` is taken.
        interpolation: How it is resized, e.g. "bicubic".
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: int | None = None
    resize: int | None = None
    interpolation: str | None = None

    def at(self, size: int) -> Preprocessing:
        """Return the same for images of a size."""
        return self if size == self.size else replace(self, size=size, resize=None)

    def describe(self) -> dict[str, Any]:
        """Return how images are resized, as far as it is known, JSON-serializable."""
        known = {"resize": self.resize, "interpolation": self.interpolation}
        return {name: value for name, value in known.items() if value is not None}


def read_preprocessing(model: nn.Module, given: object = None) -> Preprocessing:
    """Read the preprocessing of a model.

    Args:
        model: A model of timm or transformers, which has a configuration, or any other.
        given: What the user has instead: torchvision's `weights.transforms()`, timm's data configuration, an image
            processor of transformers, or a composition of transforms.

    Raises:
        ValueError: `given` is none of these.
    """
    if given is None:
        found = _read_configuration(getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {})
        size = _find_own_size(model)
        return found if size is None else found.at(size)
    if isinstance(given, Mapping):
        found = _read_configuration(given)
    elif hasattr(given, "image_mean"):
        found = _read_processor(given)
    elif hasattr(given, "crop_size"):
        found = _read_transforms([given])
    else:
        found = _read_transforms(getattr(given, "transforms", None) or [given])
    if found == Preprocessing():
        raise ValueError(
            "`preprocessing` must be torchvision's weights.transforms(), timm's data configuration, an image processor "
            f"of transformers or a composition of transforms, got {type(given).__name__}."
        )
    return found


def choose_augment(size: int) -> dict[str, Any]:
    """Return the name and arguments of an augmentation that suits images of a size."""
    if size >= _RESIZED_CROPS_FROM:
        return {"name": "resized-crop-flip", "size": size, "scale": [_SMALLEST_CROP, 1.0]}
    return {"name": "crop-flip", "padding": max(1, size // 8)}


def _read_configuration(cfg: Any) -> Preprocessing:
    """Read the configuration of a timm model."""
    get = cfg.get if isinstance(cfg, Mapping) else lambda name: getattr(cfg, name, None)
    size, crop = _read_size(get("input_size")), get("crop_pct")
    resize = math.floor(size / crop) if size and isinstance(crop, int | float) and crop > 0 else None
    return Preprocessing(_read_numbers(get("mean")), _read_numbers(get("std")), size, resize, get("interpolation"))


def _find_own_size(model: nn.Module) -> int | None:
    """Return the size that a model was built for, which may differ from that of its pretrained weights."""
    sizes = (getattr(getattr(model, "config", None), "image_size", None), getattr(model, "image_size", None))
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return next((size for size in map(_read_size, (patches, *sizes)) if size), None)


def _read_processor(processor: Any) -> Preprocessing:
    """Read an image processor of transformers."""
    resized, cropped = (getattr(processor, name, None) for name in ("size", "crop_size"))
    crops = getattr(processor, "do_center_crop", False) and cropped
    size, resize = _read_size(cropped if crops else resized), _read_size(resized) if crops else None
    scale = 255 * getattr(processor, "rescale_factor", 1 / 255) if getattr(processor, "do_rescale", True) else 255.0
    mean, std = (0.0,), (1.0,)
    if getattr(processor, "do_normalize", True):
        mean, std = (_read_numbers(getattr(processor, f"image_{name}")) or (0.0,) for name in ("mean", "std"))
    # (scale · pixel - mean) / std
    mean, std = tuple(value / scale for value in mean), tuple(value / scale for value in std)
    return Preprocessing(mean, std, size, resize, _read_filter(getattr(processor, "resample", None)))


def _read_transforms(transforms: Sequence[Any]) -> Preprocessing:
    """Read torchvision's transforms: one that does everything, or `Resize`, `CenterCrop` and `Normalize`."""
    found = Preprocessing()
    for one in transforms:
        kind = type(one).__name__
        if hasattr(one, "mean") and hasattr(one, "std"):
            found = replace(found, mean=_read_numbers(one.mean), std=_read_numbers(one.std))
        if hasattr(one, "crop_size"):
            size, resize = _read_size(one.crop_size), _read_size(getattr(one, "resize_size", None))
            found = replace(found, size=size, resize=resize)
        elif kind == "Resize":
            found = replace(found, size=found.size or _read_size(one.size), resize=_read_size(one.size))
        elif kind == "CenterCrop":
            found = replace(found, size=_read_size(one.size))
        if hasattr(one, "interpolation"):
            found = replace(found, interpolation=_read_filter(one.interpolation))
    return found


def _read_size(value: Any) -> int | None:
    """Return a side: from a number, a list that ends with it, or a dictionary of transformers."""
    if isinstance(value, Mapping) or hasattr(value, "shortest_edge"):
        get = value.get if isinstance(value, Mapping) else lambda name: getattr(value, name, None)
        value = get("height") or get("shortest_edge")
    while isinstance(value, list | tuple) and value:
        value = value[-1]
    return value if isinstance(value, int) and value > 0 else None


def _read_numbers(value: Any) -> tuple[float, ...] | None:
    value = value.tolist() if hasattr(value, "tolist") else value  # of a tensor or an array
    if isinstance(value, int | float):
        return (float(value),)
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) and value else None


def _read_filter(value: Any) -> str | None:
    if isinstance(value, int):  # of Pillow
        return _PIL_FILTERS[value] if 0 <= value < len(_PIL_FILTERS) else None
    value = getattr(value, "value", value)
    return value if isinstance(value, str) else None
