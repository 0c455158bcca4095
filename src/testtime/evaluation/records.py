"""Evaluation of an adapter on a test set or a data loader: one record per image.

`evaluate` is a generator, so a stream can be monitored, plotted or stopped while it runs. Metrics are functions of the
records:

    records = list(evaluate(Online(net), test_set, shuffle=True))
    error(records)                      # fraction of wrong predictions
    running_error(records, window=100)  # along the stream (paper, figure 2)
    flips(records, baseline)            # images that became right, and wrong

Labels are only read here: an adapter sees the images and their sample indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testtime.adaptation.adapters import Adapter
from testtime.adaptation.prediction import Prediction
from testtime.data.sets import TestSet
from testtime.progress import Progress
from testtime.randomness import Draws

Columns = dict[str, np.ndarray]
Chunk = tuple[Tensor, Tensor, Tensor | None]

COLUMNS: dict[str, str] = {
    "sample": "int32",
    "label": "int32",
    "prediction": "int32",
    "prediction_before": "int32",
    "is_right": "uint8",
    "was_right": "uint8",
    "loss_before": "float32",
    "loss_after": "float32",
    "confidence": "float32",
    "adapted": "uint8",
    "rolled_back": "uint8",
}
"""The fields of `Record` as columns, with their dtypes. Without a label, `label` is -1 and both verdicts are 0."""

PROBABILITIES: dict[str, str] = {"probability": "float32", "probability_before": "float32"}
"""Further columns, which units of earlier versions do not have."""


class Record(NamedTuple):
    """The result for one image.

    Attributes:
        sample: Its index in the test set.
        label: Its class, or None in a set without labels.
        prediction: The class predicted after adaptation.
        prediction_before: The class predicted just before learning from this image. Online, the network has already
            learned from the previous images.
        is_right: Whether `prediction` is right; None in a set without labels.
        was_right: Whether `prediction_before` is right; None in a set without labels.
        loss_before: The self-supervised task's loss on the image before adaptation.
        loss_after: The task's loss after adaptation.
        confidence: The task's confidence on the plain image before adaptation, in [0, 1].
        adapted: Whether the prediction comes from a network that learned from the image.
        rolled_back: Whether the guard rolled the update back.
        probability: The softmax probability of `prediction`, in [0, 1]; None in records of earlier versions.
        probability_before: The softmax probability of `prediction_before`; None in records of earlier versions.
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
    probability: float | None = None
    probability_before: float | None = None


class Flips(NamedTuple):
    """Samples on which exactly one of two predictions is right, by sample index.

    Attributes:
        to_right: Wrong before, right after.
        to_wrong: Right before, wrong after.
    """

    to_right: tuple[int, ...]
    to_wrong: tuple[int, ...]


def evaluate(
    adapter: Adapter,
    test_set: TestSet | Iterable[Any],
    *,
    batch: int = 32,
    shuffle: bool = False,
    seed: int = 0,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Record]:
    """Predict and score the images of a test set, in the order of the stream.

    The adapter is not reset: call `adapter.reset()` before a new stream. With default arguments this is equivalent to

        for numbers, images, labels in test_set.chunks(32):
            answers = adapter.predict(images, samples=numbers)
            predictions = test_set.scores(answers.logits).argmax(1)
            right = test_set.is_correct(predictions, numbers)

    converted to one record per image.

    Args:
        adapter: `Fixed`, `Episodic` or `Online`.
        test_set: The images, with or without labels: a set of `testtime.data`, or any iterable of batches, e.g. a
            `DataLoader`: images `(N, C, H, W)`, uint8 or floats in [0, 1], or pairs of images and labels `(N,)`, which
            may be None. Samples of an iterable are numbered from 0 in its order.
        batch: Images per call of the adapter. It only affects the results if they share an update (`share="batch"`).
            An iterable has its own batches.
        shuffle: Whether to shuffle the images, as the paper does online; not supported for an iterable.
        seed: Seed of the shuffled order.
        limit: Maximum number of images.
        progress: Called with the images done, their total, and the error so far.

    Yields:
        A `Record` per image.

    Raises:
        TypeError: `adapter` cannot predict, or `test_set` is neither a set nor an iterable of batches.
        ValueError: An argument is out of range, or `shuffle` is set for a test set with a fixed order. Raised when
            `evaluate` is called, not on the first iteration. While iterating: a batch is malformed.
    """
    if not hasattr(adapter, "predict"):
        raise TypeError(f"`adapter` must be an adapter such as tt.Fixed(net), got {type(adapter).__name__}.")
    if batch < 1:
        raise ValueError(f"`batch` must be at least 1, got {batch}.")
    if limit is not None and limit < 0:
        raise ValueError(f"`limit` must be at least 0, got {limit}.")
    if not isinstance(test_set, TestSet):
        return _walk_batches(adapter, _check_iterable(test_set, shuffle), limit, progress)
    if shuffle and test_set.ordered:
        raise ValueError(f"{test_set.name} has a fixed order and cannot be shuffled.")
    order = stream_order(len(test_set), seed) if shuffle else torch.arange(len(test_set), device="cpu")
    return _walk(adapter, test_set, order[:limit], batch, progress)


def _walk(
    adapter: Adapter, test_set: TestSet, order: Tensor, batch: int, progress: Progress | None
) -> Iterator[Record]:
    done = wrong = 0
    for columns in walk(adapter, test_set, test_set.chunks(batch, order)):
        yield from read_records(columns)
        done, wrong = done + len(columns["sample"]), wrong + count_wrong(columns)
        if progress is not None:
            progress(done, len(order), "" if test_set.labels is None else f"error {wrong / done:.1%}")


def _check_iterable(batches: Any, shuffle: bool) -> Iterable[Any]:
    if isinstance(batches, (Tensor, str, bytes, dict)) or not isinstance(batches, Iterable):
        hint = "; for one batch pass [(images, labels)]" if isinstance(batches, Tensor) else ""
        raise TypeError(
            "`test_set` must be a set of testtime.data or an iterable of batches, (images, labels), got "
            f"{type(batches).__name__}{hint}."
        )
    if shuffle:
        raise ValueError("`shuffle` is not supported for an iterable of batches: shuffle its own order.")
    return batches


def _walk_batches(
    adapter: Adapter, batches: Iterable[Any], limit: int | None, progress: Progress | None
) -> Iterator[Record]:
    if limit == 0:
        return
    count, wrong = 0, 0
    size = getattr(getattr(batches, "dataset", None), "__len__", lambda: 0)()
    for number, batch in enumerate(batches):
        left = None if limit is None else limit - count
        images, labels = read_batch(number, batch)
        images, labels = images[:left], None if labels is None else labels[:left]
        numbers = torch.arange(count, count + len(images), device="cpu")
        try:
            answers = adapter.predict(images, samples=numbers)
        except ValueError as error:
            raise ValueError(f"Batch {number}: {error}") from None
        columns = _score_batch(number, numbers, answers, labels)
        yield from read_records(columns)
        count, wrong = count + len(images), wrong + count_wrong(columns)
        if progress is not None and count:
            total = max(count, min(size, limit) if limit is not None and size else size)
            progress(count, total, "" if labels is None else f"error {wrong / count:.1%}")
        if count == limit:  # before the next batch is taken from an iterator
            return


def read_batch(number: int, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the images and labels of a batch.

    Raises:
        ValueError: It is malformed; the message contains its number.
    """
    images, labels = batch, None
    if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2:
        images, labels = (*batch, None)[:2]
    if not isinstance(images, Tensor) or images.dim() != 4:
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        hint = "; pass a DataLoader of a dataset" if isinstance(images, Tensor) and images.dim() == 3 else ""
        raise ValueError(f"Batch {number}: images must be a tensor (N, C, H, W), got {found}{hint}.")
    if labels is None:
        return images, None
    try:
        labels = labels.cpu() if isinstance(labels, Tensor) else torch.from_numpy(np.asarray(labels))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"Batch {number}: labels must be integers, got {type(labels).__name__}.") from None
    if labels.shape != (len(images),) or labels.dtype.is_floating_point or labels.dtype.is_complex:
        shape = tuple(labels.shape)
        raise ValueError(f"Batch {number}: labels must be {len(images)} integers, got {labels.dtype} {shape}.")
    return images, labels.long()


def _score_batch(number: int, numbers: Tensor, answers: Prediction, labels: Tensor | None) -> Columns:
    """Score predictions of a batch with labels `(N,)`, or without; returns records as columns."""
    after, before = _read_scores(answers.logits), _read_scores(answers.logits_before)
    if labels is None:
        return _make_columns(numbers, None, after, before, answers)
    outside = labels[(labels < 0) | (labels >= answers.logits.shape[1])]
    if len(outside):
        classes = answers.logits.shape[1]
        raise ValueError(f"Batch {number}: labels must be from 0 to {classes - 1}, got {int(outside[0])}.")
    return _make_columns(numbers, (labels, after[0] == labels, before[0] == labels), after, before, answers)


def walk(adapter: Adapter, test_set: TestSet, chunks: Iterable[Chunk]) -> Iterator[Columns]:
    """Predict and score the images of a test set, chunk by chunk.

    Args:
        adapter: The adapter.
        test_set: The test set.
        chunks: Sample indices, images and labels, as from `test_set.chunks`.

    Yields:
        The records of each chunk as columns, see `COLUMNS`.
    """
    for numbers, images, _ in chunks:
        yield score(test_set, numbers, adapter.predict(images, samples=numbers))


def score(test_set: TestSet, numbers: Tensor, answers: Prediction) -> Columns:
    """Score an adapter's predictions for the samples with the given indices; returns records as columns."""
    after = _read_scores(test_set.scores(answers.logits))
    before = _read_scores(test_set.scores(answers.logits_before))
    if test_set.labels is None:
        return _make_columns(numbers, None, after, before, answers)
    verdicts = test_set.is_correct(after[0], numbers), test_set.is_correct(before[0], numbers)
    return _make_columns(numbers, (test_set.labels[numbers], *verdicts), after, before, answers)


def _read_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted classes and their softmax probabilities, both `(N,)`, from scores `(N, K)`."""
    return scores.argmax(1).cpu(), scores.float().softmax(1).amax(1).cpu()


def _make_columns(
    numbers: Tensor,
    known: tuple[Tensor, Tensor, Tensor] | None,
    after: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor],
    answers: Prediction,
) -> Columns:
    """Return records as columns.

    Args:
        numbers: Sample indices, `(N,)`.
        known: Labels, and which predictions are right, after and before; None without labels.
        after: Predicted classes and their probabilities after adaptation.
        before: The same before adaptation.
        answers: The adapter's predictions.
    """
    label, is_right, was_right = known or (torch.full_like(numbers, -1), *[torch.zeros_like(numbers)] * 2)
    values = (numbers, label, after[0], before[0], is_right, was_right, answers.loss_before, answers.loss_after)
    values += (answers.confidence, answers.adapted, answers.rolled_back, after[1], before[1])
    kinds = {**COLUMNS, **PROBABILITIES}
    return {name: value.cpu().numpy().astype(kind) for (name, kind), value in zip(kinds.items(), values, strict=True)}


def list_columns(names: Iterable[str]) -> list[str]:
    """Return the names of all columns in order, without `PROBABILITIES` unless `names` contains both."""
    more = PROBABILITIES if PROBABILITIES.keys() <= set(names) else {}
    return [*COLUMNS, *more]


def read_records(columns: Columns) -> Iterator[Record]:
    """Convert columns to records."""
    for row in zip(*(columns[name].tolist() for name in list_columns(columns)), strict=True):
        record, labelled = Record(*row), row[1] >= 0
        yield record._replace(
            label=record.label if labelled else None,
            is_right=bool(record.is_right) if labelled else None,
            was_right=bool(record.was_right) if labelled else None,
            adapted=bool(record.adapted),
            rolled_back=bool(record.rolled_back),
        )


def count_wrong(columns: Columns) -> int:
    """Count the wrong predictions among the labelled samples."""
    return int(((columns["label"] >= 0) & (columns["is_right"] == 0)).sum())


def stream_order(count: int, seed: int) -> Tensor:
    """Return the shuffled order of `count` samples for a seed, int64 `(count,)`."""
    return Draws.of(seed, torch.arange(count, device="cpu")).purpose("order").keys.argsort(stable=True)


def error(records: Iterable[Record]) -> float:
    """Return the fraction of wrong predictions, in [0, 1].

    Raises:
        ValueError: There are no records, or some have no label.
    """
    wrong = [not right for right in _rights(records)]
    if not wrong:
        raise ValueError("There are no records.")
    return sum(wrong) / len(wrong)


def running_error(records: Iterable[Record], window: int | None = None) -> list[float]:
    """Return the error along the stream: entry n is the fraction of wrong predictions up to and including record n.

    Args:
        records: Records in the order of the stream.
        window: Number of most recent records to average over; None for all so far.

    Raises:
        ValueError: `window` is below 1, or records have no label.
    """
    if window is not None and window < 1:
        raise ValueError(f"`window` must be at least 1, got {window}.")
    wrong = [not right for right in _rights(records)]
    shares, total = [], 0
    for index, one in enumerate(wrong):
        total += one
        if window is not None and index >= window:
            total -= wrong[index - window]
        shares.append(total / min(index + 1, window or index + 1))
    return shares


def flips(records: Sequence[Record], baseline: Sequence[Record] | None = None) -> Flips:
    """Return which images became right and which became wrong.

    Args:
        records: The predictions after.
        baseline: The predictions before, e.g. those of `Fixed`, of the same samples in any order. None compares each
            record with its own `prediction_before`.

    Raises:
        ValueError: The samples differ, or records have no label.
    """
    after = _rights(records)
    if baseline is None:
        before = [bool(record.was_right) for record in records]
    else:
        known = dict(zip((record.sample for record in baseline), _rights(baseline), strict=True))
        samples = [record.sample for record in records]
        if len(known) != len(baseline) or sorted(samples) != sorted(known):
            raise ValueError("`records` and `baseline` must contain the same samples, each once.")
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
            raise ValueError(f"Sample {record.sample} has no label.")
        rights.append(record.is_right)
    return rights
