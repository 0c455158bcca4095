"""Gradient correlation: do the two tasks pull the shared encoder the same way? (paper, figure 4).

`gradient_correlation` measures a network on a test set:

    batch     the inner product of the two mean gradients of a batch of 128, averaged over the batches, in evaluation
              mode and with all four rotations, as the authors measured it
    single    the same for each image by itself, which is what Theorem 1 speaks of
    stand-in  either of them without labels: the network's own predictions serve as labels, on the images on which it
              is confident
    balance   by batch, and without labels as well: the main loss is how far the mean of a batch's predictions is from
              all classes being as frequent. Under a shift most of what is wrong is that a network sees some classes
              too often, so where classes are about as frequent as each other this stands in for the labels

It also notes what else can be seen without labels: the task's error, loss and confidence, and how sure the classifier
is. `Agreement` holds a mean with its standard error, for the whole encoder and layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime import tasks
from testtime.data.sets import TestSet
from testtime.diagnosis.gradients import ImageGradients, Products, freeze, join_features, name_layers, split_views
from testtime.kernels.graphs import Captured, can_record, record
from testtime.networks.ynet import YNet
from testtime.precision import Precision, arithmetic, check_precision
from testtime.progress import Progress
from testtime.tasks import Task

BATCH = 128
CONFIDENT = 0.9
SINGLE = 1000
STAND_IN, BALANCE = -2, -1  # places of the two losses without labels among those of a batch


class Layer(NamedTuple):
    """How far the two gradients agree on one layer."""

    inner: float
    cosine: float


@dataclass(frozen=True)
class Agreement:
    """How far the gradients of the two losses on the shared encoder point the same way.

    Attributes:
        inner: Mean of their inner product.
        inner_error: Standard error of that mean; not a number for fewer than two.
        cosine: Mean of their cosine.
        cosine_error: Standard error of that mean.
        positive: Share of batches or images with a positive inner product.
        count: How many batches or images.
        layers: The same means on each layer of the encoder.
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
    """What `gradient_correlation` finds on a test set.

    Attributes:
        name: The set.
        images: How many of its images.
        batch: Agreement by batch with the true labels; None in a set without them.
        single: Agreement by image with the true labels; None without labels, or if no single image was asked for.
        stand_in_batch: Agreement by batch with confident predictions as labels; None where none is confident.
        stand_in_single: The same by image.
        balance: Agreement by batch with the balance of the predictions as the main loss.
        confident: Share of the images on which the network is confident.
        task_error: Share of views whose turn the self-supervised branch gets wrong.
        task_loss: Its mean loss.
        task_confidence: Its mean confidence that a plain image is plain.
        confidence: The classifier's mean highest probability.
        entropy: The mean entropy of its probabilities, in nats.
        error: Share of wrong predictions; None without labels.
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
        """The same as JSON could hold it."""
        plain = asdict(self)
        for name, part in plain.items():
            if isinstance(part, dict):
                layers = {layer: own._asdict() for layer, own in part["layers"].items()}
                numbers = {key: None if value != value else value for key, value in part.items()}  # no NaN in JSON
                plain[name] = numbers | {"layers": layers}
        return plain


class Outputs(NamedTuple):
    """The outputs of a network for a batch of N images.

    Attributes:
        logits: Class logits, `(N, K)`.
        losses: The task's loss of each view, `(N, V)`.
        answers: What the self-supervised branch answers for each view, int `(N, V)`.
        targets: What it should answer, int `(N, V)`.
    """

    logits: Tensor
    losses: Tensor
    answers: Tensor
    targets: Tensor

    @staticmethod
    def join(parts: Sequence[Outputs]) -> Outputs:
        """One for the images of several, in their order, on the CPU."""
        return Outputs(*(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)))

    def pick(self, rows: Tensor) -> Outputs:
        """Those of some of the images, by their places, int `(n,)`."""
        return Outputs(*(tensor[rows] for tensor in self))


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
    """Measure how far the gradients of the main and the self-supervised loss agree on a test set.

    Args:
        net: The network, on the device to compute on; it is not changed.
        task: The self-supervised task; None takes the network's own. Its probe's views make the loss.
        test_set: The images; without labels only the stand-ins are measured.
        limit: Only the first so many images.
        batch: Images in a batch; the authors take 128.
        single: The first so many images are also measured one by one; 0 leaves that out.
        confident: From which probability of the predicted class on it stands in for a label.
        precision: "fp32" is exact; "tf32" is faster on a GPU.
        progress: Called with how many images are done, of how many.

    Raises:
        ValueError: An argument is out of range, the set is empty, or its labels are not the network's classes.
    """
    _check(net, test_set, limit, batch, single, confident, precision)
    count = len(test_set) if limit is None else min(limit, len(test_set))
    if count == 0:
        raise ValueError(f"{test_set.name} has no images to measure gradients on.")
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
            own = None if truth is None else truth[numbers].to(device)
            found.append(meter.measure(images.to(device), own))
            advance(int(numbers[-1]) + 1)
        by_batch = Products.join([products for products, _ in found])
        outputs = Outputs.join([own for _, own in found])
        by_image = None
        if single:
            guesses = outputs.logits.argmax(1)[:single]
            wanted = guesses[None] if truth is None else torch.stack([truth[:single], guesses])
            by_image = _measure_images(ImageGradients(net, task), test_set, wanted, lambda done: advance(count + done))
    return _make_correlation(
        test_set.name, list(name_layers(net.encoder)), by_batch, by_image, outputs, truth, batch, confident
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
        raise ValueError(f"`confident` must lie in [0, 1], got {confident}.")
    if check_precision(precision) != torch.float32:
        raise ValueError(f'`precision` must be "fp32" or "tf32" here, got {precision!r}.')
    if net.channels is not None and test_set.shape[0] != net.channels:
        raise ValueError(f"{test_set.name} has {test_set.shape[0]} channels, the network takes {net.channels}.")


def _make_correlation(
    name: str,
    layers: list[str],
    by_batch: Products,
    by_image: Products | None,
    outputs: Outputs,
    truth: Tensor | None,
    batch: int,
    confident: float,
) -> Correlation:
    """Sum up what was measured."""
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
        task_error=float((outputs.answers != outputs.targets).double().mean()),
        task_loss=float(outputs.losses.double().mean()),
        task_confidence=float(torch.exp(-outputs.losses[:, 0].double()).mean()),
        confidence=float(top.double().mean()),
        entropy=float(entropy),
        error=None if truth is None else float((outputs.logits.argmax(1) != truth).double().mean()),
        loss=None if truth is None else float(F.cross_entropy(outputs.logits.double(), truth)),
    )


def summarise(products: Products, which: int, names: list[str], keep: Tensor | None = None) -> Agreement | None:
    """The mean agreement of some inner products.

    Args:
        products: By layer and by batch or image.
        which: Which of the sets of labels.
        names: The layers.
        keep: Which batches or images count, bool `(N,)`; None is all.

    Returns:
        None if none counts.
    """
    inner, main, task = products.inner[which].cpu().double(), products.main[which].cpu().double(), products.task
    task = task.cpu().double()
    if keep is not None:
        inner, main, task = inner[:, keep], main[:, keep], task[:, keep]
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


class BatchGradients:
    """Inner products of the gradients of the two mean losses of a batch.

    Args:
        net: The network; it is copied.
        task: The self-supervised task.
        confident: From which probability on a prediction stands in for a label.
    """

    def __init__(self, net: YNet, task: Task, confident: float = CONFIDENT) -> None:
        self.net, self.task, self.confident = freeze(net), task, confident
        self.net.encoder.requires_grad_(True)
        self.layers = name_layers(self.net.encoder)
        self._parameters = dict(self.net.encoder.named_parameters())
        self._graphs: dict[tuple[Any, ...], Captured | None] = {}

    def measure(self, images: Tensor, labels: Tensor | None) -> tuple[Products, Outputs]:
        """The inner products of one batch, and the network's outputs for its images.

        Args:
            images: `(N, C, H, W)` on the network's device.
            labels: int `(N,)`, or None.

        Returns:
            Products with N = 1: with the labels, if there are any, with the stand-ins, and with the balance; and the
            outputs.
        """
        inputs = (images,) if labels is None else (images, labels)
        key = (*images.shape, images.dtype, labels is None)
        with torch.inference_mode(False), torch.enable_grad():
            if can_record(images.device) and key not in self._graphs:
                self._graphs[key] = record(lambda: Captured(self._compute, *inputs))
            graph = self._graphs.get(key) or self._compute
            found = graph(*inputs)
        return Products(*found[:3]), Outputs(*found[3:])

    def _compute(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        others, targets, shared = split_views(self.task, images)
        plain = self.net.encoder(self.net.normalise(images))
        features = join_features(plain, self.net.encoder(self.net.normalise(others)), shared)
        answers = self.net.ssl(features)
        losses = self.task.loss(answers, targets.flatten()).view(targets.shape)
        logits = self.net.classifier(plain).float()
        probabilities = logits.detach().softmax(1)
        sure = (probabilities.amax(1) >= self.confident).float()
        stand_in = F.cross_entropy(logits, probabilities.argmax(1), reduction="none") * sure
        mains = [] if labels is None else [F.cross_entropy(logits, labels)]
        mains.append(stand_in.sum() / sure.sum().clamp(min=1))
        shares = logits.softmax(1).mean(0)
        mains.append((shares * shares.clamp(min=1e-12).log()).sum())  # log K less than its distance from even shares
        task = self._gradient(losses.mean())
        gradients = [self._gradient(loss) for loss in mains]
        return (
            torch.stack([self._sums(main, task) for main in gradients]).unsqueeze(2),
            torch.stack([self._sums(main, main) for main in gradients]).unsqueeze(2),
            self._sums(task, task).unsqueeze(1),
            logits.detach(),
            losses.detach(),
            answers.detach().argmax(1).view(targets.shape),
            targets,
        )

    def _gradient(self, loss: Tensor) -> dict[str, Tensor]:
        parameters = list(self._parameters.values())
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        return dict(zip(self._parameters, filled, strict=True))

    def _sums(self, one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> Tensor:
        """By layer, `(L,)`."""
        own = {name: (one[name] * two[name]).sum() for name in self._parameters}
        return torch.stack([torch.stack([own[name] for name in names]).sum() for names in self.layers.values()])


def observe(net: YNet, task: Task, images: Tensor) -> Outputs:
    """The outputs of a network in evaluation mode for images `(N, C, H, W)`."""
    views, targets = task.probe(images)
    outputs = net.self_supervise(views)
    targets = targets.view(len(images), -1)
    losses = task.loss(outputs, targets.flatten()).view(targets.shape)
    return Outputs(net(images).float(), losses, outputs.argmax(1).view(targets.shape), targets)


def find_labels(test_set: TestSet, net: YNet) -> Tensor | None:
    """The labels of a set as a network's loss takes them, int64 `(N,)`; None where the set has none such.

    Sets whose classes are made of the network's by a rule of their own (`vid-robust`) have none.

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
        raise ValueError(f"{test_set.name} has label {int(labels.max())}, the network {logits.shape[1]} classes.")
    return labels


def _measure_images(
    meter: ImageGradients, test_set: TestSet, labels: Tensor, advance: Callable[[int], None]
) -> Products:
    """The first images of a set one by one."""
    device, found = next(meter.net.parameters()).device, []
    for numbers, images, _ in test_set.chunks(meter.chunk, slice(labels.shape[1])):
        found.append(meter.products(images.to(device), labels[:, numbers].to(device)))
        advance(int(numbers[-1]) + 1)
    return Products.join(found)


def _cosine(inner: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Cosines from inner products and squared lengths; 0 where a gradient is zero."""
    length = (one * two).sqrt()
    return torch.where(length > 0, inner / length.clamp(min=1e-300), 0.0).clamp(-1, 1)


def _standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
