"""What a test set is: numbered uint8 images, their labels, and nothing about any network.

The whole of testtime reads test sets through `TestSet`. A sample is known by its number in the set, whatever the order
in which samples are visited: the randomness of `testtime.randomness` depends on the number, so a shuffled,
sharded or resumed pass sees the same corruptions and augmentations. Images stay uint8; scaling and normalising belong
to the network that was trained with them.

    for numbers, images, labels in test_set.chunks(256):
        predictions = test_set.scores(net(images)).argmax(1)
        right += test_set.is_correct(predictions, numbers).sum()
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from testtime.storage import FileError

OnBad = Literal["fail", "skip"]
"""What to do about a picture that cannot be read: stop and name it, or leave it out and list it in `skipped`."""


class DataError(FileError):
    """A file or folder of a data set that cannot be used."""


@contextlib.contextmanager
def as_data_errors() -> Iterator[None]:
    """Let what `testtime.storage` finds wrong with a file leave as a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except FileError as error:
        raise DataError(error.path, error.fault, error.remedy) from None


class Chunk(NamedTuple):
    """A few samples of a set.

    Attributes:
        numbers: int64 `(n,)`, the samples' numbers in the set.
        images: uint8 `(n, C, H, W)`.
        labels: int64 `(n,)`, or None where the set has none.
    """

    numbers: Tensor
    images: Tensor
    labels: Tensor | None


class TestSet(ABC):
    """Numbered images with or without labels, read by the chunk.

    Attributes:
        name: What it is called in runs and reports, such as `cifar10-c/fog/5`.
        classes: The names of the classes; label `k` is `classes[k]`.
        labels: int64 `(N,)`, or None for unlabelled images.
        right: bool `(N, K)` where a sample may have several right labels, else None. `labels` then holds the first.
        ordered: True where the order of the samples is what is tested (`cifar10-gradual`): not to be shuffled.
        origin: Where the images come from, for the record: files, or a generator and its seed.
    """

    __test__ = False  # the name begins like a test case's; test collectors read this

    name: str
    classes: tuple[str, ...]
    labels: Tensor | None
    right: Tensor | None = None
    ordered: bool = False
    origin: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was left out because it cannot be read: a line for each file, with its name and its fault."""
        return ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """The shape `(C, H, W)` of every image."""

    @abstractmethod
    def _read(self, numbers: Tensor) -> Tensor:
        """The images of valid sample numbers: int64 `(n,)` → uint8 `(n, C, H, W)`."""

    def images(self, numbers: slice | Sequence[int] | Tensor) -> Tensor:
        """The images of some samples, in the order asked for.

        Args:
            numbers: A slice of the set, or sample numbers from 0 to `len(self) - 1`, repeats allowed.

        Returns:
            uint8 `(n, C, H, W)`, the caller's own copy.

        Raises:
            IndexError: A number is outside the set.
            DataError: A file of the set cannot be read.
        """
        return self._read(self.numbers(numbers))

    def numbers(self, numbers: slice | Sequence[int] | Tensor | None = None) -> Tensor:
        """Sample numbers as an int64 tensor `(n,)`, checked against the set; None means all of them."""
        if numbers is None:
            return torch.arange(len(self), device="cpu")
        if isinstance(numbers, slice):
            start, stop, step = numbers.indices(len(self))
            return torch.tensor(range(start, stop, step), dtype=torch.int64, device="cpu")
        found = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(list(numbers)))
        if found.numel() == 0:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        if found.dim() != 1 or found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
            raise TypeError(
                f"`numbers` must be integers in one dimension, got {found.dtype} of shape {tuple(found.shape)}."
            )
        found = found.to("cpu", torch.int64)
        if found.min() < 0 or found.max() >= len(self):
            wrong = int(found[(found < 0) | (found >= len(self))][0])
            raise IndexError(f"{self.name} has samples 0 to {len(self) - 1}, got {wrong}.")
        return found

    def chunks(self, size: int = 256, order: slice | Sequence[int] | Tensor | None = None) -> Iterator[Chunk]:
        """Walk through the set, at most `size` samples at a time.

        Args:
            size: Samples in a chunk; the last may have fewer.
            order: Which samples, in which order: a shuffle, a shard or a part of the set. None is all of them.

        Yields:
            Chunks; only one is in memory at a time.
        """
        if size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}.")
        for numbers in self.numbers(order).split(size):
            if len(numbers):  # splitting an empty tensor gives one empty piece
                labels = None if self.labels is None else self.labels[numbers]
                yield Chunk(numbers, self._read(numbers), labels)

    def scores(self, logits: Tensor) -> Tensor:
        """What a network's outputs say about this set's classes; the largest is the prediction.

        Args:
            logits: `(n, outputs)`.

        Returns:
            `(n, K)`: the logits themselves, except in sets with classes other than the network's (`vid-robust`).
        """
        return logits

    def fingerprint(self) -> str:
        """A hash of what the set is made of; it changes when the images may have."""
        about = f"{self.name}\n{self.origin}\n{len(self)} {self.shape}\n"
        digest = hashlib.sha256(about.encode(errors="backslashreplace"))  # a name may be that of a folder
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()

    def is_correct(self, predictions: Tensor, numbers: slice | Sequence[int] | Tensor | None = None) -> Tensor:
        """Which predictions are right.

        Args:
            predictions: Classes of this set, integers `(n,)`.
            numbers: The samples they are for, as in `images`; None means the whole set in order.

        Returns:
            bool `(n,)`, on the predictions' device.

        Raises:
            ValueError: The set is unlabelled, or the two lengths differ.
        """
        if self.labels is None:
            raise ValueError(f"{self.name} has no labels, so no prediction can be called right or wrong.")
        found = self.numbers(numbers)
        if predictions.shape != found.shape:
            raise ValueError(
                f"{len(found)} samples need predictions of shape ({len(found)},), got {tuple(predictions.shape)}."
            )
        if self.right is None:
            return predictions == self.labels[found].to(predictions.device)
        return self.right[found, predictions.cpu()].to(predictions.device)


def leave_out(fingerprint: str, numbers: Sequence[int]) -> str:
    """The fingerprint of a set less the samples of these numbers."""
    if not numbers:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} without {sorted(numbers)}".encode()).hexdigest()


def check_on_bad(on_bad: str) -> None:
    """Raise `ValueError` for what is not an `OnBad`."""
    if on_bad not in get_args(OnBad):
        raise ValueError(f"`on_bad` must be 'fail' or 'skip', got {on_bad!r}.")


class DerivedSet(TestSet):
    """A set made of another one, image by image."""

    base: TestSet

    def __len__(self) -> int:
        return len(self.base)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.base.shape

    @property
    def skipped(self) -> tuple[str, ...]:
        return self.base.skipped

    def scores(self, logits: Tensor) -> Tensor:
        return self.base.scores(logits)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{super().fingerprint()} {self.base.fingerprint()}".encode()).hexdigest()


class TensorSet(TestSet):
    """A test set held in memory.

    Args:
        name: What it is called.
        images: uint8 `(N, C, H, W)`, C = 1 or 3.
        labels: Integers `(N,)` in 0..K-1, or None.
        classes: The K names; None numbers them from 0 to the largest label.

    Raises:
        ValueError: Shapes, types or labels do not fit together.
    """

    def __init__(
        self, name: str, images: Tensor, labels: Tensor | None = None, classes: Sequence[str] | None = None
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"`images` must be uint8 (N, 1 or 3, H, W), got {images.dtype} {tuple(images.shape)}.")
        self.name = name
        self.labels = None
        if labels is not None:
            if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
                raise ValueError(
                    f"`labels` must be integers ({len(images)},), got {labels.dtype} {tuple(labels.shape)}."
                )
            self.labels = labels.to("cpu", torch.int64)
        top = -1 if self.labels is None or not len(self.labels) else int(self.labels.max())
        self.classes = tuple(classes) if classes is not None else tuple(str(k) for k in range(top + 1))
        if self.labels is not None and len(self.labels) and (self.labels.min() < 0 or top >= len(self.classes)):
            raise ValueError(f"`labels` must be in 0..{len(self.classes) - 1}, got {int(self.labels.min())} to {top}.")
        self._images = images.cpu()

    def __len__(self) -> int:
        return len(self._images)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self._images.shape[1:]
        return channels, height, width

    def _read(self, numbers: Tensor) -> Tensor:
        return self._images[numbers]


class ArraySet(TestSet):
    """A test set over arrays that may be memory-mapped: only the images asked for are read.

    Args:
        name: What it is called.
        parts: uint8 arrays `(n, C, H, W)`, one after the other; any strides, so a view will do.
        labels: Integers `(N,)`, or None.
        classes: The names of the classes.
        origin: Where the arrays come from.
    """

    def __init__(
        self, name: str, parts: Sequence[np.ndarray], labels: Tensor | None, classes: Sequence[str], origin: str = ""
    ) -> None:
        self.name = name
        self.parts = [np.asarray(part) for part in parts]
        self.labels = None if labels is None else labels.to(torch.int64)
        self.classes = tuple(classes)
        self.origin = origin

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.parts[0].shape[1:]
        return channels, height, width

    def _read(self, numbers: Tensor) -> Tensor:
        wanted = numbers.numpy()
        out = np.empty((len(wanted), *self.shape), dtype=np.uint8)
        start = 0
        for part in self.parts:
            here = (wanted >= start) & (wanted < start + len(part))
            if here.any():
                out[here] = part[wanted[here] - start]
            start += len(part)
        return torch.from_numpy(out)
