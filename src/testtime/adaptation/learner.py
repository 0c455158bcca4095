"""S replicas with their objective and optimizer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from testtime.adaptation.methods import Method
from testtime.adaptation.optimizers import find_memory, is_rowwise
from testtime.adaptation.settings import Settings, Update
from testtime.kernels.graphs import Concurrent, Later, can_record
from testtime.networks.replicas import Part, Replicas, put_rows
from testtime.networks.ynet import YNet
from testtime.precision import check_precision
from testtime.randomness import Draws

_MOVING: dict[Update, tuple[Part, ...]] = {
    "norm": ("encoder", "classifier"),
    "encoder": ("encoder",),
    "encoder+ssl": ("encoder", "ssl"),
    "all": ("encoder", "classifier"),
}


class Snapshot(NamedTuple):
    """A copy of everything that learning changes.

    Attributes:
        pieces: The tensors of replicas and objective, `(S, ...)` each.
        memory: The optimizer's state by parameter and name; or its `state_dict`, if it mixes rows.
    """

    pieces: list[Tensor]
    memory: Any


class Learner:
    """S replicas with their objective, optimizer and settings; the method itself is in method.py.

    Args:
        net: The network to start from.
        count: Number of replicas, S.
        method: The method.
        settings: The settings; task and augmentation must be set.
        shape: (C, H, W) of the images.
    """

    def __init__(self, net: YNet, count: int, method: Method, settings: Settings, shape: tuple[int, ...]) -> None:
        self.net, self.method, self.settings, self.shape = net, method, settings, shape
        moving = _MOVING[settings.update]
        parts: tuple[Part, ...] = moving
        if settings.update == "encoder" and _tracks_statistics(net.ssl):
            parts = ("encoder", "ssl")  # the statistics of `ssl` change too
        device = next(net.parameters()).device
        # Random, since a constant image would not reveal faults of the replicas.
        example = Draws.of(0, torch.arange(2, device=device)).uniform(*shape)
        self.replicas = Replicas(net, count, parts, example, check_precision(settings.precision))
        self.replicas.use_statistics(settings.statistics)
        self.moving = self.replicas.parameters(moving, norms_only=settings.update == "norm")
        for parameter in self.moving.values():
            parameter.requires_grad_(True)
        self._side = Concurrent(device)
        # Not a method, which would make a reference cycle with the objective and delay the release of memory.
        self.later = functools.partial(_start, self.replicas, self._side)
        """Starts a function that reads the replicas, concurrently if possible; the next update waits for it."""
        self.objective = method.objective(self.replicas, settings, self.later)
        self.pieces = [*self.replicas.pieces, *self.objective.state.values()]
        self.origin = [piece.clone() for piece in self.pieces]
        # An elementwise optimizer updates all parameters as one tensor, in one launch.
        self.rowwise = is_rowwise(settings)
        self.flat = self.rowwise and len(self.moving) == len(self.replicas.parameters(parts))
        self.optimizer = self._make_optimizer()
        self.everyone = torch.ones(count, dtype=torch.bool, device=device)
        """Mask of all replicas, bool `(S,)`; stored because recorded graphs read it."""
        self.recordings: dict[Any, Any] = {}
        """Recorded episodes by image shape, see recorder.py."""
        self.eager = not (self.flat and can_record(device))
        """Whether episodes run eagerly rather than from recordings."""

    def descend(self, loss: Callable[[], Tensor]) -> None:
        """Take one optimizer step on the loss that the given function computes."""

        def evaluate() -> Tensor:
            if self.flat:
                value, self.replicas.packed.numbers.grad = self.replicas.packed.gradient(loss)
            else:
                total = loss()
                gradients = torch.autograd.grad(total, list(self.moving.values()), allow_unused=True)
                for parameter, gradient in zip(self.moving.values(), gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.contiguous()
                value = total.detach()
            self._side.wait()
            return value

        with torch.enable_grad():
            self.optimizer.step(evaluate)  # type: ignore[arg-type]  # torch types the closure as returning a float

    def is_finite(self) -> Tensor:
        """Return which replicas have only finite values, bool `(S,)`."""
        sums = [piece.flatten(1).sum(1) for piece in self.pieces if piece.is_floating_point()]
        return torch.stack(sums).isfinite().all(0)

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Reset all replicas, or those where `rows`, bool `(S,)`, is true, to the original network.

        Their optimizer state is reset too; resetting some rows requires an optimizer that treats rows independently.
        """
        self._side.wait()
        self.replicas.use_statistics(self.settings.statistics)  # an interrupt may have left BatchNorm in training mode
        for piece, origin in zip(self.pieces, self.origin, strict=True):
            if rows is None:
                piece.copy_(origin)
            else:
                put_rows(piece, origin, rows)
        if not self.rowwise:
            self.optimizer = self._make_optimizer()
        for tensor in self._memory().values():
            tensor.zero_() if rows is None else tensor.masked_fill_(_mask(rows, tensor), 0)

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that learning changes, for `restore`."""
        memory: Any = {key: value.clone() for key, value in self._memory().items()}
        pieces = [piece.clone() for piece in self.pieces]
        return Snapshot(pieces, memory if self.rowwise else copy.deepcopy(self.optimizer.state_dict()))

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the current state."""
        good = self.snapshot()
        return lambda: self.restore(good, self.everyone)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, rows: Tensor) -> None:
        """Restore the replicas where `rows`, bool `(S,)`, is true, and their optimizer state, from a snapshot.

        The snapshot may come from another learner with as many replicas.
        """
        self._side.wait()
        self.replicas.use_statistics(self.settings.statistics)  # an interrupt may have left BatchNorm in training mode
        for piece, old in zip(self.pieces, snapshot.pieces, strict=True):
            put_rows(piece, old, rows)
        if not self.rowwise:
            if rows.all():
                self.optimizer.load_state_dict(snapshot.memory)
            return
        own, targets = self._memory(), self._targets()
        for entry, old in snapshot.memory.items():
            if entry not in own:  # from another learner, whose optimizer has taken a step
                name, key = entry
                self.optimizer.state[targets[name]][key] = own[entry] = torch.zeros_like(old)
        for entry, tensor in own.items():
            # State that did not exist yet at the time of the snapshot was zero, see is_rowwise.
            old = snapshot.memory.get(entry, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
            tensor.copy_(torch.where(_mask(rows, tensor), old, tensor))

    def state(self) -> dict[str, Tensor]:
        """Return a copy of everything that learning changes, by name, in the shapes of the network.

        Raises:
            ValueError: The optimizer's state is not made up of tensors.
        """
        state, packed = self._named(), self.replicas.packed
        for target, parameter in self._targets().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise ValueError(f"The optimizer's {key!r} is not a tensor, so this state cannot be saved.")
                if value.shape == packed.numbers.shape and target == "numbers":
                    state |= {f"optimizer/{key}/{part}": view for part, view in packed.unpack(value).items()}
                else:
                    # Step counts have torch's default dtype, which the state must not depend on.
                    state[f"optimizer/{key}/{target}"] = value if value.dim() else value.float()
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of a learner with the same network and settings.

        Raises:
            ValueError: A tensor is missing, unknown or has another shape; nothing was changed.
        """
        own, targets = self._named(), self._targets()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise ValueError(f"The state does not fit: tensor {name!r} is missing, or has another shape or type.")
        memory = self._read_memory({name: state[name] for name in state.keys() - own.keys()})
        packed = self.replicas.packed
        optimizer, device = self._make_optimizer(), packed.numbers.device
        for key, tensors in memory.items():
            if self.flat and tensors.keys() == self.moving.keys():
                tensors = {
                    "numbers": self.replicas.packed.pack({name: tensor.to(device) for name, tensor in tensors.items()})
                }
            for target, tensor in tensors.items():
                # torch stores step counts on the CPU, everything else on the parameter's device
                optimizer.state[targets[target]][key] = tensor.to(device) if tensor.dim() else tensor
        self._side.wait()
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.optimizer = optimizer
        self.recordings.clear()  # they refer to the old optimizer

    def _read_memory(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state by key and target, from its tensors in a saved state."""
        shapes = {name: tensor.shape for name, tensor in {**self.moving, **self._targets()}.items()}
        known, memory = find_memory(self.settings), {}
        for name, tensor in state.items():
            kind, _, rest = name.partition("/")
            key, _, target = rest.partition("/")
            if kind != "optimizer":
                raise ValueError(f"The state does not fit: {name!r} belongs to another network.")
            if target not in shapes:
                raise ValueError(f"The state does not fit: it has optimizer state of {target!r}, which does not learn.")
            if key not in known:
                raise ValueError(f"The state does not fit: this optimizer has no state {key!r}.")
            if tensor.dim() and tensor.shape != shapes[target]:
                raise ValueError(f"The state does not fit: {name!r} has another shape.")
            memory.setdefault(key, {})[target] = tensor.detach().clone()
        return memory

    def _named(self) -> dict[str, Tensor]:
        """Return the tensors of replicas and objective by name."""
        return self.replicas.tensors | {f"objective/{name}": tensor for name, tensor in self.objective.state.items()}

    def _targets(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer updates, by name."""
        return {"numbers": self.replicas.packed.numbers} if self.flat else self.moving

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.settings.optimizer(list(self._targets().values()), lr=self.settings.lr)
        for group in optimizer.param_groups:
            if self.flat and group.get("foreach", True) is None:
                group["foreach"] = False  # foreach splits a single tensor into a few large pieces
        return optimizer

    def _memory(self) -> dict[tuple[str, str], Tensor]:
        """Return the optimizer's state tensors, by the name of the updated tensor and the key."""
        held = {name: self.optimizer.state.get(tensor, {}) for name, tensor in self._targets().items()}
        items = ((name, key, value) for name, memory in held.items() for key, value in memory.items())
        return {(name, key): value for name, key, value in items if isinstance(value, Tensor)}

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied or pickled individually, parameters would no longer be views of one tensor. Bytes, since the shared
        # memory of tensors made here would be freed before a spawned process reads it.
        state = {name: tensor.cpu() for name, tensor in self.state().items()}
        return _remake, (self.net, self.replicas.count, self.method, self.settings, self.shape, save(state))


def _remake(net: YNet, count: int, method: Method, settings: Settings, shape: tuple[int, ...], state: bytes) -> Learner:
    learner = Learner(net, count, method, settings, shape)
    learner.load(load(state))
    return learner


def _start(replicas: Replicas, side: Concurrent, function: Callable[..., Any], *arguments: Any) -> Later[Any]:
    if replicas.has_statistics:  # they change in every forward pass
        return Later(function(*arguments))
    return side.later(function, *arguments)


def _mask(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return a mask of rows that broadcasts to a stacked tensor; for a shared scalar, whether all rows are set."""
    return rows.view(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() else rows.all().to(tensor.device)


def _tracks_statistics(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
