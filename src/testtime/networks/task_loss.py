"""How easy a network's self-supervised task was on the data it was trained on, to compare a stream with."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from testtime import augment as augmentations
from testtime import tasks
from testtime.networks.ynet import YNet, check_task
from testtime.randomness import Draws
from testtime.tasks import Task, make_views

EASY = 1.5
"""Times the loss on the training data, up to which the task counts as equally easy."""


class TaskLoss(NamedTuple):
    """The task on a network's training data, or on images like these.

    Attributes:
        source: Where the values come from.
        loss: The task's mean loss.
        error: The task's error; None if only the loss is known.
    """

    source: str
    loss: float
    error: float | None = None


def measure_drift(loss: Any, known: float) -> Any:
    """Return a task's loss, a number or a tensor, relative to the loss on the training data; 1: nothing has changed."""
    return loss / max(known, 1e-6)


@torch.no_grad()
def measure_task(net: YNet, images: Tensor, draws: Draws) -> dict[str, Tensor] | None:
    """Measure the task on images `(N, C, H, W)`, with one augmented copy of each, and on the plain images.

    Args:
        net: The network, in evaluation mode.
        images: The images.
        draws: Keys `(N,)`.

    Returns:
        The losses `(N,)` of copies and of plain images; None if there is no branch, it does not fit the task, or task
        or augmentation are not among those of this package.
    """
    if net.ssl is None:
        return None
    try:
        task, augment = tasks.make(net.card.task), augmentations.make(net.card.augment)
        check_task(net, task)
    except ValueError:
        return None
    made = {"copies": make_views(images, draws, 1, augment, task), "plain": task.probe(images)}
    losses = {}
    for name, (views, targets) in made.items():
        outputs = net.self_supervise(views)
        if task.outputs is not None and outputs.shape[1:] != (task.outputs,):
            return None
        losses[name] = task.loss(outputs, targets).view(len(images), -1).mean(1)
    return losses


def read_task_loss(net: YNet, images: Literal["copies", "plain"] = "plain", *, seen: bool = False) -> TaskLoss | None:
    """Return what a network's statistics or the record of its card say about the task; None if they say nothing.

    Args:
        net: The network.
        images: Whether to compare with augmented copies or with plain images; the record does not distinguish them.
        seen: Whether to compare with images that the network was trained on, even if others were measured.
    """
    about: Any = {} if net.statistics is None else net.statistics.about  # from a file, not validated
    for kind, known in (("unseen images", find_entry(about, "unseen")), ("images", about)):
        measured = find_entry(known, "task", images)
        if isinstance(measured, float) and not (seen and known is not about):
            return TaskLoss(f"the statistics, {known.get('images')} {kind}", measured)
    record: Any = net.card.record
    for key, kind in (("held_out", "held-out"), ("training", "training")):
        known = [find_entry(record, "branch", key, name) for name in ("loss", "error")]
        if all(isinstance(value, float) for value in known):
            return TaskLoss(f"the card, {kind} images of the branch", *known)
    epochs = record.get("epochs")
    loss = find_entry(epochs[-1], "task") if isinstance(epochs, list) and epochs else None
    if isinstance(loss, float):
        return TaskLoss("the card, augmented training images in the last epoch", loss)
    if find_entry(record, "configuration", "recipe", "method") in ("plain", "alp"):
        task = tasks.make(net.card.task)
        return TaskLoss("the card: the training did not include the task", find_guessing(task), task.chance)
    return None


def find_guessing(task: Task) -> float:
    """Return a task's loss at chance level."""
    return task.chance if task.outputs is None else math.log(task.outputs)


def find_entry(table: Any, *keys: str) -> Any:
    """Return an entry of nested dictionaries, or None if there is none."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table
