"""Handwritten digits bundled with the package: real images without a download.

1,797 gray images of 8×8 pixels, ten classes: the test part of "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998 (https://doi.org/10.24432/C50P49), under the Creative
Commons Attribution 4.0 licence. Each pixel counts the ink in a 4×4 block of a scanned bitmap, 0 to 16. The file
`digits.npz` contains those counts unchanged; `digits.txt` repeats this notice.

It is not one of the paper's data sets, but replaces CIFAR-10 where an example or a test must run in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from testtime.data.family import Family, Root, collect_faults
from testtime.data.sets import TensorSet
from testtime.progress import Progress
from testtime.randomness import Draws

CLASSES = tuple("0123456789")
SIZES: dict[Literal["train", "test"], int] = {"train": 1_297, "test": 500}
_TEST_PER_CLASS = 50
_SPLIT_SEED = 1998


def load(split: Literal["train", "test"] = "test", size: int = 16) -> TensorSet:
    """Open the digits as a set of `(1, size, size)` images, white ink on black.

    The split is fixed: of each class, the 50 samples with the smallest hash are the test set (500), the others the
    training set (1,297). Images are enlarged bilinearly: nearest-neighbour enlargement would produce block edges, on
    which blurs and pixelation would mostly act.

    Args:
        split: `train` or `test`.
        size: Height and width in pixels, at least 8.

    Returns:
        A set of 1,297 or 500 images, uint8.
    """
    if split not in ("train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
    if size < 8:
        raise ValueError(f"`size` must be at least 8, got {size}.")
    with files("testtime.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as held:
        counts, labels = torch.from_numpy(held["images"]), torch.from_numpy(held["labels"]).to(torch.int64)
    is_test = _is_test(labels)
    chosen = is_test if split == "test" else ~is_test
    # 255/16 and the weights of a doubling are exact in binary: in float64 the result is the same on every machine.
    ink = counts[chosen].unsqueeze(1).to(torch.float64) * (255 / 16)  # (N, 1, 8, 8)
    if size != 8:
        ink = functional.interpolate(ink, (size, size), mode="bilinear", align_corners=False)
    return TensorSet("digits", ink.round().clamp(0, 255).to(torch.uint8), labels[chosen], CLASSES)


def _is_test(labels: Tensor) -> Tensor:
    """Return a mask of the test split, bool `(N,)`, with the same number of samples per class."""
    keys = Draws.of(_SPLIT_SEED, torch.arange(len(labels), device="cpu")).purpose("digits split").keys
    is_test = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for label in range(len(CLASSES)):
        members = (labels == label).nonzero().squeeze(1)
        is_test[members[keys[members].argsort()[:_TEST_PER_CLASS]]] = True
    return is_test


def check(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check the bundled file."""

    def find_faults(split: Literal["train", "test"]) -> list[str]:
        count = len(load(split))
        return [] if count == SIZES[split] else [f"digits.npz: {split} has {count} digits, not {SIZES[split]}"]

    return collect_faults(SIZES, find_faults, progress)


DIGITS = Family(
    "digits",
    "1,797 handwritten digits, 16×16 gray, 10 classes",
    lambda part, root, split, **options: load(split, **options),
    check,
    sized=True,
    has_train=True,
)
