"""Gradually changing shift: noise that increases along the test set (paper, the section of that name).

The set is shuffled once; the standard deviation of the noise increases linearly from that of level 1 at the first image
to that of level 5 at the last. For Gaussian noise, that is its parameter. The standard deviation of shot noise with c
photons is proportional to 1/√c, that of impulse noise that replaces a fraction p of the values to √p, so 1/√c and √p
are interpolated linearly.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from testtime.corruptions import NoiseName, corrupt_noise, resolve_scale, severity_level
from testtime.data.family import Family, Root
from testtime.data.sets import DerivedSet, TestSet
from testtime.randomness import Draws

NOISES: tuple[str, ...] = get_args(NoiseName)


class Gradual(DerivedSet):
    """Another test set as a stream under increasing noise; sample t is the t-th image of the stream.

    Args:
        base: The set to corrupt.
        noise: One of the three noises.
        name: Name of the set; None: `BASE-gradual/NOISE`.
        seed: Seed of the shuffle and of the noise.
        scale: Levels of `cifar` or `imagenet`, or `auto` by the size of the images.
    """

    ordered = True

    def __init__(
        self,
        base: TestSet,
        noise: str,
        name: str | None = None,
        seed: int = 0,
        scale: Literal["auto", "cifar", "imagenet"] = "auto",
    ) -> None:
        if noise not in NOISES:
            raise ValueError(f"`noise` must be one of {', '.join(NOISES)}; got {noise!r}.")
        self.base = base
        self.noise: NoiseName = cast(NoiseName, noise)
        self.seed = seed
        self.scale: Literal["cifar", "imagenet"] = resolve_scale(scale, *base.shape[1:])
        self.name = name if name is not None else f"{base.name}-gradual/{noise}"
        # A stable sort of hashes: the same order on every machine.
        keys = Draws.of(seed, torch.arange(len(base), device="cpu")).purpose("gradual order").keys
        self.order = keys.argsort(stable=True)
        self.classes = base.classes
        self.labels = None if base.labels is None else base.labels[self.order]
        self.right = None if base.right is None else base.right[self.order]
        self.origin = f"generated from {base.name} (seed {seed}, scale {self.scale})"

    def strengths(self, numbers: Tensor) -> Tensor:
        """Return the parameter of the noise at some positions of the stream.

        Args:
            numbers: Positions, int64 `(n,)`.

        Returns:
            float32 `(n,)`: standard deviation, photons at full white, or fraction of values replaced.
        """
        first, last = (float(severity_level(self.noise, level, self.scale)) for level in (1, 5))
        share = numbers.to(torch.float64) / max(len(self) - 1, 1)
        if self.noise == "gaussian_noise":
            strengths = torch.lerp(*_ends(first, last), share)
        elif self.noise == "shot_noise":
            strengths = torch.lerp(*_ends(1 / math.sqrt(first), 1 / math.sqrt(last)), share) ** -2
        else:
            strengths = torch.lerp(*_ends(math.sqrt(first), math.sqrt(last)), share) ** 2
        return strengths.to(torch.float32)

    def _read(self, numbers: Tensor) -> Tensor:
        draws = Draws.of(self.seed, numbers).purpose(f"gradual {self.noise}")
        return corrupt_noise(self.base.images(self.order[numbers]), self.noise, self.strengths(numbers), draws)


def _ends(first: float, last: float) -> tuple[Tensor, Tensor]:
    first_end, last_end = torch.tensor([first, last], dtype=torch.float64, device="cpu").unbind()
    return first_end, last_end


def make_gradual(base: Family, what: str) -> Family:
    """Make a family of another family's test set under increasing noise.

    Args:
        base: The other family.
        what: The name of its test set, for the description.
    """
    name = f"{base.name}-gradual"

    def open(part: str, root: Root, split: str, **options: Any) -> TestSet:
        if not part or "/" in part:
            got = f"{name}/{part}" if part else name
            raise ValueError(f"{name} needs NOISE, such as {name}/gaussian_noise; got {got!r}.")
        own = {key: options.pop(key) for key in ("seed", "scale") if key in options}
        return Gradual(base.open("", root, "test", **options), part, f"{name}/{part}", **own)

    line = f"{what} under increasing noise, 3 noises"
    return Family(name, line, open, parts=NOISES, base=base, sized=base.sized, pictures=base.pictures)
