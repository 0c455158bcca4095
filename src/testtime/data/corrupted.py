"""A test set under a corruption, made as it is read.

Each image is corrupted by `testtime.corruptions` with randomness that hangs on the seed and on its number in the set:
read in any order, in any chunk, in any process, it is the same image.
"""

from __future__ import annotations

import os
from typing import Literal

from torch import Tensor

from testtime.data.sets import DerivedSet, TestSet


class Corrupted(DerivedSet):
    """Another test set, corrupted.

    Args:
        base: The set to corrupt.
        corruption: A corruption's name, such as `fog`.
        level: Its severity, 1 to 5.
        name: What it is called; None is `BASE-c/CORRUPTION/LEVEL`.
        seed: Seed of the corruption's randomness.
        scale: Whose parameters: `cifar`, `imagenet`, or `auto` by the size of the images.
        frost: Folder of frost photographs for `frost`; None makes textures by code.
        device: Where to compute; the images come back to the CPU.
    """

    def __init__(
        self,
        base: TestSet,
        corruption: str,
        level: int,
        name: str | None = None,
        seed: int = 0,
        scale: Literal["auto", "cifar", "imagenet"] = "auto",
        frost: str | os.PathLike[str] | None = None,
        device: str = "cpu",
    ) -> None:
        from testtime.corruptions import CORRUPTIONS

        if corruption not in CORRUPTIONS:
            raise ValueError(f"`corruption` must be one of {', '.join(CORRUPTIONS)}; got {corruption!r}.")
        if level not in range(1, 6):
            raise ValueError(f"`level` must be 1 to 5, got {level!r}.")
        self.base = base
        self.corruption = corruption
        self.level = level
        self.seed = seed
        self.scale: Literal["auto", "cifar", "imagenet"] = scale
        self.frost = frost
        self.device = device
        self.name = name if name is not None else f"{base.name}-c/{corruption}/{level}"
        self.classes, self.labels, self.right, self.ordered = base.classes, base.labels, base.right, base.ordered
        photographs = ", frost photographs" if corruption == "frost" and frost is not None else ""
        self.origin = f"generated from {base.name} (seed {seed}, scale {scale}{photographs})"

    def _read(self, numbers: Tensor) -> Tensor:
        from testtime.corruptions import corrupt

        return corrupt(
            self.base.images(numbers).to(self.device),
            self.corruption,
            self.level,
            seed=self.seed,
            samples=numbers,
            scale=self.scale,
            frost=self.frost,
        ).cpu()
