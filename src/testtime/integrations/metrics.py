"""Metrics of torchmetrics, before and after adaptation."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from testtime.adaptation.adapters import Adapter
from testtime.data.sets import TestSet
from testtime.evaluation.records import read_batch

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    M = TypeVar("M", Metric, MetricCollection)
else:
    M = TypeVar("M")


def measure(
    adapter: Adapter,
    test_set: TestSet | Iterable[tuple[Tensor, Tensor]],
    metric: M,
    *,
    batch: int = 32,
    limit: int | None = None,
) -> dict[str, Any]:
    """Adapt to the images of a test set, and compute metrics of the logits before and after.

    Args:
        adapter: The adapter; it is not reset.
        test_set: A set of `testtime.data`, or batches of images `(N, C, H, W)` and labels `(N,)`, e.g. a `DataLoader`.
        metric: A metric that is updated with logits `(N, K)` and labels `(N,)`, or a collection of them. It remains
            unchanged.
        batch: Images per call of the adapter; an iterable has its own batches.
        limit: Maximum number of images.

    Returns:
        What the metric computes, by "before" and "after".

    Raises:
        ValueError: The set has no labels, or `batch` or `limit` is out of range.
    """
    if batch < 1:
        raise ValueError(f"`batch` must be at least 1, got {batch}.")
    if limit is not None and limit < 0:
        raise ValueError(f"`limit` must be at least 0, got {limit}.")
    before, after = (metric.clone().to(adapter.device) for _ in range(2))
    before.reset()
    after.reset()
    left = limit
    scores = test_set.scores if isinstance(test_set, TestSet) else Tensor.detach
    for numbers, images, labels in _read(test_set, batch):
        numbers, images, labels = numbers[:left], images[:left], labels[:left]
        if len(images) == 0:
            break
        answers = adapter.predict(images, samples=numbers)
        before.update(scores(answers.logits_before), labels.to(adapter.device))
        after.update(scores(answers.logits), labels.to(adapter.device))
        left = None if left is None else left - len(images)
    return {"before": before.compute(), "after": after.compute()}


def _read(test_set: TestSet | Iterable[tuple[Tensor, Tensor]], batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield sample numbers, images and labels."""
    if isinstance(test_set, TestSet):
        for numbers, images, labels in test_set.chunks(batch):
            if labels is None:
                raise ValueError(f"{test_set.name} has no labels, which metrics need.")
            yield numbers, images, labels
        return
    count = 0
    for number, found in enumerate(test_set):
        images, labels = read_batch(number, found)
        if labels is None:
            raise ValueError(f"Batch {number} has no labels, which metrics need.")
        yield torch.arange(count, count + len(images), device="cpu"), images, labels
        count += len(images)
