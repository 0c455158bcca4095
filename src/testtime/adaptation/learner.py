"""Who learns at test time, and how: the settings of an adapter, and the replicas with the optimizer that moves them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from testtime.augment import Augment
from testtime.capture import Beside, Precision, check_precision
from testtime.networks.replicas import Part, Replicas
from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.tasks import Task

_LARGEST = 1 << 24  # numbers in an image that a saved state may claim to be for

Update = Literal["encoder", "encoder+ssl"]
Share = Literal["image", "batch"]
Preset = Literal["paper", "best"]


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
        mirrored: Answer with the mean of the logits of the image and of its mirror image.
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
    mirrored: bool = False
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
        for name in ("task", "augment"):
            plain[name] = getattr(plain[name], "__qualname__", repr(plain[name]))
        return plain


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "paper": {"steps": 1},
    "best": {"steps": 1, "mirrored": True},
}
"""Settings of online learning by name; the others are the defaults of `Settings`, which are the paper's.

`best` is chosen among the candidates of the study `tuning`. It takes an image and its mirror image for the same thing,
which holds for photographs and not for letters or digits.
"""


def find_preset(name: Preset) -> Mapping[str, Any]:
    """The settings of a preset.

    Raises:
        ValueError: There is no such preset.
    """
    if name not in get_args(Preset):
        raise ValueError(f"`preset` must be one of {', '.join(PRESETS)}, got {name!r}.")
    return PRESETS[name]


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
        self.net, self.settings, self.task, self.shape = net, settings, settings.task, shape
        parts: tuple[Part, ...] = ("encoder", "ssl")
        if settings.update == "encoder" and not _tracks_statistics(net.ssl):
            parts = ("encoder",)  # a branch that neither learns nor keeps statistics can be held once for all
        device = next(net.parameters()).device
        # Any image does for trying out the replicas, but not a blank one.
        example = Draws.of(0, torch.arange(2, device=device)).uniform(*shape)
        self.replicas = Replicas(net, count, parts, example, check_precision(settings.precision))
        learning: tuple[Part, ...] = ("encoder", "ssl") if settings.update == "encoder+ssl" else ("encoder",)
        self.moving = self.replicas.parameters(learning)
        for parameter in self.moving.values():
            parameter.requires_grad_(True)
        # An optimizer that takes every number by itself gets them all as one tensor: one launch moves everything.
        self.rowwise = is_rowwise(settings)
        self.flat = self.rowwise and len(self.moving) == len(self.replicas.parameters(parts))
        self.optimizer = self._fresh()
        self.beside = Beside(device)  # for what reads the replicas, see descend
        self.graphs: dict[Any, Any] = {}  # recorded episodes by the shape of their images, see adapt.run
        self.eager = not self.flat
        # For what concerns all replicas, bool (S,); kept here, since recorded graphs read it.
        self.everyone = torch.ones(count, dtype=torch.bool, device=device)

    def _fresh(self) -> torch.optim.Optimizer:
        optimizer = self.settings.optimizer(list(self._targets().values()), lr=self.settings.lr)
        for group in optimizer.param_groups:
            if self.flat and group.get("foreach", True) is None:
                group["foreach"] = False  # torch's form for many tensors takes one in a few large pieces
        return optimizer

    def _targets(self) -> dict[str, Tensor]:
        """What the optimizer moves, by name."""
        return {"numbers": self.replicas.numbers} if self.flat else self.moving

    def descend(self, loss: Callable[[], Tensor]) -> None:
        """One step of the optimizer down a loss of the replicas, as a function that computes it.

        What runs `beside` is waited for before anything moves.
        """

        def evaluate() -> Tensor:
            if self.flat:
                value, self.replicas.numbers.grad = self.replicas.gradient(loss)
                self.beside.join()
                return value
            value = loss()
            gradients = torch.autograd.grad(value, list(self.moving.values()), allow_unused=True)
            for parameter, gradient in zip(self.moving.values(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.contiguous()
            self.beside.join()
            return value.detach()

        with torch.enable_grad():
            self.optimizer.step(evaluate)  # type: ignore[arg-type]  # torch types the closure as giving a float

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Put all replicas, or those where `rows`, bool `(S,)`, is true, back to the network as it was given.

        Their optimizer forgets as well. Only an optimizer that keeps rows apart can forget some of them.
        """
        self.replicas.reset(rows)
        if not self.rowwise:
            self.optimizer = self._fresh()
        for tensor in self._memory().values():
            tensor.zero_() if rows is None else tensor.masked_fill_(_mask(rows, tensor), 0)

    def snapshot(self) -> tuple[list[Tensor], Any]:
        """A copy of everything that learning changes, for `restore`."""
        memory: Any = {key: value.clone() for key, value in self._memory().items()}
        return self.replicas.snapshot(), memory if self.rowwise else copy.deepcopy(self.optimizer.state_dict())

    @torch.no_grad()
    def restore(self, snapshot: tuple[list[Tensor], Any], rows: Tensor) -> None:
        """Put the replicas where `rows`, bool `(S,)`, is true back to a snapshot, their optimizer's memory as well.

        The snapshot may be another learner's, of as many replicas.
        """
        numbers, memory = snapshot
        self.replicas.restore(numbers, rows)
        if not self.rowwise:
            if rows.all():
                self.optimizer.load_state_dict(memory)
            return
        own, targets = self._memory(), self._targets()
        for place, old in memory.items():
            if place not in own:  # the snapshot is another learner's, whose optimizer has begun
                name, key = place
                self.optimizer.state[targets[name]][key] = own[place] = torch.zeros_like(old)
        for place, tensor in own.items():
            # What the optimizer had not yet made when the snapshot was taken starts from zero, see is_rowwise.
            old = memory.get(place, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
            tensor.copy_(torch.where(_mask(rows, tensor), old, tensor))

    def state(self) -> dict[str, Tensor]:
        """A copy of everything that learning changes, by name, in the network's own shapes.

        Raises:
            ValueError: The optimizer remembers things that are no tensors.
        """
        state = dict(self.replicas.tensors)
        for target, parameter in self._targets().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise ValueError(f"The optimizer's {key!r} is not a tensor, so this state cannot be saved.")
                if value.shape == self.replicas.numbers.shape and target == "numbers":
                    state |= {f"optimizer/{key}/{part}": view for part, view in self.replicas.unpack(value).items()}
                else:
                    # A count of steps is of torch's default dtype, which the state must not depend on.
                    state[f"optimizer/{key}/{target}"] = value if value.dim() else value.float()
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that another learner of the same network and settings made.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        own, targets = self.replicas.tensors, self._targets()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise ValueError(f"The state does not fit: tensor {name!r} is missing, or has another shape or type.")
        known = _memory_names(self.settings)
        memory: dict[str, dict[str, Tensor]] = {}
        for name in state.keys() - own.keys():
            kind, _, rest = name.partition("/")
            key, _, target = rest.partition("/")
            if kind != "optimizer":
                raise ValueError(f"The state does not fit: {name!r} belongs to another network.")
            if target not in {*targets, *self.moving}:
                raise ValueError(f"The state does not fit: it has memory of {target!r}, which does not learn.")
            if key not in known:
                raise ValueError(f"The state does not fit: this optimizer remembers no {key!r}.")
            tensor = state[name].detach().clone()
            if tensor.dim() and tensor.shape != {**self.moving, **targets}[target].shape:
                raise ValueError(f"The state does not fit: {name!r} has another shape.")
            memory.setdefault(key, {})[target] = tensor
        optimizer, device = self._fresh(), self.replicas.numbers.device
        for key, tensors in memory.items():
            if self.flat and tensors.keys() == self.moving.keys():
                tensors = {"numbers": self.replicas.pack({name: tensor.to(device) for name, tensor in tensors.items()})}
            for target, tensor in tensors.items():
                # torch keeps an optimizer's step counts on the CPU, everything else beside the parameter
                optimizer.state[targets[target]][key] = tensor.to(device) if tensor.dim() else tensor
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.optimizer = optimizer
        self.graphs.clear()

    def _memory(self) -> dict[tuple[str, str], Tensor]:
        """What the optimizer remembers of each tensor that it moves."""
        kept = {name: self.optimizer.state.get(tensor, {}) for name, tensor in self._targets().items()}
        items = ((name, key, value) for name, memory in kept.items() for key, value in memory.items())
        return {(name, key): value for name, key, value in items if isinstance(value, Tensor)}

    def __reduce__(self) -> tuple[Any, ...]:
        # The parameters are views into one tensor; copied or pickled one by one they would be cut loose. As bytes,
        # since tensors made here would be gone, and their shared memory with them, before a spawned process has them.
        state = {name: tensor.cpu() for name, tensor in self.state().items()}
        return _remake, (self.net, self.replicas.count, self.settings, self.shape, save(state))


def _remake(net: YNet, count: int, settings: Settings, shape: tuple[int, ...], state: bytes) -> Learner:
    learner = Learner(net, count, settings, shape)
    learner.load(load(state))
    return learner


def _mask(rows: Tensor, tensor: Tensor) -> Tensor:
    """Which numbers of a stacked tensor are in the given rows; a single number, which all rows share, if all are."""
    return rows.view(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() else rows.all().to(tensor.device)


def _tracks_statistics(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def is_rowwise(settings: Settings) -> bool:
    """Whether the optimizer treats stacked parameters as it would each row alone; tried out, not guessed.

    It must also go on from a memory of zeros as it begins without any, which is how a row is put back to the start.
    """
    numbers = Draws.of(0, torch.arange(2, device="cpu")).normal(4, 3, 3)  # two rows: a start and three gradients
    ends = []
    for rows, from_zeros in (([slice(0, 1), slice(1, 2)], False), ([slice(0, 2)], False), ([slice(0, 2)], True)):
        parts = []
        for row in rows:
            parameter = nn.Parameter(numbers[row, 0].clone())
            optimizer = settings.optimizer([parameter], lr=settings.lr)
            try:
                if from_zeros:
                    _step(optimizer, parameter, numbers[row, 1])
                    for value in optimizer.state[parameter].values():
                        if isinstance(value, Tensor):
                            value.zero_()
                    parameter.data.copy_(numbers[row, 0])
                for step in (1, 2, 3):
                    _step(optimizer, parameter, numbers[row, step])
            except TypeError:  # it wants to evaluate the loss itself
                return False
            parts.append(parameter.detach())
        ends.append(torch.cat(parts))
    return all(torch.allclose(end, ends[0], rtol=1e-6, atol=0) for end in ends)


def has_rows(settings: Settings) -> bool:
    """Whether all that the optimizer remembers is kept for each number, so that a row's memory can stand still."""
    kept = _try_memory(settings).values()
    return all(value is None or (isinstance(value, Tensor) and value.shape == (2, 3)) for value in kept)


def _memory_names(settings: Settings) -> set[str]:
    """What the optimizer remembers of a parameter, by name."""
    return set(_try_memory(settings))


def _try_memory(settings: Settings) -> dict[str, Any]:
    """What the optimizer remembers of a parameter `(2, 3)` after a step."""
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.float32, device="cpu"))
    optimizer = settings.optimizer([parameter], lr=settings.lr)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)  # some want to evaluate the loss themselves
    return optimizer.state[parameter]


def _step(optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()
    optimizer.step()


class Keeper(Protocol):
    """What an adapter keeps between images: a learner, or several."""

    shape: tuple[int, ...]

    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


Kept = TypeVar("Kept", bound=Keeper)


def read_counts(state: Mapping[str, Tensor], name: str, number: int) -> list[int]:
    """So many counts from a saved state, by their name.

    Raises:
        ValueError: They are missing or something else.
    """
    counts = state.get(name)
    if counts is None or counts.dtype != torch.int64 or counts.shape != (number,) or (counts < 0).any():
        raise ValueError(f"not an adapter's state: its {name!r} are not {number} integers from 0 on.")
    return counts.tolist()


def load_learner(state: Mapping[str, Tensor], net: YNet, make: Callable[[tuple[int, ...]], Kept]) -> Kept | None:
    """The learner in an adapter's saved state (its names begin with `learner/`), or None if it had not begun.

    Args:
        state: The adapter's state.
        net: The network it starts from.
        make: Makes a learner for images of a shape (C, H, W).

    Raises:
        ValueError: The state does not fit.
    """
    learned = {name.removeprefix("learner/"): tensor for name, tensor in state.items() if name.startswith("learner/")}
    if not learned:
        return None
    shape = learned.pop("shape", None)
    if shape is None or shape.dtype != torch.int64 or shape.shape != (3,):
        raise ValueError("The state does not fit: the shape of its images is missing.")
    channels, height, width = shape.tolist()
    if (
        channels != (net.channels or channels)
        or not 0 < channels * height * width <= _LARGEST
        or min(height, width) < 1
    ):
        raise ValueError(f"The state does not fit: it is for images {(channels, height, width)}.")
    with torch.inference_mode(False):
        learner = make((channels, height, width))
        learner.load(learned)
    return learner


def save_learner(learner: Keeper | None) -> dict[str, Tensor]:
    """A learner for an adapter's state, as `load_learner` reads it."""
    if learner is None:
        return {}
    state = learner.state() | {"shape": torch.tensor(learner.shape, dtype=torch.int64, device="cpu")}
    return {f"learner/{name}": tensor for name, tensor in state.items()}
