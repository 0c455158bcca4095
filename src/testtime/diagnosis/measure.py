"""Will Test-Time Training help on these images? What can be said without labels, and a verdict in words.

`diagnose` takes a network and a set of images, and returns a `Diagnosis`:

    task        error and loss of the self-supervised task, against the training data's (`Reference`), and whether the
                loss drifts along the stream
    hints       what would make the task trivial or ill-defined, the paper's warning (section 3, video frames): blank
                margins, borders that give the turn away, images that lie in all directions
    agreement   whether the two tasks pull the encoder the same way, with confident predictions in place of labels
    trial       a short stream of online learning: does the task get easier for images not yet seen, and does the guard
                have to step in?
    verdict     what follows, and how sure it is

With labels it adds the true agreement and the error before and after the trial. No label is read for the verdict.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime import data as datasets
from testtime import tasks
from testtime.adaptation.adapters import Online
from testtime.adaptation.guard import gate
from testtime.adaptation.prediction import Prediction
from testtime.augment import CropFlip
from testtime.data.sets import DataError, TestSet
from testtime.diagnosis.correlation import (
    BALANCE,
    STAND_IN,
    Agreement,
    BatchGradients,
    Outputs,
    find_labels,
    observe,
    summarise,
)
from testtime.diagnosis.gradient_study import open_for
from testtime.diagnosis.gradients import Products, freeze
from testtime.diagnosis.verdict import Diagnosis, Estimate, Hints, Reference, Trial, Verdict, judge
from testtime.evaluation.records import stream_order
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic
from testtime.progress import Progress
from testtime.tasks import Rotation, Task

LIMIT = 500
TRIAL = 200
BATCH = 50
_BLANK = 0.03  # of an image's contrast: a row that varies by less is blank
_LEAST = 32  # images below which nothing is said


def diagnose(
    net: YNet,
    test_set: TestSet,
    *,
    reference: Reference | None = None,
    limit: int = LIMIT,
    trial: int = TRIAL,
    steps: int = 1,
    lr: float = 0.001,
    threshold: float = 0.9,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Inspect images without their labels and say whether adapting to them is likely to help.

    Of a set with more than `limit` images, evenly spaced ones are taken from its beginning to its end. The trial takes
    some of them in random order (in the set's own order where that is what it tests), and learns from each in its four
    rotations, without crops: what it measures is whether the task can be learned here at all.

    Args:
        net: A jointly trained network; it is not changed.
        test_set: The images, in the order of the stream.
        reference: How easy the task is on the training data, see `find_reference`.
        limit: At most so many images.
        trial: At most so many of them are the trial's stream.
        steps: Gradient steps on each image of the trial.
        lr: Learning rate of the trial.
        threshold: The gate's threshold, to say how many images it would let through.
        seed: Seed of the trial.
        progress: Called with how many images are done, of how many.

    Raises:
        ValueError: There are too few images, an argument is out of range, or the images do not fit the network.
    """
    for name, value in (("limit", limit), ("trial", trial)):
        if value < _LEAST:
            raise ValueError(f"`{name}` must be at least {_LEAST}, got {value}.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if not 0 <= threshold <= 1:
        raise ValueError(f"`threshold` must lie in [0, 1], got {threshold}.")
    count = min(limit, len(test_set))
    if count < _LEAST:
        raise ValueError(f"{test_set.name} has {count} images; a diagnosis needs at least {_LEAST}.")
    task = tasks.make(net.card.task)
    learner = Online(net, steps=steps, lr=lr, seed=seed, copies=1, task=Rotation("all"), augment=CropFlip(0, False))
    trial = min(trial, count)
    numbers = _spread(len(test_set), count)
    labels = find_labels(test_set, net)

    def advance(done: int) -> None:
        if progress is not None:
            progress(done, count + trial, test_set.name)

    chosen = _spread(count, trial) if test_set.ordered else stream_order(count, seed)[:trial]
    with torch.inference_mode(False), arithmetic("fp32", next(net.parameters()).device):
        found = inspect_images(net, task, test_set, numbers, labels, advance)
        seen = found.outputs.pick(chosen)
        stream = _try(learner, test_set, numbers[chosen], seen, labels, lambda done: advance(count + done))
        measured = _measure_task(found.outputs, task, threshold)
    about: dict[str, Any] = {
        "name": test_set.name,
        "images": count,
        **measured,
        "reference": reference,
        "hints": found.hints,
        "confident": found.confident,
        "agreement": found.agreement,
        "balance": found.balance,
        "true_agreement": found.true_agreement,
        "trial": stream,
    }
    unjudged = Diagnosis(**about, verdict=Verdict("unclear", "", ()))
    return Diagnosis(**about, verdict=judge(unjudged, math.log(task.outputs)))


def diagnose_all(
    net: YNet, sets: Sequence[TestSet], *, progress: Progress | None = None, **options: Any
) -> list[Diagnosis]:
    """Diagnose several sets; on a CPU concurrently, each on one core, since their steps are too small to share.

    Args:
        net: The network.
        sets: The sets.
        progress: Called with how many images of all sets are done, of how many.
        **options: What `diagnose` takes.

    Raises:
        ValueError: As for `diagnose`.
    """
    done, totals, lock = [0] * len(sets), [0] * len(sets), threading.Lock()

    def one(place: int) -> Diagnosis:
        def advance(images: int, total: int, text: str) -> None:
            with lock:
                done[place], totals[place] = images, total
                if progress is not None:
                    progress(sum(done), sum(own or total for own in totals), text)

        return diagnose(net, sets[place], progress=advance, **options)

    threads = torch.get_num_threads()
    if len(sets) == 1 or threads == 1 or next(net.parameters()).device.type != "cpu":
        return [one(place) for place in range(len(sets))]
    with ThreadPoolExecutor(min(threads, len(sets)), "set", torch.set_num_threads, (1,)) as pool:
        running = [pool.submit(one, place) for place in range(len(sets))]
        try:
            return [each.result() for each in running]
        except BaseException:
            pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for the sets that have not begun
            raise


class Inspection(NamedTuple):
    """What can be said of images without learning from them."""

    outputs: Outputs
    hints: Hints
    confident: float
    agreement: Agreement | None
    balance: Agreement | None
    true_agreement: Agreement | None


def inspect_images(
    net: YNet, task: Task, test_set: TestSet, numbers: Tensor, labels: Tensor | None, advance: Callable[[int], None]
) -> Inspection:
    """Inspect some samples of a set; `labels` are those of the whole set, or None."""
    device = next(net.parameters()).device
    meter = BatchGradients(net, task)
    found: list[tuple[Products, Outputs]] = []
    pictures: list[Tensor] = []
    for part, images, _ in test_set.chunks(BATCH, numbers):
        if net.channels is not None and images.shape[1] != net.channels:
            raise ValueError(f"{test_set.name} has {images.shape[1]} channels, the network takes {net.channels}.")
        found.append(meter.measure(images.to(device), None if labels is None else labels[part].to(device)))
        pictures.append(images.float().mean(1))
        advance(sum(map(len, pictures)))
    outputs = Outputs.join([own for _, own in found])
    products = Products.join([own for own, _ in found])
    sure = outputs.logits.softmax(1).amax(1) >= meter.confident
    names = list(meter.layers)
    return Inspection(
        outputs,
        find_hints(torch.cat(pictures)),
        float(sure.double().mean()),
        summarise(products, STAND_IN, names, torch.stack([part.any() for part in sure.split(BATCH)])),
        summarise(products, BALANCE, names),
        None if labels is None else summarise(products, 0, names),
    )


def find_hints(pictures: Tensor) -> Hints:
    """What gives the turn of gray pictures, float `(N, H, W)`, away."""
    side = min(pictures.shape[1:])
    top, left = (pictures.shape[1] - side) // 2, (pictures.shape[2] - side) // 2
    square = pictures[:, top : top + side, left : left + side]
    contrast = (square.amax((1, 2)) - square.amin((1, 2)))[:, None]

    def blank(turn: int) -> float:
        """The share of the side that is blank at the top once the pictures are turned clockwise so many times."""
        turned = square.rot90(-turn, (1, 2))
        rows = (turned.amax(2) - turned.amin(2) <= _BLANK * contrast) & (contrast > 0)  # (N, rows)
        return float(rows.int().cumprod(1).sum(1).double().mean()) / side

    width = max(1, side // 8)
    ring = torch.ones(side, side, dtype=torch.bool, device="cpu")
    ring[width:-width, width:-width] = False
    wrong = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        other = slice(1 - (half.start or 0), None, 2)
        mean = square[half].mean(0)
        patterns = torch.stack([mean.rot90(turn)[ring] for turn in range(4)])  # (4, P)
        patterns = patterns - patterns.mean()
        views = torch.stack([square[other].rot90(turn, (1, 2)) for turn in range(4)], dim=1)[:, :, ring]
        wrong.append((views @ patterns.T).argmax(2) != torch.arange(4, device="cpu"))
    margins = blank(0), blank(1), blank(2), blank(3)  # top, left, bottom, right
    return Hints(margins, float(torch.cat(wrong).double().mean()))


def find_reference(
    net: YNet, name: str | None = None, root: str | Path | None = None, limit: int = LIMIT
) -> Reference | None:
    """How easy the task is on the data that a network was trained on.

    Args:
        net: The network.
        name: A set or a folder that is like its training data; None takes the test images of the set that the
            network's card names, if they are there, and otherwise the loss that the card recorded in the last epoch.
        root: Where data sets are looked for.
        limit: At most so many images.

    Returns:
        None if nothing is known.

    Raises:
        ValueError: There is no set of that name.
        DataError: The set is not there or damaged.
    """
    if name is not None:
        return measure_reference(net, open_for(net, name, root), limit, name)
    record: Any = net.card.record  # as its file has it, which may be anything
    trained_on = record
    for key in ("configuration", "data", "name"):
        trained_on = trained_on.get(key) if isinstance(trained_on, dict) else None
    if isinstance(trained_on, str):
        options: dict[str, Any] = (
            {"size": net.card.size} if net.card.size is not None and trained_on != "cifar10" else {}
        )
        with contextlib.suppress(DataError, ValueError):  # not there, or a folder of somebody's own
            # Held-out images, where there are any: on those it was trained on a network is better than it is.
            found = datasets.open(trained_on, root, **options)
            return measure_reference(net, found, limit, f"{trained_on}, test images")
    epochs = record.get("epochs")
    loss = epochs[-1].get("task") if isinstance(epochs, list) and epochs and isinstance(epochs[-1], dict) else None
    if isinstance(loss, float):
        return Reference("the card, augmented training images in the last epoch", loss)
    return None


def measure_reference(net: YNet, test_set: TestSet, limit: int = LIMIT, source: str = "") -> Reference:
    """How easy the task is on a set."""
    task = tasks.make(net.card.task)
    parts, pictures = [], []
    device = next(net.parameters()).device
    with torch.no_grad(), arithmetic("fp32", device):
        still = freeze(net)
        for _, images, _ in test_set.chunks(BATCH, _spread(len(test_set), min(limit, len(test_set)))):
            parts.append(observe(still, task, images.to(device)))
            pictures.append(images.float().mean(1))
        hints = find_hints(torch.cat(pictures))
    outputs = Outputs.join(parts)
    error = float((outputs.answers != outputs.targets).double().mean())
    return Reference(source or test_set.name, float(outputs.losses.double().mean()), error, hints)


def _measure_task(outputs: Outputs, task: Task, threshold: float) -> dict[str, Any]:
    """What a diagnosis says of the task on the images seen."""
    losses = outputs.losses.mean(1)
    turns = (outputs.answers - outputs.targets) % task.outputs  # (N, V): which way up the image is taken to be
    consistent = (turns == turns[:, :1]).all(1)
    return {
        "task_error": Estimate.of((turns != 0).double().mean(1)),
        "task_loss": Estimate.of(losses),
        "drift": _slope(losses),
        "threshold": threshold,
        "gated": float(gate(torch.exp(-outputs.losses[:, 0]), threshold).double().mean()),
        "consistent": float(consistent.double().mean()),
        "upright": float((turns[consistent, 0] == 0).double().mean()) if consistent.any() else None,
    }


def _try(
    learner: Online,
    test_set: TestSet,
    numbers: Tensor,
    outputs: Outputs,
    labels: Tensor | None,
    advance: Callable[[int], None],
) -> Trial:
    """Learn along some samples of a set; `outputs` is what the unadapted network says of them."""
    parts: list[Prediction] = []
    for part, images, _ in test_set.chunks(8, numbers):
        parts.append(learner.predict(images, part))
        advance(sum(map(len, parts)))
    answers = Prediction.join(parts)
    late = slice(len(numbers) // 2, None)
    now = answers.loss_before[late].cpu()
    before, after = outputs.logits.argmax(1), answers.classes.cpu()
    wrong = None if labels is None else [guess != labels[numbers] for guess in (before, after)]
    return Trial(
        images=len(numbers),
        steps=learner.settings.steps,
        lr=learner.settings.lr,
        fall=Estimate.of(outputs.losses.mean(1)[late] - now),
        loss=Estimate.of(now),
        rolled_back=float(answers.rolled_back.double().mean()),
        changed=float((before != after).double().mean()),
        error_before=None if wrong is None else float(wrong[0].double().mean()),
        error_after=None if wrong is None else float(wrong[1].double().mean()),
        gain=None if wrong is None else Estimate.of(wrong[0].double() - wrong[1].double()),
    )


def _spread(total: int, count: int) -> Tensor:
    """`count` of `total` numbers in even steps, rising."""
    return torch.arange(count, device="cpu") * total // count


def _slope(losses: Tensor) -> Estimate:
    """By how much a value rises along its whole length, by least squares."""
    values = losses.double()
    place = torch.linspace(-0.5, 0.5, len(values), dtype=torch.float64, device="cpu")
    scatter = float(place @ place)
    slope = float(place @ values) / scatter
    rest = values - values.mean() - slope * place
    return Estimate(slope, math.sqrt(float(rest @ rest) / (len(values) - 2) / scatter))
