"""Training images that are held out, for choosing settings without the test sets.

The last images of a fixed random order of a training set are held out: a smaller number is contained in a larger one,
whatever the seed of the training. Settings are chosen on them and on their four `EXTRA` corruptions, never on the
corruptions of the test sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from testtime.checks import is_integer
from testtime.corruptions import EXTRA, SEVERITIES
from testtime.data.corrupted import make_corrupted, split_part
from testtime.data.family import Family, Root
from testtime.data.sets import DerivedSet, TestSet
from testtime.randomness import Draws

COUNTS = {"digits": 300, "cifar10": 5_000, "cifar100": 5_000}
"""Data set → the number of images in its held-out set."""

_SUFFIX = "-held-out"


class Part(DerivedSet):
    """Some samples of another set, in its order.

    Args:
        base: The other set.
        chosen: Their indices there, int64 `(n,)`.
        name: Name of the set.
        origin: How they were chosen.
    """

    def __init__(self, base: TestSet, chosen: Tensor, name: str, origin: str) -> None:
        self.base, self.name, self.origin = base, name, origin
        self.chosen = chosen.sort().values
        self.classes, self.ordered = base.classes, base.ordered
        self.labels = None if base.labels is None else base.labels[self.chosen]
        self.right = None if base.right is None else base.right[self.chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def _read(self, numbers: Tensor) -> Tensor:
        return self.base.images(self.chosen[numbers])


def hold_out_images(source: TestSet, count: int) -> tuple[TestSet, TestSet]:
    """Split a training set into the images to train on and those that are held out.

    Args:
        source: The training set.
        count: Number of images to hold out.

    Returns:
        The images to train on, and the held-out ones, which are also `held_out` of the former.

    Raises:
        ValueError: The count is not between 1 and the size of the set.
    """
    if not 1 <= count < len(source):
        raise ValueError(f"`hold_out` must be 1 to {len(source) - 1:,} for {source.name}, got {count:,}.")
    order = Draws.of(0, torch.arange(len(source), device="cpu")).purpose("hold-out").keys.argsort(stable=True)
    rest, last = order[:-count], order[-count:]
    origin = f"training images of {source.name}, {count} held out (seed 0)"
    training = Part(source, rest, f"{source.name}[:-{count}]", origin)
    training.held_out = Part(source, last, f"{source.name}{_SUFFIX}", origin)
    return training, training.held_out


def find_source(name: str) -> str | None:
    """Return the data set that a set was held out from, e.g. `cifar10` for `cifar10-held-out-c/spatter/5`, or None."""
    family = name.split("/", 1)[0].removesuffix("-c")
    source = family.removesuffix(_SUFFIX)
    return source if source != family and source in COUNTS else None


def find_training_data(record: Mapping[str, Any]) -> str | None:
    """Return the name of the data set in a network's training record, or None."""
    name = _read(record, "data").get("name")
    return name.split("[", 1)[0] if isinstance(name, str) else None


def was_seen(record: Mapping[str, Any], source: str, count: int) -> bool:
    """Whether a network was trained on some of the images held out from a data set.

    Args:
        record: The network's training record; without one, nothing is known and the answer is no.
        source: The data set, for example `cifar10`.
        count: The number of held-out images.
    """
    target = _read(record, "target").get("name")
    if isinstance(target, str) and find_source(target) == source:
        return True
    records = [record, record.get("branch")]  # of the network, and of its branch if that was trained apart
    return any(
        find_training_data(one) == source and not is_integer(_read(one, "data").get("held_out"), count)
        for one in records
        if isinstance(one, Mapping)
    )


def _read(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the description of a set in a record, which may come from any file."""
    configuration = record.get("configuration")
    found = configuration.get(key) if isinstance(configuration, dict) else None
    return found if isinstance(found, dict) else {}


def make_held_out(base: Family, what: str) -> tuple[Family, Family]:
    """Make the families of a data set's held-out images, and of their corruptions.

    Args:
        base: The family with the training split.
        what: The name of its training set, for the descriptions.
    """
    count = COUNTS[base.name]

    def open_plain(part: str, root: Root, split: str, **options: Any) -> TestSet:
        return hold_out_images(base.open("", root, "train", **options), count)[1]

    line = f"{count:,} images of {what}, for choosing settings"
    plain = Family(f"{base.name}{_SUFFIX}", line, open_plain, base=base, sized=base.sized)
    corrupted = make_corrupted(plain, "")

    def open_corrupted(part: str, root: Root, split: str, **options: Any) -> TestSet:
        corruption, _ = split_part(corrupted.name, part, f"{EXTRA[0]}/5")
        if corruption not in EXTRA:
            raise ValueError(
                f"{corrupted.name} has only {', '.join(EXTRA)}, got {corruption!r}: settings must not be chosen on a "
                "corruption of the test sets."
            )
        return corrupted.open(part, root, split, **options)

    parts = tuple(f"{corruption}/{level}" for corruption in EXTRA for level in SEVERITIES)
    return plain, replace(
        corrupted, what=f"{plain.name} under 4 other corruptions, 5 levels", open=open_corrupted, parts=parts
    )
