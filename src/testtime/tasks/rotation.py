"""Rotation (Gidaris et al. 2018), the paper's task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from testtime import kernels
from testtime.randomness import Draws
from testtime.tasks.base import ClassTask


@dataclass(frozen=True)
class Rotation(ClassTask):
    """Predict by which multiple of 90° an image was rotated.

    Rotations are exact, without interpolation or filling. An image that is not square is first cropped to its central
    square, so that all rotations have the same shape.

    Attributes:
        each: "random": one random rotation per image; "all": all four rotations.
    """

    each: Literal["random", "all"] = "random"

    def __post_init__(self) -> None:
        if self.each not in get_args(Literal["random", "all"]):
            raise ValueError(f'`each` must be "random" or "all", got {self.each!r}.')

    @property
    def name(self) -> str:
        return "rotation"

    @property
    def outputs(self) -> int:
        return 4

    def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        if self.each == "all":
            return self.probe(images)
        targets = draws.purpose("rotation").integers(4)
        images = _central_square(images)
        # Rotate all and select, rather than index: shapes must not depend on the draws.
        half = torch.where((targets >= 2)[:, None, None, None], images.rot90(2, (-2, -1)), images)
        return torch.where((targets % 2 == 1)[:, None, None, None], half.rot90(1, (-2, -1)), half), targets

    def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rotated = kernels.take_over("rotate", images)
        if rotated is not None:
            return rotated
        images = _central_square(images)
        views = torch.stack([images.rot90(k, (-2, -1)) for k in range(4)], dim=1).flatten(0, 1)
        return views, torch.arange(4, device=images.device).repeat(len(images))


def _central_square(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]
