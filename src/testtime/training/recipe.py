"""Training recipes: the method and its hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from testtime.augment import AugMix
from testtime.precision import Precision, check_precision
from testtime.tasks import Task

LossName = Literal["plain", "joint", "robust", "alp", "uda"]
Schedule = Literal["steps", "cosine"]
Optimizer = Literal["sgd", "adamw"]


class TrainingError(RuntimeError):
    """Training cannot continue; the message gives the reason and the last good checkpoint."""


@dataclass(frozen=True)
class Recipe:
    """The method and hyperparameters of a training. The defaults are the paper's for CIFAR-10.

    Attributes:
        method: "plain", "joint", "robust", "alp" or "uda".
        epochs: Passes over the training set.
        batch: Images per step, over all processes. The last, incomplete batch of an epoch is dropped.
        lr: Learning rate.
        drops: Epochs, counted from 0, at which the learning rate is divided by 10 ("steps").
        momentum: Momentum of SGD; unused by AdamW.
        weight_decay: Weight decay, on all parameters.
        weight: Weight of the self-supervised losses ("joint", "robust", "uda").
        views: Of the rotation task, "all": all four rotations of an image; "random": one drawn at random.
        seed: Seed of shuffling, augmentation and attacks.
        precision: "fp32" is exact; "tf32" and "bf16" are faster on a GPU. Parameters and their updates remain float32.
        pairing: Weight of the distance between clean and adversarial logits ("alp").
        epsilon: Maximum perturbation of a pixel by the attack, for pixels in [0, 1] ("alp").
        attack_steps: Steps of the attack ("alp").
        attack_lr: Step size of the attack, for pixels in [0, 1] ("alp").
        task: The self-supervised task; None for the network's own.
        schedule: "steps": divide the learning rate at `drops`; "cosine": decrease it to 0 along half a cosine.
        consistency: Weight of the Jensen-Shannon divergence between an image and its augmented views ("robust").
        severity: Strength of these views, up to 10, see `augment.AugMix` ("robust").
        optimizer: "sgd" or "adamw".
        warmup: Epochs at the beginning in which the learning rate rises linearly.
    """

    method: LossName = "joint"
    epochs: int = 150
    batch: int = 128
    lr: float = 0.1
    drops: tuple[int, ...] = (75, 125)
    momentum: float = 0.9
    weight_decay: float = 5e-4
    weight: float = 1.0
    views: Literal["all", "random"] = "all"
    seed: int = 0
    precision: Precision = "fp32"
    pairing: float = 0.5
    epsilon: float = 8 / 255
    attack_steps: int = 7
    attack_lr: float = 2 / 255
    task: Task | None = None
    schedule: Schedule = "steps"
    consistency: float = 12.0
    severity: float = 3.0
    optimizer: Optimizer = "sgd"
    warmup: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "drops", tuple(self.drops))
        if self.method not in get_args(LossName):
            raise ValueError(f"`method` must be one of {', '.join(get_args(LossName))}, got {self.method!r}.")
        if self.views not in ("all", "random"):
            raise ValueError(f'`views` must be "all" or "random", got {self.views!r}.')
        if self.schedule not in get_args(Schedule):
            raise ValueError(f'`schedule` must be "steps" or "cosine", got {self.schedule!r}.')
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(f'`optimizer` must be "sgd" or "adamw", got {self.optimizer!r}.')
        if not 0 <= self.warmup < max(1, self.epochs):
            raise ValueError(f"`warmup` must be at least 0 and less than `epochs`, got {self.warmup}.")
        check_precision(self.precision)
        AugMix(self.severity)
        for name in ("epochs", "batch", "attack_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("lr", "attack_lr", "epsilon"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        for name in ("weight_decay", "weight", "pairing", "consistency"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum}.")
        if list(self.drops) != sorted(set(self.drops)) or any(drop < 1 for drop in self.drops):
            raise ValueError(f"`drops` must be increasing epochs, at least 1, got {self.drops}.")

    @staticmethod
    def cifar(norm: Literal["group", "batch"] = "group", **changes: Any) -> Recipe:
        """The paper's recipe for CIFAR-10: 150 epochs with Group, 75 with Batch Normalization."""
        if norm not in ("group", "batch"):
            raise ValueError(f'`norm` must be "group" or "batch", got {norm!r}.')
        base = Recipe() if norm == "group" else Recipe(epochs=75, drops=(50, 65))
        return replace(base, **changes)

    @staticmethod
    def imagenet(**changes: Any) -> Recipe:
        """The paper's recipe for ImageNet: 90 epochs, batches of 256, one random rotation per image."""
        base = Recipe(epochs=90, batch=256, drops=(30, 60), weight_decay=1e-4, views="random")
        return replace(base, **changes)

    @staticmethod
    def robust(**changes: Any) -> Recipe:
        """Joint training with AugMix views and a consistency loss, for networks that are robust before they adapt.

        The severity and the weight of the consistency are those published for AugMix.
        """
        return replace(Recipe(method="robust", schedule="cosine", drops=()), **changes)

    @staticmethod
    def digits(**changes: Any) -> Recipe:
        """A recipe for the built-in digits that takes seconds; not from the paper."""
        return replace(Recipe(epochs=20, batch=32, drops=(14, 18)), **changes)

    @staticmethod
    def vit(**changes: Any) -> Recipe:
        """A recipe for vision transformers on sets like CIFAR-10, with AdamW and warm-up; not from the paper."""
        base = Recipe(epochs=300, batch=256, lr=1e-3, drops=(), weight_decay=0.05, schedule="cosine")
        return replace(base, **{"optimizer": "adamw", "warmup": 10, **changes})

    def over(self, epochs: int) -> Recipe:
        """Scale the schedule, including drops and warm-up, to another number of epochs."""
        drops = sorted({max(1, round(drop * epochs / self.epochs)) for drop in self.drops})
        warmup = min(round(self.warmup * epochs / self.epochs), epochs - 1)
        return replace(self, epochs=epochs, drops=tuple(drop for drop in drops if drop < epochs), warmup=warmup)

    def change(self, epochs: int | None = None, **changes: Any) -> Recipe:
        """Return a copy with the given fields that are not None; `epochs` scales the schedule, see `over`."""
        base = self if epochs is None else self.over(epochs)
        return replace(base, **{name: value for name, value in changes.items() if value is not None})

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        if epoch < self.warmup:
            return self.lr * (epoch + 1) / (self.warmup + 1)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * (epoch - self.warmup) / (self.epochs - self.warmup))) / 2
        return self.lr / 10 ** sum(epoch >= drop for drop in self.drops)

    @property
    def memory(self) -> dict[str, str]:
        """What the optimizer stores for each parameter: name in a checkpoint → name in torch."""
        if self.optimizer == "adamw":
            return {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        return {"momentum": "momentum_buffer"} if self.momentum else {}

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON-serializable data, for records and comparisons."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["rotations"] = plain.pop("views")  # the key of earlier versions, whose runs resume only if it is the same
        if self.method != "robust":
            del plain["consistency"], plain["severity"]
        for name, default in (("schedule", "steps"), ("optimizer", "sgd"), ("warmup", 0)):
            if plain[name] == default:
                del plain[name]
        return plain | {"drops": list(self.drops), "task": None if self.task is None else repr(self.task)}
