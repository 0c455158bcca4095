"""Small pictures of the last images of a stream, for the live page; in memory only, and only if asked for."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor
from torch.nn import functional

LAST = 12
"""Pictures of a stream."""

_SIDE = 48  # pixels at most


@dataclass(frozen=True)
class Thumbnail:
    """An image of a stream and its answer.

    Attributes:
        seen: Number of the image in its stream.
        pixels: uint8 `(C, H, W)`.
        answer: Class, name and probability, the same before adaptation, and whether the update was undone.
    """

    seen: int
    pixels: Tensor
    answer: Mapping[str, Any]


def make_thumbnail(seen: int, image: Tensor, answer: Mapping[str, Any]) -> Thumbnail:
    """Return the thumbnail of an image.

    Args:
        seen: Number of the image in its stream.
        image: Float in [0, 1], `(C, H, W)`.
        answer: See answers.py.
    """
    names = ("class", "name", "probability")
    about = {name: answer[name] for name in (*names, "rolled_back")}
    about["before"] = {name: answer["before"][name] for name in names}
    height, width = image.shape[-2:]
    scale = min(1.0, _SIDE / max(height, width))
    if scale < 1:
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
        image = functional.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
    return Thumbnail(seen, (image * 255).round().clamp(0, 255).byte().cpu(), about)


def describe_thumbnails(thumbnails: Iterable[Thumbnail]) -> list[dict[str, Any]]:
    """Return thumbnails as JSON, the pictures as PNG in base 64."""
    return [{"seen": one.seen, **one.answer, "png": _encode(one.pixels)} for one in thumbnails]


def _encode(pixels: Tensor) -> str:
    array = pixels.permute(1, 2, 0).contiguous().numpy()  # (H, W, C)
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")
