"""Who learns at test time, and how: the settings of an adapter, and the replicas with the optimizer that moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from testtime.augment import Augment
from testtime.capture import Precision, check_precision
from testtime.networks.replicas import Part, Replicas
from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.tasks import Task

Update = Literal["encoder", "encoder+ssl"]
Share = Literal["image", "batch"]


@dataclass(frozen=True)
class Settings:
    """How an adapter learns. The defaults are the paper's for CIFAR-10.

    Attributes:
        steps: Gradient steps on each image, each on fresh views; 0 adapts nothing.
        lr: Learning rate.
        copies: Augmented copies of the image in each step.
        threshold: Adapt only where the task's confidence in the plain image is below this; 1 adapts always.
        update: What learns: "encoder+ssl" (as the authors' program) or "encoder" alone (as the paper writes).
        share: "image": every image learns for itself. "batch": the images of one call share their updates.
        optimizer: Any `torch.optim` class, or a callable `(parameters, lr=lr)` that makes one.
        seed: Seed of the augmentations.
        guard: Undo an update after which the task's loss on the image is not finite, or has risen by more than this.
        precision: "fp32" is exact; "tf32" and "bf16" are faster on a GPU. Weights and updates are always float32.
        task: The self-supervised task; None takes the one the network was trained with.
        augment: What makes the copies; None takes the network's training augmentation.
    """

    steps: int
    lr: float = 0.001
    copies: int = 32
    threshold: float = 1.0
    update: Update = "encoder+ssl"
    share: Share = "image"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    seed: int = 0
    guard: float = 3.0
    precision: Precision = "fp32"
    task: Task | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"`steps` must be at least 0, got {self.steps}.")
        if self.copies < 1:
            raise ValueError(f"`copies` must be at least 1, got {self.copies}.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"`lr` must be positive, got {self.lr}.")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"`threshold` must lie in [0, 1], got {self.threshold}.")
        if not self.guard > 0:
            raise ValueError(f"`guard` must be positive (infinity allows any finite rise), got {self.guard}.")
        check_precision(self.precision)
        for name, choices in (("update", get_args(Update)), ("share", get_args(Share))):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")

    def describe(self) -> dict[str, Any]:
        """The settings as plain text and numbers, for records and for telling two apart."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["optimizer"] = getattr(self.optimizer, "__qualname__", repr(self.optimizer))
        plain["task"], plain["augment"] = repr(self.task), repr(self.augment)
        return plain


class Learner:
    """S replicas, the optimizer that moves them, and the settings they learn with.

    The method itself, what a learner does with images, is in adapt.py.

    Args:
        net: The network they start from.
        count: S.
        settings: How they learn; task and augmentation must be set.
        shape: (C, H, W) of the images to come.
    """

    def __init__(self, net: YNet, count: int, settings: Settings, shape: tuple[int, ...]) -> None:
        assert settings.task is not None
        self.settings, self.task = settings, settings.task
        self.parts: tuple[Part, ...] = ("encoder", "ssl") if settings.update == "encoder+ssl" else ("encoder",)
        device = next(net.parameters()).device
        # Any image does for trying out the replicas, but not a blank one.
        example = Draws.of(0, torch.arange(2, device=device)).uniform(*shape)
        self.replicas = Replicas(net, count, self.parts, example, check_precision(settings.precision))
        self.moving = [parameter.requires_grad_(True) for parameter in self.replicas.parameters(self.parts).values()]
        self.rowwise = is_rowwise(settings)
        self.optimizer = self._fresh()
        self.graphs: dict[Any, Any] = {}  # recorded episodes by the shape of their images, see adapt.run
        self.eager = False

    def _fresh(self) -> torch.optim.Optimizer:
        # An optimizer that takes every number by itself gets them all as one tensor: one launch moves everything.
        return self.settings.optimizer([self.replicas.numbers] if self.rowwise else self.moving, lr=self.settings.lr)

    def descend(self, loss: Callable[[], Tensor]) -> None:
        """One step of the optimizer down a loss of the replicas, as a function that computes it."""

        def evaluate() -> Tensor:
            value = loss()
            gradients = torch.autograd.grad(value, self.moving)
            if self.rowwise:
                named = dict(zip(self.replicas.parameters(self.parts), gradients, strict=True))
                self.replicas.numbers.grad = self.replicas.pack(named)
            else:
                for parameter, gradient in zip(self.moving, gradients, strict=True):
                    parameter.grad = gradient.contiguous()
            return value.detach()

        with torch.enable_grad():
            self.optimizer.step(evaluate)  # type: ignore[arg-type]  # torch types the closure as giving a float

    def reset(self) -> None:
        """Back to the network as it was given, with a fresh optimizer."""
        self.replicas.reset()
        if self._memory():
            self.graphs.clear()  # they would go on with the memory of the optimizer that is dropped here
            self.eager = True
            self.optimizer = self._fresh()

    def snapshot(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """A copy of everything that learning changes, for `restore`."""
        return self.replicas.snapshot(), {name: value.clone() for name, value in self._memory().items()}

    @torch.no_grad()
    def restore(self, snapshot: tuple[list[Tensor], dict[str, Tensor]], rows: Tensor) -> None:
        """Put the replicas where `rows`, bool `(S,)`, is true back to a snapshot, their optimizer's memory as well."""
        numbers, memory = snapshot
        self.replicas.restore(numbers, rows)
        for name, tensor in self._memory().items():
            # What the optimizer had not yet made when the snapshot was taken starts from zero.
            old = memory.get(name, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
            mask = rows.view(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() else rows.all().to(tensor.device)
            tensor.copy_(torch.where(mask, old, tensor))

    def state(self) -> dict[str, Tensor]:
        """A copy of everything that learning changes, by name, in the network's own shapes."""
        state = dict(self.replicas.tensors)
        for name, tensor in self._memory().items():
            key, parameter = name.split("/", 1)
            if parameter == "numbers" and tensor.shape == self.replicas.numbers.shape:
                state |= {f"optimizer/{key}/{part}": view for part, view in self.replicas.unpack(tensor).items()}
            else:
                state[f"optimizer/{key}/{parameter}"] = tensor
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that another learner of the same network and settings made.

        Raises:
            ValueError: A tensor is missing or has another shape; nothing was changed.
        """
        own = self.replicas.tensors
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(f"The state does not fit: tensor {name!r} is missing or has another shape.")
        memory: dict[str, dict[str, Tensor]] = {}
        for name in state.keys() - own.keys():
            _, key, parameter = name.split("/", 2)
            memory.setdefault(key, {})[parameter] = state[name].detach().clone()
        optimizer = self._fresh()
        targets = {"numbers": self.replicas.numbers} | self.replicas.parameters(self.parts)
        for key, tensors in memory.items():
            if self.rowwise and tensors.keys() == self.replicas.parameters(self.parts).keys():
                tensors = {"numbers": self.replicas.pack({k: v.to(self._device) for k, v in tensors.items()})}
            for parameter, tensor in tensors.items():
                if parameter not in targets:
                    raise ValueError(f"The state does not fit: it has memory of {parameter!r}, which does not learn.")
                # torch keeps an optimizer's step counts on the CPU, everything else beside the parameter
                optimizer.state[targets[parameter]][key] = tensor.to(self._device) if tensor.dim() else tensor
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.optimizer = optimizer
        self.graphs.clear()

    @property
    def _device(self) -> torch.device:
        return self.replicas.numbers.device

    def _memory(self) -> dict[str, Tensor]:
        """What the optimizer remembers, by `key/parameter`."""
        targets = {"numbers": self.replicas.numbers} | self.replicas.parameters(self.parts)
        return {
            f"{key}/{name}": value
            for name, parameter in targets.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }


def is_rowwise(settings: Settings) -> bool:
    """Whether the optimizer treats stacked parameters as it would each row alone; tried out, not guessed."""
    numbers = Draws.of(0, torch.arange(2)).normal(4, 3, 3)  # two rows: a start and three gradients
    ends = []
    for rows in ([slice(0, 1), slice(1, 2)], [slice(0, 2)]):
        parts = []
        for row in rows:
            parameter = nn.Parameter(numbers[row, 0].clone())
            optimizer = settings.optimizer([parameter], lr=settings.lr)
            for step in (1, 2, 3):
                parameter.grad = numbers[row, step].clone()
                try:
                    optimizer.step()
                except TypeError:  # it wants to evaluate the loss itself
                    return False
            parts.append(parameter.detach())
        ends.append(torch.cat(parts))
    return torch.allclose(*ends, rtol=1e-6, atol=0)


def load_learner(net: YNet, count: int, settings: Settings, state: Mapping[str, Tensor]) -> Learner | None:
    """The learner in an adapter's saved state (its names begin with `learner/`), or None if it had not begun."""
    learned = {name.removeprefix("learner/"): tensor for name, tensor in state.items() if name.startswith("learner/")}
    if not learned:
        return None
    side = net.card.size or 32
    with torch.inference_mode(False):
        learner = Learner(net, count, settings, (len(net.card.mean), side, side))
        learner.load(learned)
    return learner
