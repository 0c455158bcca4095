"""A test set under a corruption, made as it is read.

Each image is corrupted by `testtime.corruptions` with randomness that depends on the seed and on its number in the set:
read in any order, in any chunk, in any process, it is the same image.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from testtime.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from testtime.data.family import Family, Root
from testtime.data.frost import read_frost
from testtime.data.sets import DerivedSet, TestSet
from testtime.storage import PathLike

Origin = Literal["auto", "official", "generated"]
"""Which images of a corrupted set to take: the published ones, generated ones, or the published where they are."""

PARTS = tuple(f"{corruption}/{level}" for corruption in CORRUPTIONS for level in SEVERITIES)
"""The parts of a corrupted set, in the order of every published table."""


class Corrupted(DerivedSet):
    """Another test set, corrupted.

    Args:
        base: The set to corrupt.
        corruption: A corruption's name, such as `fog`.
        level: Its severity, 1 to 5.
        name: What it is called; None is `BASE-c/CORRUPTION/LEVEL`.
        seed: Seed of the corruption's randomness.
        scale: Whose parameters: `cifar`, `imagenet`, or `auto` by the size of the images.
        frost: Folder of frost photographs for `frost`; None takes procedural textures.
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
        frost: PathLike | None = None,
        device: str = "cpu",
    ) -> None:
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
        return corrupt(
            self.base.images(numbers).to(self.device),
            self.corruption,
            self.level,
            seed=self.seed,
            samples=numbers,
            scale=self.scale,
            frost=read_frost(self.frost) if self.corruption == "frost" else None,
        ).cpu()


def split_part(family: str, part: str) -> tuple[str, int]:
    """The corruption and the level of a part such as `fog/5`.

    Raises:
        ValueError: It is something else.
    """
    corruption, _, level = part.partition("/")
    name = f"{family}/{part}" if part else family
    if not level or "/" in level:
        raise ValueError(f"{family} needs CORRUPTION/LEVEL, such as {family}/fog/5; got {name!r}.")
    if not level.isdecimal():
        raise ValueError(f"{name}: the level must be 1 to 5, got {level!r}.")
    return corruption, int(level)


def check_choice(corruption: str, level: int, source: str) -> None:
    """Raise `ValueError` for what no corrupted set on disk can have; corruptions beyond the fifteen can be there."""
    if level not in SEVERITIES:
        raise ValueError(f"`level` must be 1 to 5, got {level!r}.")
    if source not in get_args(Origin):
        raise ValueError(f"`source` must be 'auto', 'official' or 'generated', got {source!r}.")
    if not corruption.isidentifier():
        raise ValueError(f"`corruption` must be a name such as 'fog', got {corruption!r}.")


def make_corrupted(base: Family, what: str) -> Family:
    """The corruptions of another family's test set, all of them generated.

    Args:
        base: The family.
        what: What its test set is called in a sentence.
    """
    name = f"{base.name}-c"

    def open(part: str, root: Root, split: str, **options: Any) -> TestSet:
        corruption, level = split_part(name, part)
        own = {key: options.pop(key) for key in ("seed", "scale", "frost") if key in options}
        return Corrupted(base.open("", root, "test", **options), corruption, level, f"{name}/{part}", **own)

    line = f"{what} under the 15 corruptions, 5 levels"
    return Family(name, line, open, parts=PARTS, base=base, sized=base.sized, pictures=base.pictures)
