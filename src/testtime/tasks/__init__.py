"""Self-supervised tasks, which a network can learn from unlabelled images.

A `Task` maps images to views with known targets, and a network's outputs on the views to losses. `Rotation`, the
paper's task, and `Jigsaw` are for any network; `Masked` is for vision transformers with a decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from testtime import kernels
from testtime.augment import Augment, CropFlip
from testtime.randomness import Draws, purpose_word
from testtime.tasks.base import ClassTask, Task
from testtime.tasks.jigsaw import Jigsaw
from testtime.tasks.masked import Masked
from testtime.tasks.rotation import Rotation

__all__ = [
    "TASKS",
    "ClassTask",
    "Jigsaw",
    "Masked",
    "Rotation",
    "Task",
    "count_views",
    "describe",
    "make",
    "make_views",
]

TASKS: dict[str, Callable[..., Task]] = {"rotation": Rotation, "jigsaw": Jigsaw, "masked": Masked}
"""Name → constructor."""


def make(specification: str | Mapping[str, Any]) -> Task:
    """Build a task from its name, or its name and arguments, e.g. `{"name": "rotation", "each": "all"}`.

    Raises:
        ValueError: The name or an argument is unknown.
    """
    arguments = {"name": specification} if isinstance(specification, str) else dict(specification)
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"`task` must be named one of {', '.join(TASKS)}, got {name!r}.")
    try:
        return TASKS[name](**arguments)
    except TypeError as error:
        raise ValueError(f"`task` {name!r}: {error}.") from None


def describe(task: Task) -> str | dict[str, Any]:
    """Return what `make` builds a task from, for a network's card: its name, with the arguments that are not defaults.

    How many rotations are taken of an image is not a property of the network, so `Rotation` is always "rotation".
    """
    if isinstance(task, Rotation) or task.name not in TASKS or not is_dataclass(task):
        return task.name
    given = {field.name: getattr(task, field.name) for field in fields(task) if field.default is not MISSING}
    defaults = {field.name: field.default for field in fields(task)}
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    return {"name": task.name, **changed} if changed else task.name


def count_views(task: Task) -> tuple[int, int]:
    """Return the number of views per image to learn from, and to observe."""
    side = 12 * getattr(task, "patch", 1)  # divisible by the patches or tiles of all tasks
    image = torch.zeros(1, 1, side, side, dtype=torch.uint8, device="cpu")
    views, _ = task.views(image, Draws.of(0, torch.zeros(1, dtype=torch.int64, device="cpu")))
    return len(views), len(task.probe(image)[0])


def make_views(images: Tensor, draws: Draws, copies: int, augment: Augment, task: Task) -> tuple[Tensor, Tensor]:
    """Make the views that a network learns from, and their targets.

    Args:
        images: `(N, C, H, W)`.
        draws: Keys `(N,)`.
        copies: Augmented copies per image.
        augment: Makes the copies.
        task: Makes the views and targets of each copy.

    Returns:
        Views `(N·copies·V, C, h, w)` and targets `(N·copies·V, ...)`, grouped by image.
    """
    if isinstance(augment, CropFlip) and isinstance(task, Rotation):
        words = purpose_word("crop"), purpose_word("flip"), purpose_word("rotation")
        form = augment.padding, augment.flip, 4 if task.each == "all" else 1
        made = kernels.take_over("make_views", images, draws.keys, copies, *form, words)
        if made is not None:
            return made
    keys = draws.copies(copies)  # (N, copies)
    return task.views(augment(images, keys).flatten(0, 1), keys.flatten())
