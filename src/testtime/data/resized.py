"""A test set at another size, scaled as it is read.

ImageNet-C's corruptions are defined for photographs of 224×224: their blurs and their grain are so many pixels wide.
For a network made for smaller images a corrupted set is therefore made at 224 and scaled down afterwards, as the
published pictures would be.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.data.sets import DerivedSet, TestSet


class Resized(DerivedSet):
    """Another test set, scaled to a square by antialiased bilinear interpolation, as image libraries do it.

    Args:
        base: The set to scale.
        size: Height and width of the images.
    """

    def __init__(self, base: TestSet, size: int) -> None:
        if size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}.")
        self.base, self.size, self.name = base, size, base.name
        self.classes, self.labels, self.right, self.ordered = base.classes, base.labels, base.right, base.ordered
        self.origin = f"{base.origin}, scaled to {size}"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.base.shape[0], self.size, self.size

    def _read(self, numbers: Tensor) -> Tensor:
        pixels = self.base.images(numbers).float()
        scaled = F.interpolate(pixels, size=(self.size, self.size), mode="bilinear", antialias=True)
        return scaled.round_().clamp_(0, 255).to(torch.uint8)
