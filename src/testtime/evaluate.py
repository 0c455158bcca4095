"""Evaluation: walk through a test set, predict, score, and hand out one record for each image.

`evaluate` is a generator, so a stream can be watched, plotted or stopped while it runs; what is made of the records is
left to small functions that know nothing of networks:

    records = list(evaluate(Online(net), test_set, shuffle=True))
    error(records)                      # share of wrong predictions
    running_error(records, window=100)  # the same along the stream (paper, figure 2)
    flips(records, baseline)            # which images became right, which wrong

Labels are read here and only here: an adapter gets images and their numbers, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testtime.adapt import Adapter
from testtime.data.sets import TestSet
from testtime.randomness import Draws

Progress = Callable[[int, int, str], None]


class Record(NamedTuple):
    """What happened to one image.

    Attributes:
        sample: Its number in the test set.
        label: Its class, or None in a set without labels.
        prediction: The class predicted after adaptation.
        prediction_before: The class predicted by the same network just before it learned from this image. Along an
            online stream that network has already learned from the images before.
        is_right: Whether `prediction` is right; None in a set without labels.
        was_right: Whether `prediction_before` is right; None in a set without labels.
        loss_before: The self-supervised task's loss on the image before adaptation.
        loss_after: The same after it.
        confidence: The task's confidence in the plain image before adaptation, in [0, 1].
        adapted: Whether the prediction comes from a network that learned from the image.
        rolled_back: Whether the guard undid what was learned.
    """

    sample: int
    label: int | None
    prediction: int
    prediction_before: int
    is_right: bool | None
    was_right: bool | None
    loss_before: float
    loss_after: float
    confidence: float
    adapted: bool
    rolled_back: bool


class Flips(NamedTuple):
    """The images on which two predictions differ in being right, by sample number.

    Attributes:
        to_right: Wrong before, right after.
        to_wrong: Right before, wrong after.
    """

    to_right: tuple[int, ...]
    to_wrong: tuple[int, ...]


def evaluate(
    adapter: Adapter,
    test_set: TestSet,
    *,
    batch: int = 32,
    shuffle: bool = False,
    seed: int = 0,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Record]:
    """Predict the images of a test set and score the predictions, one record each, in the order of the stream.

    The adapter is used as it is and keeps what it learns: call `adapter.reset()` before a new stream. With the
    defaults this is the loop

        for numbers, images, labels in test_set.chunks(32):
            answers = adapter.predict(images, samples=numbers)
            predictions = test_set.scores(answers.logits).argmax(1)
            right = test_set.is_correct(predictions, numbers)

    read out image by image.

    Args:
        adapter: `Fixed`, `Episodic` or `Online`.
        test_set: The images, with or without labels.
        batch: Images in one call of the adapter. It decides nothing unless they share their update
            (`share="batch"`).
        shuffle: Whether to visit the images in a random order, as the paper does online.
        seed: Seed of that order.
        limit: Only the first so many images of the order.
        progress: Told how many of how many images are done, and the error so far.

    Yields:
        A `Record` for each image.

    Raises:
        ValueError: An argument is out of range, or a set whose order is what it tests was to be shuffled. Raised when
            `evaluate` is called, before anything is predicted.
    """
    if batch < 1:
        raise ValueError(f"`batch` must be at least 1, got {batch}.")
    if limit is not None and limit < 0:
        raise ValueError(f"`limit` must be at least 0, got {limit}.")
    if shuffle and test_set.ordered:
        raise ValueError(f"{test_set.name} tests the order of its images: it cannot be shuffled.")
    order = stream_order(len(test_set), seed) if shuffle else torch.arange(len(test_set))
    return _walk(adapter, test_set, order[:limit], batch, progress)


def _walk(
    adapter: Adapter, test_set: TestSet, order: Tensor, batch: int, progress: Progress | None
) -> Iterator[Record]:
    done = wrong = 0
    for numbers, images, labels in test_set.chunks(batch, order):
        answers = adapter.predict(images, samples=numbers)
        after = test_set.scores(answers.logits).argmax(1).cpu()
        before = test_set.scores(answers.logits_before).argmax(1).cpu()
        unknown: list[None] = [None] * len(numbers)
        is_right: list[bool] | list[None] = unknown
        was_right: list[bool] | list[None] = unknown
        if labels is not None:
            is_right = test_set.is_correct(after, numbers).tolist()
            was_right = test_set.is_correct(before, numbers).tolist()
        columns = (
            numbers.tolist(),
            unknown if labels is None else labels.tolist(),
            after.tolist(),
            before.tolist(),
            is_right,
            was_right,
            answers.loss_before.tolist(),
            answers.loss_after.tolist(),
            answers.confidence.tolist(),
            answers.adapted.tolist(),
            answers.rolled_back.tolist(),
        )
        yield from map(Record._make, zip(*columns, strict=True))
        done, wrong = done + len(numbers), wrong + sum(right is False for right in is_right)
        if progress is not None:
            progress(done, len(order), "" if labels is None else f"error {wrong / done:.1%}")


def stream_order(count: int, seed: int) -> Tensor:
    """The shuffled order of `count` samples under a seed, int64 `(count,)`."""
    return Draws.of(seed, torch.arange(count)).purpose("order").keys.argsort(stable=True)


def error(records: Iterable[Record]) -> float:
    """The share of wrong predictions, in [0, 1].

    Raises:
        ValueError: There are no records, or some have no label.
    """
    wrong = [not right for right in _rights(records)]
    if not wrong:
        raise ValueError("There are no records to take an error of.")
    return sum(wrong) / len(wrong)


def running_error(records: Iterable[Record], window: int | None = None) -> list[float]:
    """The error along the stream: entry n is the share of wrong predictions up to and with record n.

    Args:
        records: In the order of the stream.
        window: Only the last so many records count (fewer at the beginning); None counts all so far.

    Raises:
        ValueError: `window` is below 1, or records have no label.
    """
    if window is not None and window < 1:
        raise ValueError(f"`window` must be at least 1, got {window}.")
    wrong = [not right for right in _rights(records)]
    shares, total = [], 0
    for place, one in enumerate(wrong):
        total += one
        if window is not None and place >= window:
            total -= wrong[place - window]
        shares.append(total / min(place + 1, window or place + 1))
    return shares


def flips(records: Sequence[Record], baseline: Sequence[Record] | None = None) -> Flips:
    """Which images became right and which became wrong.

    Args:
        records: The predictions after.
        baseline: The predictions before, of the same samples in any order, such as those of `Fixed`. None compares
            each record with its own `prediction_before`.

    Raises:
        ValueError: The samples are not the same, or records have no label.
    """
    after = _rights(records)
    if baseline is None:
        before = [bool(record.was_right) for record in records]
    else:
        known = dict(zip((record.sample for record in baseline), _rights(baseline), strict=True))
        samples = [record.sample for record in records]
        if len(known) != len(baseline) or sorted(samples) != sorted(known):
            raise ValueError("`records` and `baseline` must be of the same samples, each once.")
        before = [known[sample] for sample in samples]
    pairs = list(zip(records, before, after, strict=True))
    return Flips(
        tuple(record.sample for record, was, now in pairs if now and not was),
        tuple(record.sample for record, was, now in pairs if was and not now),
    )


def _rights(records: Iterable[Record]) -> list[bool]:
    rights = []
    for record in records:
        if record.is_right is None:
            raise ValueError(f"Sample {record.sample} has no label, so its prediction is neither right nor wrong.")
        rights.append(record.is_right)
    return rights
