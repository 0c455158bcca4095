"""The settings of an adapter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from testtime.adaptation.guard import Guard
from testtime.augment import Augment
from testtime.checks import format_value, is_integer, is_number, is_table_of
from testtime.networks.batch_norms import Statistics
from testtime.precision import Precision, check_precision
from testtime.tasks import Task

UpdateName = Literal["norm", "norm-early", "encoder", "encoder+ssl", "all", "none"]
Update = UpdateName | tuple[str, ...] | Callable[[str, nn.Parameter], bool]
Share = Literal["image", "batch"]


@dataclass(frozen=True)
class Settings:
    """The settings of an adapter. The defaults are the paper's for CIFAR-10.

    Attributes:
        steps: Gradient steps per image, each on newly drawn views; 0 disables learning.
        lr: Learning rate.
        copies: Augmented copies of the image per step.
        threshold: Adapt only if the confidence on the plain image is below this; 1 always adapts.
        update: Which parameters learn: "encoder+ssl" (as in the authors' code), "encoder" (as in the paper), "norm"
            (affine parameters of the normalization layers in encoder and classifier), "norm-early" (the same without
            the last quarter of the network's stages, e.g. the last one of a ResNet), "all" (encoder and classifier) or
            "none"; or a list of patterns of parameter names, e.g. `["encoder.layer4.*", "*.norm*.weight"]`; or a
            callable `(name, parameter)` that returns whether it learns. Parameters without `requires_grad` never do.
        share: "image" updates on every image separately, "batch" on all images of a call together.
        statistics: Statistics used by Batch Normalization: "source", those of training; "running", updated with the
            views while learning, which degrades a stream of single images; "batch", those of the current batch. None:
            "source" if every image is learned from separately, except that networks trained jointly by `train` use
            "running", as in the paper; "running" if a batch shares its updates.
        optimizer: A `torch.optim` class, or a callable `(parameters, lr=lr)` that returns an optimizer.
        seed: Seed of the augmentations.
        guard: Undo an update if the loss on the image becomes non-finite or increases by more than this. A `Guard`
            also follows the stream for collapse, and says what to fall back to.
        precision: "fp32" is exact; "tf32" and "bf16" are faster on a GPU. Weights and updates are always float32.
            None: "tf32" on CUDA, else "fp32".
        mirrored: Average the logits of the image and its mirror image.
        measure_loss: Measure the task's loss on the plain image before and after learning. If false, a step is faster;
            the prediction's losses and confidence are NaN, and the guard limits no rise of the loss. Methods whose
            answer comes with the loss, or depends on it, measure it in any case.
        task: The self-supervised task; None: the network's.
        augment: The augmentation of the copies; None: the one the network was trained with.
        resets: "never", or after how many updates a stream starts again from the original network.
        constants: Constants of the method's objective, by name, that differ from its own, e.g. `{"memory": 0}`.
    """

    steps: int
    lr: float = 0.001
    copies: int = 32
    threshold: float = 1.0
    update: Update = "encoder+ssl"
    share: Share = "image"
    statistics: Statistics | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    seed: int = 0
    guard: float | Guard = 3.0
    precision: Precision | None = None
    mirrored: bool = False
    measure_loss: bool = True
    task: Task | None = None
    augment: Augment | None = None
    resets: int | Literal["never"] = "never"
    constants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"`steps` must be at least 0, got {self.steps}.")
        if self.copies < 1:
            raise ValueError(f"`copies` must be at least 1, got {self.copies}.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"`lr` must be positive, got {self.lr}.")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"`threshold` must be in [0, 1], got {self.threshold}.")
        if self.threshold < 1 and not self.measure_loss:
            raise ValueError(f"`threshold` must be 1 if `measure_loss` is false, got {self.threshold}.")
        if not isinstance(self.guard, Guard) and not (isinstance(self.guard, int | float) and self.guard > 0):
            raise ValueError(
                "`guard` must be positive (infinity allows any finite rise), or a Guard, got "
                f"{format_value(self.guard)}."
            )
        if not callable(self.optimizer):
            raise ValueError(
                "`optimizer` must be a torch.optim class such as torch.optim.SGD, or a callable, got "
                f"{format_value(self.optimizer)}."
            )
        # `Task` is a protocol: tasks of users need not derive from it. A class is not a task yet.
        if self.task is not None and (isinstance(self.task, type) or not hasattr(self.task, "probe")):
            raise ValueError(f"`task` must be a Task such as tt.Rotation(), got {format_value(self.task)}.")
        if self.augment is not None and not callable(self.augment):
            raise ValueError(
                f"`augment` must be an augmentation such as tt.CropFlip(), got {format_value(self.augment)}."
            )
        if self.resets != "never" and not is_integer(self.resets, 1):
            raise ValueError(f'`resets` must be "never" or an integer of at least 1, got {format_value(self.resets)}.')
        if not is_table_of(is_number)(self.constants):
            raise ValueError(f"`constants` must be numbers by name, got {format_value(self.constants)}.")
        check_precision(self.precision)
        if isinstance(self.update, list):
            object.__setattr__(self, "update", tuple(self.update))
        _check_update(self.update)
        for name, kind in (("share", Share), ("statistics", Statistics)):
            value = getattr(self, name)
            if value not in get_args(kind) and not (name == "statistics" and value is None):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(kind))}, got {value!r}.")

    def describe(self) -> dict[str, Any]:
        """Return the settings, JSON-serializable."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("optimizer", "task", "augment", *(["update"] if callable(self.update) else [])):
            plain[name] = getattr(plain[name], "__qualname__", repr(plain[name]))
        if isinstance(self.update, tuple):
            plain["update"] = list(self.update)
        if isinstance(self.guard, Guard):
            plain["guard"] = self.guard.describe()
        if self.statistics in (None, "running"):  # records of version 0.1 do not have it
            del plain["statistics"]
        if self.resets == "never":
            del plain["resets"]
        if self.measure_loss:
            del plain["measure_loss"]
        if not self.constants:
            del plain["constants"]
        return plain


def _check_update(update: Any) -> None:
    is_patterns = isinstance(update, tuple) and update and all(isinstance(one, str) and one for one in update)
    if not (is_patterns or callable(update) or (isinstance(update, str) and update in get_args(UpdateName))):
        raise ValueError(
            f"`update` must be one of {', '.join(get_args(UpdateName))}, a list of patterns of parameter names, or a "
            f"callable, got {update!r}."
        )


Kind = TypeVar("Kind", bound=type)


def document_settings(steps: int) -> Callable[[Kind], Kind]:
    """Return a decorator that replaces `**settings` in the signature and docstring of an adapter by the settings.

    Args:
        steps: The adapter's default of `steps`.
    """

    def document(kind: Kind) -> Kind:
        signature = inspect.signature(kind.__init__)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        defaults = {f.name: {} if f.default is MISSING else f.default for f in fields(Settings)} | {"steps": steps}
        more = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=defaults[f.name], annotation=f.type)
            for f in fields(Settings)
            if f.name not in signature.parameters
        ]
        kind.__init__.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        if kind.__doc__ and Settings.__doc__:  # python -OO removes them
            listed = inspect.cleandoc(Settings.__doc__).partition("Attributes:\n")[2]
            kind.__doc__ = f'{inspect.cleandoc(kind.__doc__)}\n\nSettings (defaults of the method "ttt"):\n{listed}\n'
        return kind

    return document
