"""Test sets that are resized as they are read.

ImageNet-C's corruptions are defined in pixels of 224×224 images. For a network of another input size, a corrupted set
is therefore generated at 224 and resized afterwards, as the published images would be.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.data.sets import DerivedSet, TestSet


class Resized(DerivedSet):
    """Another test set, resized to a square by bilinear interpolation with antialiasing.

    Args:
        base: The set to resize.
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
