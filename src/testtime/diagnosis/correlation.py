"""Gradient correlation: do the gradients of the two tasks on the shared encoder agree? (paper, figure 4)

`gradient_correlation` measures a network on a test set:

    batch     the inner product of the two mean gradients of a batch of 128, averaged over the batches, in evaluation
              mode and with all four rotations, as the authors measured it
    single    the same per image, as in Theorem 1
    stand-in  either of them with pseudo-labels: the network's predictions on the images where it is confident
    balance   per batch, without labels: the main loss is the divergence of the batch's mean prediction from the uniform
              distribution. Under a shift most errors come from predicting some classes too often, so on sets with
              balanced classes it is a substitute for the labels

It also measures the task's error, loss and confidence, and the classifier's confidence, none of which needs labels.
`Agreement` has the mean and its standard error, for the whole encoder and per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime import tasks
from testtime.data.sets import TestSet
from testtime.diagnosis.batch_gradients import BALANCE, CONFIDENT, STAND_IN, BatchGradients, Outputs
from testtime.diagnosis.gradients import ImageGradients, Products, freeze, name_layers
from testtime.networks.ynet import YNet
from testtime.precision import Precision, arithmetic, check_precision
from testtime.progress import Progress
from testtime.tasks import Task

BATCH = 128
SINGLE = 1000


class Layer(NamedTuple):
    """Agreement of the two gradients on one layer."""

    inner: float
    cosine: float


@dataclass(frozen=True)
class Agreement:
    """Agreement of the gradients of the two losses on the shared encoder.

    Attributes:
        inner: Mean inner product.
        inner_error: Its standard error; NaN for fewer than two.
        cosine: Mean cosine similarity.
        cosine_error: Its standard error.
        positive: Fraction of batches or images with a positive inner product.
        count: Number of batches or images.
        layers: The means per layer of the encoder.
    """

    inner: float
    inner_error: float
    cosine: float
    cosine_error: float
    positive: float
    count: int
    layers: Mapping[str, Layer]


@dataclass(frozen=True)
class Correlation:
    """The result of `gradient_correlation` on a test set.

    Attributes:
        name: The set.
        images: Number of images.
        batch: Agreement per batch with the true labels; None without labels.
        single: Agreement per image with the true labels; None without labels or if `single` was 0.
        stand_in_batch: Agreement per batch with confident predictions as labels; None if none is confident.
        stand_in_single: The same per image.
        balance: Agreement per batch with the balance of the predictions as the main loss.
        confident: Fraction of confident images.
        task_error: Fraction of views that the self-supervised branch classifies wrongly.
        task_loss: Its mean loss.
        task_confidence: Its mean confidence on plain images.
        confidence: The classifier's mean maximum probability.
        entropy: The mean entropy of its probabilities, in nats.
        error: Fraction of wrong predictions; None without labels.
        loss: The classifier's mean loss; None without labels.
    """

    name: str
    images: int
    batch: Agreement | None
    single: Agreement | None
    stand_in_batch: Agreement | None
    stand_in_single: Agreement | None
    balance: Agreement | None
    confident: float
    task_error: float
    task_loss: float
    task_confidence: float
    confidence: float
    entropy: float
    error: float | None
    loss: float | None

    def describe(self) -> dict[str, Any]:
        """Return the result as JSON-serializable data."""
        return to_plain(asdict(self))


def to_plain(value: Any) -> Any:
    """Convert a nested value for JSON; non-finite numbers become None."""
    if isinstance(value, dict):
        return {key: to_plain(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def gradient_correlation(
    net: YNet,
    task: Task | None,
    test_set: TestSet,
    *,
    limit: int | None = None,
    batch: int = BATCH,
    single: int = SINGLE,
    confident: float = CONFIDENT,
    precision: Precision = "fp32",
    progress: Progress | None = None,
) -> Correlation:
    """Measure the agreement of the gradients of the main and the self-supervised loss on a test set.

    Args:
        net: The network, on the device to use; it is not modified.
        task: The self-supervised task; None for the network's own. The loss is computed on its probe's views.
        test_set: The images; without labels only the stand-ins are measured.
        limit: Maximum number of images.
        batch: Batch size; the authors use 128.
        single: Number of images also measured individually; 0 for none.
        confident: Minimum probability for a prediction to be used as a label.
        precision: "fp32" is exact; "tf32" is faster on a GPU.
        progress: Called with the images done, their total, and the set's name.

    Raises:
        ValueError: An argument is out of range, the set is empty, or its labels are not the network's classes.
    """
    _check(net, test_set, limit, batch, single, confident, precision)
    count = len(test_set) if limit is None else min(limit, len(test_set))
    if count == 0:
        raise ValueError(f"{test_set.name} has no images.")
    single = min(single, count)
    task = task or tasks.make(net.card.task)
    device = next(net.parameters()).device

    def advance(done: int) -> None:
        if progress is not None:
            progress(done, count + single, test_set.name)

    with torch.inference_mode(False), arithmetic(precision, device):
        meter = BatchGradients(net, task, confident)
        truth = find_labels(test_set, net)
        truth = None if truth is None else truth[:count]
        found: list[tuple[Products, Outputs]] = []
        for numbers, images, _ in test_set.chunks(batch, slice(count)):
            labels = None if truth is None else truth[numbers].to(device)
            found.append(meter.measure(images.to(device), labels))
            advance(int(numbers[-1]) + 1)
        by_batch = Products.join([products for products, _ in found])
        outputs = Outputs.join([part for _, part in found])
        by_image = None
        if single:
            guesses = outputs.logits.argmax(1)[:single]
            wanted = guesses[None] if truth is None else torch.stack([truth[:single], guesses])
            by_image = _measure_images(ImageGradients(net, task), test_set, wanted, lambda done: advance(count + done))
    return _make_correlation(
        test_set.name, task, list(name_layers(net.encoder)), by_batch, by_image, outputs, truth, batch, confident
    )


def _check(
    net: YNet,
    test_set: TestSet,
    limit: int | None,
    batch: int,
    single: int,
    confident: float,
    precision: Precision,
) -> None:
    """Check the arguments of `gradient_correlation`."""
    for name, value, least in (("limit", limit, 1), ("batch", batch, 1), ("single", single, 0)):
        if value is not None and value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if not 0 <= confident <= 1:
        raise ValueError(f"`confident` must be in [0, 1], got {confident}.")
    if check_precision(precision) != torch.float32:
        raise ValueError(f'`precision` must be "fp32" or "tf32", got {precision!r}.')
    if net.channels is not None and test_set.shape[0] != net.channels:
        raise ValueError(f"{test_set.name} has {test_set.shape[0]} channels, the network takes {net.channels}.")


def _make_correlation(
    name: str,
    task: Task,
    layers: list[str],
    by_batch: Products,
    by_image: Products | None,
    outputs: Outputs,
    truth: Tensor | None,
    batch: int,
    confident: float,
) -> Correlation:
    """Summarise the measurements."""
    top = outputs.logits.softmax(1).amax(1)
    sure = top >= confident
    batch_sure = torch.stack([part.any() for part in sure.split(batch)])
    entropy = torch.special.entr(outputs.logits.double().softmax(1)).sum(1).mean()
    return Correlation(
        name=name,
        images=len(outputs.logits),
        batch=None if truth is None else summarise(by_batch, 0, layers),
        single=None if truth is None or by_image is None else summarise(by_image, 0, layers),
        stand_in_batch=summarise(by_batch, STAND_IN, layers, batch_sure),
        stand_in_single=None if by_image is None else summarise(by_image, -1, layers, sure[: by_image.task.shape[1]]),
        balance=summarise(by_batch, BALANCE, layers),
        confident=float(sure.double().mean()),
        task_error=float(outputs.errors.double().mean()),
        task_loss=float(outputs.losses.double().mean()),
        task_confidence=float(task.confidence(outputs.losses.double()).mean()),
        confidence=float(top.double().mean()),
        entropy=float(entropy),
        error=None if truth is None else float((outputs.logits.argmax(1) != truth).double().mean()),
        loss=None if truth is None else float(F.cross_entropy(outputs.logits.double(), truth)),
    )


def summarise(products: Products, which: int, names: list[str], keep: Tensor | None = None) -> Agreement | None:
    """Summarise inner products as an agreement.

    Args:
        products: Inner products per layer and per batch or image.
        which: Index of the set of labels.
        names: The layers.
        keep: Mask of the batches or images to include, bool `(N,)`; None for all.

    Returns:
        None if no batch or image is included.
    """
    parts = products.inner[which], products.main[which], products.task
    inner, main, task = (part.cpu().double()[:, slice(None) if keep is None else keep] for part in parts)
    if inner.shape[1] == 0:
        return None
    whole, layers = inner.sum(0), _cosine(inner, main, task)
    cosine = _cosine(whole, main.sum(0), task.sum(0))
    return Agreement(
        inner=float(whole.mean()),
        inner_error=_standard_error(whole),
        cosine=float(cosine.mean()),
        cosine_error=_standard_error(cosine),
        positive=float((whole > 0).double().mean()),
        count=len(whole),
        layers={
            name: Layer(float(one), float(two))
            for name, one, two in zip(names, inner.mean(1), layers.mean(1), strict=True)
        },
    )


def find_labels(test_set: TestSet, net: YNet) -> Tensor | None:
    """Return the labels of a set as class indices of a network, int64 `(N,)`, or None.

    Sets that map the network's classes to their own (`vid-robust`) have none.

    Raises:
        ValueError: The set has more classes than the network.
    """
    if test_set.labels is None or test_set.right is not None:
        return None
    with torch.no_grad():
        example = torch.zeros(1, *test_set.shape, dtype=torch.uint8, device=next(net.parameters()).device)
        logits = freeze(net)(example)
    if test_set.scores(logits).shape != logits.shape:
        return None
    labels = test_set.labels
    if len(labels) and int(labels.max()) >= logits.shape[1]:
        raise ValueError(f"{test_set.name} has label {int(labels.max())}, the network has {logits.shape[1]} classes.")
    return labels


def _measure_images(
    meter: ImageGradients, test_set: TestSet, labels: Tensor, advance: Callable[[int], None]
) -> Products:
    """Measure the first images of a set individually."""
    device, found = next(meter.net.parameters()).device, []
    for numbers, images, _ in test_set.chunks(meter.chunk, slice(labels.shape[1])):
        found.append(meter.products(images.to(device), labels[:, numbers].to(device)))
        advance(int(numbers[-1]) + 1)
    return Products.join(found)


def _cosine(inner: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Return cosines from inner products and squared norms; 0 where a gradient is zero."""
    length = (one * two).sqrt()
    return torch.where(length > 0, inner / length.clamp(min=1e-300), 0.0).clamp(-1, 1)


def _standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
