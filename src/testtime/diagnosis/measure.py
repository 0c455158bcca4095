"""Will Test-Time Training help on these images? A diagnosis without labels.

`diagnose` takes a network and a set of images, and returns a `Diagnosis`:

    task        error and loss of the self-supervised task, compared to the training data (`Reference`), and the drift
                of the loss along the stream
    branch      whether it is trained at all, by the same task on the training data
    hints       whether the task is trivial or ill-defined, as the paper warns (section 3, video frames): blank margins,
                borders that reveal the rotation, images without a canonical orientation
    agreement   whether the gradients of the two tasks on the encoder agree, with confident predictions as labels
    trial       a short stream of online learning: does the task's loss fall on new images, and how often does the guard
                intervene?
    verdict     the conclusion, with its uncertainty

With labels it adds the true agreement and the error before and after the trial. The verdict never depends on labels.
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
from testtime.data import families
from testtime.data.sets import DataError, TestSet
from testtime.diagnosis.batch_gradients import BALANCE, STAND_IN, BatchGradients, Outputs, observe
from testtime.diagnosis.correlation import Agreement, find_labels, summarise
from testtime.diagnosis.gradient_study import open_for
from testtime.diagnosis.gradients import Products, freeze
from testtime.diagnosis.result import Diagnosis, Estimate, Hints, Reference, Trial, Verdict
from testtime.diagnosis.verdict import judge
from testtime.evaluation.records import stream_order
from testtime.networks.task_loss import find_entry, find_guessing, read_task_loss
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic
from testtime.progress import Progress
from testtime.tasks import Rotation, Task

LIMIT = 500
TRIAL = 200
BATCH = 50
_BLANK = 0.03  # of an image's contrast; a row with less variation is blank
_LEAST = 32  # minimum number of images


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
    """Estimate from unlabelled images whether adapting to them is likely to help.

    Sets with more than `limit` images are subsampled at even intervals. The trial learns online from some of them, in
    random order (unless the set's order is fixed), for rotation from all four of each, without crops: it measures
    whether the task can be learned on this data.

    Args:
        net: A jointly trained network; it is not modified.
        test_set: The images, in the order of the stream.
        reference: The task on the training data, see `find_reference`.
        limit: Maximum number of images.
        trial: Maximum length of the trial's stream.
        steps: Gradient steps per image of the trial.
        lr: Learning rate of the trial.
        threshold: The gate's threshold, to report how many images it would select.
        seed: Seed of the trial.
        progress: Called with the images done, their total, and the set's name.

    Raises:
        TypeError: `net` is not a `YNet`.
        ValueError: There are too few images, an argument is out of range, or the images do not match the network.
    """
    if not isinstance(net, YNet):
        raise TypeError(f"`net` must be a YNet, the network rather than an adapter of it, got {type(net).__name__}.")
    for name, value in (("limit", limit), ("trial", trial)):
        if value < _LEAST:
            raise ValueError(f"`{name}` must be at least {_LEAST}, got {value}.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if not 0 <= threshold <= 1:
        raise ValueError(f"`threshold` must be in [0, 1], got {threshold}.")
    count = min(limit, len(test_set))
    if count < _LEAST:
        raise ValueError(f"{test_set.name} has {count} images; a diagnosis needs at least {_LEAST}.")
    task = tasks.make(net.card.task)
    learned = Rotation("all") if isinstance(task, Rotation) else task
    learner = Online(net, steps=steps, lr=lr, seed=seed, copies=1, task=learned, augment=CropFlip(0, False))
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
        stream = _run_trial(learner, test_set, numbers[chosen], seen, labels, lambda done: advance(count + done))
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
        "task": task.name,
        "chance": task.chance,
    }
    unjudged = Diagnosis(**about, verdict=Verdict("unclear", "", ()))
    return Diagnosis(**about, verdict=judge(unjudged, find_guessing(task)))


def diagnose_all(
    net: YNet, sets: Sequence[TestSet], *, progress: Progress | None = None, **options: Any
) -> list[Diagnosis]:
    """Diagnose several sets; on a CPU concurrently, one thread each, since single steps are too small to parallelise.

    Args:
        net: The network.
        sets: The sets.
        progress: Called with the images done, the total over all sets, and the current set's name.
        **options: Passed to `diagnose`.

    Raises:
        ValueError: As for `diagnose`.
    """
    done, totals, lock = [0] * len(sets), [0] * len(sets), threading.Lock()

    def one(index: int) -> Diagnosis:
        def advance(images: int, total: int, text: str) -> None:
            with lock:
                done[index], totals[index] = images, total
                if progress is not None:
                    progress(sum(done), sum(known or total for known in totals), text)

        return diagnose(net, sets[index], progress=advance, **options)

    threads = torch.get_num_threads()
    if len(sets) == 1 or threads == 1 or next(net.parameters()).device.type != "cpu":
        return [one(index) for index in range(len(sets))]
    with ThreadPoolExecutor(min(threads, len(sets)), "set", torch.set_num_threads, (1,)) as pool:
        running = [pool.submit(one, index) for index in range(len(sets))]
        try:
            return [each.result() for each in running]
        except BaseException:
            pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not wait for sets that have not started
            raise


class Inspection(NamedTuple):
    """Measurements of images without learning from them."""

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
    outputs = Outputs.join([part for _, part in found])
    products = Products.join([part for part, _ in found])
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
    """Measure what reveals the rotation of greyscale images, float `(N, H, W)`."""
    side = min(pictures.shape[1:])
    top, left = (pictures.shape[1] - side) // 2, (pictures.shape[2] - side) // 2
    square = pictures[:, top : top + side, left : left + side]
    contrast = (square.amax((1, 2)) - square.amin((1, 2)))[:, None]

    def blank(quarters: int) -> float:
        """Return the blank fraction at the top of the images after clockwise quarter turns."""
        rotated = square.rot90(-quarters, (1, 2))
        rows = (rotated.amax(2) - rotated.amin(2) <= _BLANK * contrast) & (contrast > 0)  # (N, rows)
        return float(rows.int().cumprod(1).sum(1).double().mean()) / side

    width = max(1, side // 8)
    ring = torch.ones(side, side, dtype=torch.bool, device="cpu")
    ring[width:-width, width:-width] = False
    wrong = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        other = slice(1 - (half.start or 0), None, 2)
        mean = square[half].mean(0)
        patterns = torch.stack([mean.rot90(quarters)[ring] for quarters in range(4)])  # (4, P)
        patterns = patterns - patterns.mean()
        views = torch.stack([square[other].rot90(quarters, (1, 2)) for quarters in range(4)], dim=1)[:, :, ring]
        wrong.append((views @ patterns.T).argmax(2) != torch.arange(4, device="cpu"))
    margins = blank(0), blank(1), blank(2), blank(3)  # top, left, bottom, right
    return Hints(margins, float(torch.cat(wrong).double().mean()))


def find_reference(
    net: YNet, name: str | None = None, root: str | Path | None = None, limit: int = LIMIT
) -> Reference | None:
    """Return how easy the task is on a network's training data.

    Args:
        net: The network.
        name: A set or a folder like its training data; None takes the test images of the set named in the network's
            card, if available, and otherwise what the network's statistics or the card's record say about the task.
        root: Root folder of the data sets.
        limit: Maximum number of images.

    Returns:
        None if it is not known.

    Raises:
        ValueError: The set does not exist.
        DataError: The set is missing or damaged.
    """
    if name is not None:
        return measure_reference(net, open_for(net, name, root), limit, name)
    record: Any = net.card.record  # from a file, not validated
    branch = find_entry(record, "branch")
    trained_on = find_entry(record if branch is None else branch, "configuration", "data", "name")
    if isinstance(trained_on, str):
        trained_on = trained_on.split("[", 1)[0]  # without the marks of a subset
        with contextlib.suppress(DataError, ValueError):  # not available here
            sized = net.card.size is not None and families.find(trained_on).sized
            options: dict[str, Any] = {"size": net.card.size} if sized else {}
            # Held-out images: the loss on training images would be too low.
            found = datasets.open(trained_on, root, **options)
            return measure_reference(net, found, limit, f"{trained_on}, test images")
    found = read_task_loss(net)
    return None if found is None else Reference(*found)


def measure_reference(net: YNet, test_set: TestSet, limit: int = LIMIT, source: str = "") -> Reference:
    """Measure how easy the task is on a set."""
    task = tasks.make(net.card.task)
    parts, pictures = [], []
    device = next(net.parameters()).device
    with torch.no_grad(), arithmetic("fp32", device):
        frozen = freeze(net)
        for _, images, _ in test_set.chunks(BATCH, _spread(len(test_set), min(limit, len(test_set)))):
            parts.append(observe(frozen, task, images.to(device)))
            pictures.append(images.float().mean(1))
        hints = find_hints(torch.cat(pictures))
    outputs = Outputs.join(parts)
    error = float(outputs.errors.double().mean())
    return Reference(source or test_set.name, float(outputs.losses.double().mean()), error, hints)


def _measure_task(outputs: Outputs, task: Task, threshold: float) -> dict[str, Any]:
    """Measure the task on the images, as entries of a diagnosis."""
    losses = outputs.losses.mean(1)
    offsets = outputs.offsets  # (N, V): with rotation, the predicted orientation of the image
    consistent = (offsets == offsets[:, :1]).all(1)
    return {
        "task_error": Estimate.of(outputs.errors.double().mean(1)),
        "task_loss": Estimate.of(losses),
        "drift": _slope(losses),
        "threshold": threshold,
        "gated": float(gate(task.confidence(outputs.losses), threshold).double().mean()),
        "consistent": float(consistent.double().mean()),
        "upright": float((offsets[consistent, 0] == 0).double().mean()) if consistent.any() else None,
    }


def _run_trial(
    learner: Online,
    test_set: TestSet,
    numbers: Tensor,
    outputs: Outputs,
    labels: Tensor | None,
    advance: Callable[[int], None],
) -> Trial:
    """Learn online from some samples of a set; `outputs` are those of the unadapted network."""
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
    """Return `count` evenly spaced indices out of `total`, ascending."""
    return torch.arange(count, device="cpu") * total // count


def _slope(losses: Tensor) -> Estimate:
    """Return the increase along the whole stream, by least squares."""
    values = losses.double()
    position = torch.linspace(-0.5, 0.5, len(values), dtype=torch.float64, device="cpu")
    scatter = float(position @ position)
    slope = float(position @ values) / scatter
    rest = values - values.mean() - slope * position
    return Estimate(slope, math.sqrt(float(rest @ rest) / (len(values) - 2) / scatter))
