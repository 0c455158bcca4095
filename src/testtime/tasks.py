"""Self-supervised tasks, which a network can learn from unlabelled images.

A `Task` maps images to views with known targets, and a network's outputs on the views to losses. `Rotation` (Gidaris et
al. 2018), the paper's task, is to predict by which multiple of 90° an image was rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime import kernels
from testtime.augment import Augment, CropFlip
from testtime.randomness import Draws, purpose_word


class Task(Protocol):
    """The interface of a self-supervised task.

    Views are grouped by image: with V views per image, views `n·V … n·V + V - 1` belong to image n.
    """

    @property
    def name(self) -> str:
        """The name used in checkpoints and reports."""
        ...

    @property
    def outputs(self) -> int:
        """Number of outputs of the self-supervised branch."""
        ...

    def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return views `(N·V, C, h, w)` of images `(N, C, H, W)` and targets `(N·V,)`; draws has keys `(N,)`."""
        ...

    def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return deterministic views, the unchanged image first, to measure the task's loss and confidence on."""
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss per view, `(M,)`, of outputs `(M, outputs)` and targets `(M,)`; exp(-loss) is confidence."""
        ...


@dataclass(frozen=True)
class Rotation:
    """Predict by which multiple of 90° an image was rotated.

    Rotations are exact, without interpolation or filling. An image that is not square is first cropped to its central
    square, so that all rotations have the same shape.

    Attributes:
        each: "random": one random rotation per image; "all": all four rotations.
    """

    each: Literal["random", "all"] = "random"

    def __post_init__(self) -> None:
        if self.each not in get_args(Literal["random", "all"]):
            raise ValueError(f'`each` must be "random" or "all", got {self.each!r}.')

    @property
    def name(self) -> str:
        return "rotation"

    @property
    def outputs(self) -> int:
        return 4

    def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        if self.each == "all":
            return self.probe(images)
        targets = draws.purpose("rotation").integers(4)
        images = _central_square(images)
        # Rotate all and select, rather than index: shapes must not depend on the draws.
        half = torch.where((targets >= 2)[:, None, None, None], images.rot90(2, (-2, -1)), images)
        return torch.where((targets % 2 == 1)[:, None, None, None], half.rot90(1, (-2, -1)), half), targets

    def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rotated = kernels.take_over("rotate", images)
        if rotated is not None:
            return rotated
        images = _central_square(images)
        views = torch.stack([images.rot90(k, (-2, -1)) for k in range(4)], dim=1).flatten(0, 1)
        return views, torch.arange(4, device=images.device).repeat(len(images))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets, reduction="none")


TASKS: dict[str, Callable[..., Task]] = {"rotation": Rotation}
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


def count_views(task: Task) -> tuple[int, int]:
    """Return the number of views per image to learn from, and to observe."""
    image = torch.zeros(1, 1, 32, 32, dtype=torch.uint8, device="cpu")
    views, _ = task.views(image, Draws.of(0, torch.zeros(1, dtype=torch.int64, device="cpu")))
    return len(views), len(task.probe(image)[0])


def _central_square(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


def make_views(images: Tensor, draws: Draws, copies: int, augment: Augment, task: Task) -> tuple[Tensor, Tensor]:
    """Make the views that a network learns from, and their targets.

    Args:
        images: `(N, C, H, W)`.
        draws: Keys `(N,)`.
        copies: Augmented copies per image.
        augment: Makes the copies.
        task: Makes the views and targets of each copy.

    Returns:
        Views `(N·copies·V, C, h, w)` and targets `(N·copies·V,)`, grouped by image.
    """
    if isinstance(augment, CropFlip) and isinstance(task, Rotation):
        words = purpose_word("crop"), purpose_word("flip"), purpose_word("rotation")
        form = augment.padding, augment.flip, 4 if task.each == "all" else 1
        made = kernels.take_over("make_views", images, draws.keys, copies, *form, words)
        if made is not None:
            return made
    keys = draws.copies(copies)  # (N, copies)
    return task.views(augment(images, keys).flatten(0, 1), keys.flatten())
