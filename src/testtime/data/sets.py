"""`TestSet`, the interface of all test sets: uint8 images and labels, independent of any network.

A sample is identified by its index in the set, whatever the order in which samples are visited: randomness depends on
the index (`testtime.randomness`), so a shuffled, sharded or resumed pass yields the same corruptions and augmentations.
Images are uint8; scaling and normalisation belong to the network.

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
"""What to do with an unreadable picture: raise an error, or leave it out and list it in `skipped`."""


class DataError(FileError):
    """A file or folder of a data set that cannot be used."""


@contextlib.contextmanager
def convert_file_errors() -> Iterator[None]:
    """Convert a `FileError` to a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except FileError as error:
        raise DataError(error.path, error.fault, error.remedy) from None


class Chunk(NamedTuple):
    """Some samples of a set.

    Attributes:
        numbers: Sample indices, int64 `(n,)`.
        images: uint8 `(n, C, H, W)`.
        labels: int64 `(n,)`, or None if the set is unlabelled.
    """

    numbers: Tensor
    images: Tensor
    labels: Tensor | None


class TestSet(ABC):
    """A set of images with or without labels, read in chunks.

    Attributes:
        name: Its name in runs and reports, for example `cifar10-c/fog/5`.
        classes: Class names; label `k` is `classes[k]`.
        labels: int64 `(N,)`, or None if unlabelled.
        right: bool `(N, K)` if samples may have several right labels, of which `labels` has the first; else None.
        ordered: Whether the order of the samples is part of the test (`cifar10-gradual`) and must not be shuffled.
        origin: The source of the images, for the record: files, or a generator and its seed.
        held_out: The images that were held out from it, see `held_out.hold_out_images`.
    """

    __test__ = False  # not a test case, despite its name

    name: str
    classes: tuple[str, ...]
    labels: Tensor | None
    right: Tensor | None = None
    ordered: bool = False
    origin: str = ""
    held_out: TestSet | None = None

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """The items left out as unreadable: one line each, with the name of the file and its fault."""
        return ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """The shape `(C, H, W)` of every image."""

    @abstractmethod
    def _read(self, numbers: Tensor) -> Tensor:
        """Read the images of valid sample indices: int64 `(n,)` → uint8 `(n, C, H, W)`."""

    def images(self, numbers: slice | Sequence[int] | Tensor) -> Tensor:
        """Read the images of some samples, in the given order.

        Args:
            numbers: A slice of the set, or sample indices from 0 to `len(self) - 1`, possibly repeated.

        Returns:
            uint8 `(n, C, H, W)`, a copy.

        Raises:
            IndexError: An index is out of range.
            DataError: A file of the set cannot be read.
        """
        return self._read(self.numbers(numbers))

    def numbers(self, numbers: slice | Sequence[int] | Tensor | None = None) -> Tensor:
        """Convert sample indices to an int64 tensor `(n,)` and check their range; None: all samples."""
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
        """Iterate over the set in chunks.

        Args:
            size: Samples per chunk; the last may have fewer.
            order: The samples and their order: a shuffle, a shard or a subset. None: all, in order.

        Yields:
            Chunks, of which only one is in memory at a time.
        """
        if size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}.")
        for numbers in self.numbers(order).split(size):
            if len(numbers):  # splitting an empty tensor yields one empty piece
                labels = None if self.labels is None else self.labels[numbers]
                yield Chunk(numbers, self._read(numbers), labels)

    def scores(self, logits: Tensor) -> Tensor:
        """Convert a network's outputs to scores of this set's classes; the largest is the prediction.

        Args:
            logits: `(n, outputs)`.

        Returns:
            `(n, K)`: the logits, except for sets with other classes than the network (`vid-robust`).
        """
        return logits

    def fingerprint(self) -> str:
        """Return a hash of the set's name, origin, shape and labels, which changes whenever the images may have."""
        about = f"{self.name}\n{self.origin}\n{len(self)} {self.shape}\n"
        digest = hashlib.sha256(about.encode(errors="backslashreplace"))  # folder names may not be valid Unicode
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()

    def is_correct(self, predictions: Tensor, numbers: slice | Sequence[int] | Tensor | None = None) -> Tensor:
        """Return which predictions are right.

        Args:
            predictions: Classes of this set, integers `(n,)`.
            numbers: Their sample indices, as in `images`; None: the whole set in order.

        Returns:
            bool `(n,)`, on the predictions' device.

        Raises:
            ValueError: The set is unlabelled, or the two lengths differ.
        """
        if self.labels is None:
            raise ValueError(f"{self.name} has no labels, so predictions cannot be scored.")
        found = self.numbers(numbers)
        if predictions.shape != found.shape:
            raise ValueError(
                f"{len(found)} samples need predictions of shape ({len(found)},), got {tuple(predictions.shape)}."
            )
        if self.right is None:
            return predictions == self.labels[found].to(predictions.device)
        return self.right[found, predictions.cpu()].to(predictions.device)


def leave_out(fingerprint: str, numbers: Sequence[int]) -> str:
    """Return the fingerprint of a set without some samples."""
    if not numbers:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} without {sorted(numbers)}".encode()).hexdigest()


def check_on_bad(on_bad: str) -> None:
    """Raise a `ValueError` for anything but an `OnBad`."""
    if on_bad not in get_args(OnBad):
        raise ValueError(f"`on_bad` must be 'fail' or 'skip', got {on_bad!r}.")


class DerivedSet(TestSet):
    """A set derived from another, image by image."""

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
    """A test set in memory.

    Args:
        name: Name of the set.
        images: uint8 `(N, C, H, W)`, C = 1 or 3.
        labels: Integers `(N,)` in 0..K-1, or None.
        classes: The K class names; None: the numbers from 0 to the largest label.

    Raises:
        ValueError: Shapes, dtypes or labels are inconsistent.
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
    """A test set of arrays, which may be memory-mapped: only the requested images are read.

    Args:
        name: Name of the set.
        parts: uint8 arrays `(n, C, H, W)` of any strides, to be concatenated.
        labels: Integers `(N,)`, or None.
        classes: Class names.
        origin: The source of the arrays.
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
