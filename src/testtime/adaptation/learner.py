"""S replicas with their objective and optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from testtime.adaptation.guard import Guard
from testtime.adaptation.methods import Method
from testtime.adaptation.optimizers import StackedOptimizer
from testtime.adaptation.selection import find_layers, find_parts, select_parameters
from testtime.adaptation.settings import Settings
from testtime.adaptation.watch import Watch
from testtime.kernels import possibly_any
from testtime.kernels.graphs import Concurrent, Later, can_record
from testtime.networks.replicas import Replicas, put_rows
from testtime.networks.ynet import YNet
from testtime.precision import check_precision
from testtime.randomness import Draws


class Snapshot(NamedTuple):
    """A copy of everything that learning changes.

    Attributes:
        pieces: The tensors of replicas, objective and guard, `(S, ...)` each.
        memory: The optimizer's state, see `StackedOptimizer.snapshot`.
    """

    pieces: list[Tensor]
    memory: Any

    def take(self, rows: Tensor) -> Snapshot:
        """Return a copy of some rows, int `(M,)`."""
        return Snapshot([piece[rows] for piece in self.pieces], {key: one[rows] for key, one in self.memory.items()})

    def put(self, rows: Tensor, new: Snapshot) -> None:
        """Overwrite some rows with those of another snapshot.

        Args:
            rows: Int `(M,)`, or a mask, bool `(S,)`.
            new: Its first M rows replace them, or its only row replaces them all.
        """
        for piece, other in zip(self.pieces, new.pieces, strict=True):
            piece[rows] = other[: len(rows)]
        for key, other in new.memory.items():
            if key not in self.memory:
                self.memory[key] = other.new_zeros(len(self.pieces[0]), *other.shape[1:])
            self.memory[key][rows] = other[: len(rows)]
        for key in self.memory.keys() - new.memory.keys():  # it did not exist yet, so it was zero
            self.memory[key][rows] = 0


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
        layers = find_layers(net, settings, parts)
        self.replicas = Replicas(net, count, parts, example, check_precision(settings.precision), layers)
        self.replicas.batch_norms.use(settings.statistics or "running")
        parameters = {name: self.replicas.tensors[name] for name in select_parameters(net, settings.update)}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._side = Concurrent(device)
        # Not a method, which would make a reference cycle with the objective and delay the release of memory.
        self.later = functools.partial(_start, self.replicas, self._side)
        """Starts a function that reads the replicas, concurrently if possible; the next update waits for it."""
        self.objective = method.objective(self.replicas, settings, self.later)
        self.watch = Watch(Guard.of(settings.guard), self.replicas, settings.statistics == "batch")
        others = {f"objective/{name}": tensor for name, tensor in self.objective.state.items()}
        others |= {f"guard/{name}": tensor for name, tensor in self.watch.state.items()}
        self._updates = torch.zeros(count, dtype=torch.int64, device=device)  # since the last reset
        if settings.resets != "never":
            others["updates"] = self._updates
        self.pieces = [*self.replicas.pieces, *others.values()]
        self._named = self.replicas.tensors | others  # the same tensors, but the parameters separately
        self._ignored = [_find_not_finite(piece) for piece in self.pieces]
        self.optimizer = StackedOptimizer(settings, self.replicas.packed, parameters)
        self.all_rows = torch.ones(count, dtype=torch.bool, device=device)
        """Mask of all replicas, bool `(S,)`; stored because recorded graphs read it."""
        self._before: Snapshot | None = None
        self._scratch: list[Tensor] | None = None
        self.recordings: dict[Any, Any] = {}
        """Recorded episodes by image shape, see recorder.py."""
        self.eager = not (self.optimizer.flat and can_record(device))
        """Whether episodes run eagerly rather than from recordings."""

    @functools.cached_property
    def origin(self) -> list[Tensor]:
        """The initial `pieces`; made when first needed, since most streams are never reset."""
        return Learner(self.net, self.replicas.count, self.method, self.settings, self.shape).pieces

    def descend(self, loss: Callable[[], Tensor], between: Callable[[], None] | None = None) -> None:
        """Take one optimizer step on the loss that a function computes, except for replicas that the objective skips.

        Args:
            loss: Computes the loss.
            between: Called between gradient and update.
        """
        good: list[Snapshot] = []

        @torch.no_grad()
        def prepare() -> None:
            self._side.wait()
            if between is not None:
                between()
            if self.objective.skipped is not None and possibly_any(self.objective.skipped):
                good.append(self.snapshot())

        self.optimizer.step(loss, prepare)
        if good:
            assert self.objective.skipped is not None
            self.restore(good[0], self.objective.skipped)

    def renew(self, updated: Tensor) -> bool:
        """Count an update of some replicas, bool `(S,)`, and reset those due by guard, settings or objective.

        Returns:
            Whether any may have been reset.
        """
        due, alarmed = self.objective.expired(), self.watch.renew(updated)
        if alarmed is not None:
            due = alarmed if due is None else due | alarmed
        if self.settings.resets != "never":
            self._updates += updated
            enough = self._updates >= self.settings.resets
            due = enough if due is None else due | enough
        if due is None or not possibly_any(due):
            return False
        shadow = self.watch.copy_shadow()
        self.reset(due)
        self.watch.recover(shadow)
        return True

    def prepare(self) -> None:
        """Make what `renew` needs, which cannot be made while a graph is recorded."""
        if self.settings.resets != "never" or self.objective.expired() is not None or self.watch.falls_back:
            _ = self.origin

    def is_finite(self) -> Tensor:
        """Return which replicas have only finite values where the original network has, bool `(S,)`."""
        given = [pair for pair in zip(self.pieces, self._ignored, strict=True) if pair[0].is_floating_point()]
        values = [piece if ignored is None else piece.masked_fill(ignored, 0) for piece, ignored in given]
        sums = [piece.flatten(1).sum(1) if piece.dim() > 1 else piece for piece in values]
        return torch.stack(sums).isfinite().all(0)

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Reset all replicas, or those where `rows`, bool `(S,)`, is true, to the original network.

        Their optimizer state is reset too; resetting some rows requires an optimizer that treats rows independently.
        """
        self._side.wait()
        # An interrupt may have left BatchNorm in training mode.
        self.replicas.batch_norms.use(self.settings.statistics or "running")
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
        """Return a function that restores the current state. An episode must follow before anything else changes it."""
        self._scratch = None  # a call of one image needs no other snapshot
        good = self.snapshot()
        self._before = good if self.eager else None
        return lambda: self.restore(good, self.all_rows)

    def begin(self) -> Snapshot:
        """Return a snapshot for an episode: that of `make_undo`, if this is the first episode since."""
        before, self._before = self._before, None
        if before is not None:
            return before
        if not self.eager:
            return self.snapshot()
        # Into the same memory every time: for large networks, getting new memory takes as long as the copy.
        if self._scratch is None:
            self._scratch = [torch.empty_like(piece) for piece in self.pieces]
        for old, piece in zip(self._scratch, self.pieces, strict=True):
            old.copy_(piece)
        return Snapshot(self._scratch, self.optimizer.snapshot())

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, rows: Tensor) -> None:
        """Restore the replicas where `rows`, bool `(S,)`, is true, and their optimizer state, from a snapshot.

        The snapshot may come from another learner with as many replicas.
        """
        self._side.wait()
        # An interrupt may have left BatchNorm in training mode.
        self.replicas.batch_norms.use(self.settings.statistics or "running")
        for piece, old in zip(self.pieces, snapshot.pieces, strict=True):
            put_rows(piece, old, rows)
        self.optimizer.restore(snapshot.memory, rows)

    def state(self) -> dict[str, Tensor]:
        """Return a copy of everything that learning changes, by name, in the shapes of the network.

        Raises:
            ValueError: The optimizer's state is not made up of tensors.
        """
        state = self._named | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state().items()}
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of a learner with the same network and settings.

        Raises:
            ValueError: A tensor is missing, unknown or has another shape; nothing was changed.
        """
        for name, tensor in self._named.items():
            if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise ValueError(f"The state does not fit: tensor {name!r} is missing, or has another shape or type.")
        if "updates" in self._named and (state["updates"] < 0).any():
            raise ValueError("The state does not fit: 'updates' must not be negative.")
        memory = {name: tensor for name, tensor in state.items() if name not in self._named}
        for name in memory:
            if not name.startswith("optimizer/"):
                raise ValueError(f"The state does not fit: {name!r} belongs to another network.")
        self._side.wait()
        self.optimizer.load({name.removeprefix("optimizer/"): tensor for name, tensor in memory.items()})
        for name, tensor in self._named.items():
            tensor.copy_(state[name])
        self.recordings.clear()  # they refer to the old optimizer state

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied or pickled individually, parameters would no longer be views of one tensor. Bytes, since the shared
        # memory of tensors made here would be freed before a spawned process reads it.
        state = {name: tensor.cpu() for name, tensor in self.state().items()}
        return _remake, (self.net, self.replicas.count, self.method, self.settings, self.shape, save(state))


def _find_not_finite(piece: Tensor) -> Tensor | None:
    """Return a mask of the values whose sum is not finite, such as those of attention masks; None if there are none."""
    if not piece.is_floating_point():
        return None
    limit = torch.finfo(piece.dtype).max / (2 * max(1, piece[0].numel()))  # for sums of a row
    mask = ~(piece.abs() <= limit)  # NaN too
    return mask if mask.any() else None


def _remake(net: YNet, count: int, method: Method, settings: Settings, shape: tuple[int, ...], state: bytes) -> Learner:
    learner = Learner(net, count, method, settings, shape)
    learner.load(load(state))
    return learner


def _start(replicas: Replicas, side: Concurrent, function: Callable[..., Any], *arguments: Any) -> Later[Any]:
    if replicas.batch_norms.move:  # they change in every forward pass
        return Later(function(*arguments))
    return side.later(function, *arguments)
