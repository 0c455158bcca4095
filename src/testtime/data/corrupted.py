"""Test sets that are corrupted as they are read.

Each image is corrupted by `testtime.corruptions` with randomness that depends on the seed and its sample index: it is
the same in any order, in any chunk, in any process.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from testtime.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, corrupt
from testtime.data.family import Family, Root
from testtime.data.frost import read_frost
from testtime.data.sets import DerivedSet, TestSet
from testtime.storage import PathLike

Origin = Literal["auto", "official", "generated"]
"""The source of a corrupted set: published files, generated images, or ("auto") the files if they exist."""

PARTS = tuple(f"{corruption}/{level}" for corruption in CORRUPTIONS for level in SEVERITIES)
"""The parts of a corrupted set, in the order of the published tables; those of `EXTRA` open too but are not listed."""


class Corrupted(DerivedSet):
    """Another test set, corrupted.

    Args:
        base: The set to corrupt.
        corruption: Name of the corruption, for example `fog`.
        level: Severity, 1 to 5.
        name: Name of the set; None: `BASE-c/CORRUPTION/LEVEL`.
        seed: Seed of the corruption.
        scale: Parameters of `cifar` or `imagenet`, or `auto` by the size of the images.
        frost: Folder of frost photographs for `frost`; None: procedural textures.
        device: Device to compute on; the images are returned on the CPU.
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
        known = (*CORRUPTIONS, *EXTRA)
        if corruption not in known:
            raise ValueError(f"`corruption` must be one of {', '.join(known)}; got {corruption!r}.")
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


def split_part(family: str, part: str, example: str = "fog/5") -> tuple[str, int]:
    """Parse a part like `fog/5` into corruption and level; the message for a malformed one shows `example`.

    Raises:
        ValueError: It is malformed.
    """
    corruption, _, level = part.partition("/")
    name = f"{family}/{part}" if part else family
    if not level or "/" in level:
        raise ValueError(f"{family} needs CORRUPTION/LEVEL, such as {family}/{example}; got {name!r}.")
    if not level.isdecimal():
        raise ValueError(f"{name}: the level must be 1 to 5, got {level!r}.")
    return corruption, int(level)


def check_choice(corruption: str, level: int, source: str) -> None:
    """Raise a `ValueError` for invalid arguments; on disk, there may be more than the fifteen corruptions."""
    if level not in SEVERITIES:
        raise ValueError(f"`level` must be 1 to 5, got {level!r}.")
    if source not in get_args(Origin):
        raise ValueError(f"`source` must be 'auto', 'official' or 'generated', got {source!r}.")
    if not corruption.isidentifier():
        raise ValueError(f"`corruption` must be a name like 'fog', got {corruption!r}.")


def make_corrupted(base: Family, what: str) -> Family:
    """Make a family of generated corruptions of another family's test set.

    Args:
        base: The other family.
        what: The name of its test set, for the description.
    """
    name = f"{base.name}-c"

    def open(part: str, root: Root, split: str, **options: Any) -> TestSet:
        corruption, level = split_part(name, part)
        own = {key: options.pop(key) for key in ("seed", "scale", "frost") if key in options}
        return Corrupted(base.open("", root, "test", **options), corruption, level, f"{name}/{part}", **own)

    line = f"{what} under the 15 corruptions, 5 levels"
    return Family(name, line, open, parts=PARTS, base=base, sized=base.sized, pictures=base.pictures)
