"""S replicas with their objective and optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from testtime.adaptation.methods import Method
from testtime.adaptation.optimizers import StackedOptimizer
from testtime.adaptation.selection import find_parts, select_parameters
from testtime.adaptation.settings import Settings
from testtime.kernels.graphs import Concurrent, Later, can_record
from testtime.networks.replicas import Replicas, put_rows
from testtime.networks.ynet import YNet
from testtime.precision import check_precision
from testtime.randomness import Draws


class Snapshot(NamedTuple):
    """A copy of everything that learning changes.

    Attributes:
        pieces: The tensors of replicas and objective, `(S, ...)` each.
        memory: The optimizer's state, see `StackedOptimizer.snapshot`.
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
        device = next(net.parameters()).device
        # Random, since a constant image would not reveal faults of the replicas.
        example = Draws.of(0, torch.arange(2, device=device)).uniform(*shape)
        parts = find_parts(net, settings, method.needs_branch)
        self.replicas = Replicas(net, count, parts, example, check_precision(settings.precision))
        self._use_statistics()
        parameters = {name: self.replicas.tensors[name] for name in select_parameters(net, settings.update)}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._side = Concurrent(device)
        # Not a method, which would make a reference cycle with the objective and delay the release of memory.
        self.later = functools.partial(_start, self.replicas, self._side)
        """Starts a function that reads the replicas, concurrently if possible; the next update waits for it."""
        self.objective = method.objective(self.replicas, settings, self.later)
        self.pieces = [*self.replicas.pieces, *self.objective.state.values()]
        self.origin = [piece.clone() for piece in self.pieces]
        self.optimizer = StackedOptimizer(settings, self.replicas.packed, parameters)
        self.all_rows = torch.ones(count, dtype=torch.bool, device=device)
        """Mask of all replicas, bool `(S,)`; stored because recorded graphs read it."""
        self.recordings: dict[Any, Any] = {}
        """Recorded episodes by image shape, see recorder.py."""
        self.eager = not (self.optimizer.flat and can_record(device))
        """Whether episodes run eagerly rather than from recordings."""

    def descend(self, loss: Callable[[], Tensor]) -> None:
        """Take one optimizer step on the loss that the given function computes."""
        self.optimizer.step(loss, self._side.wait)

    def is_finite(self) -> Tensor:
        """Return which replicas have only finite values, bool `(S,)`."""
        numbers = [piece for piece in self.pieces if piece.is_floating_point()]
        sums = [piece.flatten(1).sum(1) if piece.dim() > 1 else piece for piece in numbers]
        return torch.stack(sums).isfinite().all(0)

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Reset all replicas, or those where `rows`, bool `(S,)`, is true, to the original network.

        Their optimizer state is reset too; resetting some rows requires an optimizer that treats rows independently.
        """
        self._side.wait()
        self._use_statistics()  # an interrupt may have left BatchNorm in training mode
        for piece, origin in zip(self.pieces, self.origin, strict=True):
            if rows is None:
                piece.copy_(origin)
            else:
                put_rows(piece, origin, rows)
        self.optimizer.reset(rows)

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that learning changes, for `restore`."""
        return Snapshot([piece.clone() for piece in self.pieces], self.optimizer.snapshot())

    def make_undo(self) -> Callable[[], None]:
        """Return a function that restores the current state."""
        good = self.snapshot()
        return lambda: self.restore(good, self.all_rows)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, rows: Tensor) -> None:
        """Restore the replicas where `rows`, bool `(S,)`, is true, and their optimizer state, from a snapshot.

        The snapshot may come from another learner with as many replicas.
        """
        self._side.wait()
        self._use_statistics()  # an interrupt may have left BatchNorm in training mode
        for piece, old in zip(self.pieces, snapshot.pieces, strict=True):
            put_rows(piece, old, rows)
        self.optimizer.restore(snapshot.memory, rows)

    def state(self) -> dict[str, Tensor]:
        """Return a copy of everything that learning changes, by name, in the shapes of the network.

        Raises:
            ValueError: The optimizer's state is not made up of tensors.
        """
        state = self._named() | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state().items()}
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of a learner with the same network and settings.

        Raises:
            ValueError: A tensor is missing, unknown or has another shape; nothing was changed.
        """
        own = self._named()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise ValueError(f"The state does not fit: tensor {name!r} is missing, or has another shape or type.")
        memory = {name: tensor for name, tensor in state.items() if name not in own}
        for name in memory:
            if not name.startswith("optimizer/"):
                raise ValueError(f"The state does not fit: {name!r} belongs to another network.")
        self._side.wait()
        self.optimizer.load({name.removeprefix("optimizer/"): tensor for name, tensor in memory.items()})
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.recordings.clear()  # they refer to the old optimizer state

    def _use_statistics(self) -> None:
        self.replicas.use_statistics(self.settings.statistics or "running")

    def _named(self) -> dict[str, Tensor]:
        """Return the tensors of replicas and objective by name."""
        return self.replicas.tensors | {f"objective/{name}": tensor for name, tensor in self.objective.state.items()}

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
