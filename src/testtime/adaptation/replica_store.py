"""Storage for many replicas, of which only some are computed at a time.

A step computes only the streams that have an image, in groups of a few sizes. There may be more streams than could be
computed at once: an inactive one needs memory for its parameters only, not for activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.learner import Learner, Snapshot
from testtime.adaptation.methods import Method
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.recorder import run
from testtime.adaptation.settings import Settings
from testtime.networks.ynet import YNet


class ReplicaStore:
    """S replicas that learn, at most `together` of them at once.

    The replicas are stored in tensors of S rows. The rows of a group are copied to a learner of one of a few sizes and
    back. If all replicas fit into one learner and every call updates all of them, they stay in that learner.

    Args:
        net: The network to start from.
        count: Number of replicas, S.
        together: Maximum number of replicas per learner, at most S.
        method: The method.
        settings: The settings; the optimizer must treat rows independently.
        shape: (C, H, W) of the images.
        padded: Compute every group in a learner of size `together`.
    """

    def __init__(
        self,
        net: YNet,
        count: int,
        together: int,
        method: Method,
        settings: Settings,
        shape: tuple[int, ...],
        padded: bool = False,
    ) -> None:
        self.count, self.together, self.shape, self._padded = count, together, shape, padded
        self._net, self._method, self._settings = net, method, settings
        self._learners: dict[int, Learner] = {}
        self._resident = False  # whether all replicas are in the learner of size S
        self._pieces: list[Tensor] = []  # S rows each, made on demand
        self._memory: dict[Any, Tensor] = {}  # the optimizer's state
        self._staging: Learner | None = None  # one row on its way in; loading would discard a learner's recordings

    def predict(self, images: Tensor, samples: Tensor, streams: Tensor | None) -> Prediction:
        """Adapt each of the given streams to an image and predict it.

        Args:
            images: `(M, C, H, W)`.
            samples: Sample numbers `(M,)`.
            streams: The replica of each image, `(M,)`, without duplicates; None for all, in order.
        """
        if streams is None and self.together == self.count:
            home = self._resident_learner()
            return run(home, images[:, None], samples[:, None])[:, 0]
        self._unload()
        predictions, learned = [], []
        for chosen, number in self._groups(len(images), images.device):
            learner, rows = self._learner(len(chosen)), chosen if streams is None else streams[chosen]
            self._load_rows(learner, rows)
            predictions.append(run(learner, images[chosen, None], samples[chosen, None])[:number, 0])
            learned.append((rows[:number], *learner.snapshot()))
        for rows, pieces, memory in learned:
            self._store_rows(rows, pieces, memory)
        return Prediction.join(predictions)

    def observe(self, images: Tensor, streams: Tensor) -> Prediction:
        """Predict images `(M, C, H, W)` with the replicas of their streams, `(M,)`, as they are."""
        self._unload()
        predictions = []
        for chosen, number in self._groups(len(images), images.device):
            learner = self._learner(len(chosen))
            self._load_rows(learner, streams[chosen])
            observed = learner.objective.observe(images[chosen, None])
            predictions.append(Prediction.unadapted(*observed)[:number, 0])
        return Prediction.join(predictions)

    def make_undo(self, streams: Tensor | None = None) -> Callable[[], None]:
        """Return a function that restores the current state of the given streams, or of all."""
        if self._resident:
            learner = self._resident_learner()
            good = learner.snapshot()

            def undo() -> None:
                learner.restore(good, learner.all_rows)
                self._resident = True  # the stored rows, if any, are outdated

        else:
            rows = slice(None) if streams is None else streams
            pieces = [piece[rows].clone() for piece in self._pieces]
            memory = {key: tensor[rows].clone() for key, tensor in self._memory.items()}

            def undo() -> None:
                self._resident = False
                if not pieces:  # nothing had been learned
                    self._pieces, self._memory = [], {}
                for piece, old in zip(self._pieces, pieces, strict=True):
                    piece[rows] = old
                for key, tensor in self._memory.items():
                    tensor[rows] = memory.get(key, 0)

        return undo

    def read(self, row: int) -> dict[str, Tensor]:
        """Return a copy of one replica's tensors, by their names in the network."""
        if self._resident:
            return self._resident_learner().replicas.read(row)
        learner = self._learner(1)
        self._load_rows(learner, torch.tensor([row], dtype=torch.int64, device=learner.all_rows.device))
        return learner.replicas.read(0)

    def reset(self, rows: Tensor) -> None:
        """Reset the replicas where `rows`, bool `(S,)`, is true to the original network."""
        if self._resident:
            return self._resident_learner().reset(rows)
        for piece, origin in zip(self._pieces, self._origin(), strict=True):
            piece[rows] = origin
        for tensor in self._memory.values():
            tensor[rows] = 0

    def state(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return a copy of everything that learning changes, by name: S rows each, or the given rows, int `(M,)`."""
        if self._resident and rows is None:
            return self._resident_learner().state()
        self._unload()
        parts: list[dict[str, Tensor]] = []
        for group, number in self._groups(self.count if rows is None else len(rows), self._pieces[0].device):
            learner = self._learner(len(group))
            self._load_rows(learner, group if rows is None else rows[group])
            parts.append({name: tensor[:number] for name, tensor in learner.state().items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of as many replicas with the same network and settings.

        Raises:
            ValueError: A tensor is missing, unknown or has another shape.
        """
        if self.together == self.count:
            return self._resident_learner().load(state)
        for name, tensor in state.items():
            if tensor.shape[:1] != (self.count,):
                raise ValueError(f"The state does not fit: tensor {name!r} has another shape.")
        self._unload()
        for rows, number in self._groups(self.count, self._pieces[0].device):
            learner, here = self._learner(len(rows)), rows.cpu()
            learner.load({name: tensor.cpu()[here] for name, tensor in state.items()})
            self._store_rows(rows[:number], *learner.snapshot())

    def load_rows(self, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Continue the given replicas, int `(M,)`, from a state of as many; raises like `load`."""
        self._unload()
        learner = self._staging = self._staging or self._make_learner(1)
        ready: list[tuple[Tensor, Snapshot]] = []
        for index in range(len(rows)):
            learner.load({name: tensor[index : index + 1] for name, tensor in state.items()})
            ready.append((rows[index : index + 1], learner.snapshot()))
        for row, snapshot in ready:  # only now, so that a state that does not fit changes nothing
            self.put_rows(row, snapshot)

    def copy_rows(self, rows: Tensor) -> Snapshot:
        """Return a copy of the given replicas, int `(M,)`, for `put_rows`."""
        self._unload()
        return Snapshot(self._pieces, self._memory).take(rows)

    def put_rows(self, rows: Tensor, snapshot: Snapshot) -> None:
        """Replace the given replicas, int `(M,)`, by others of the same network and settings."""
        self._unload()
        for tensor in self._memory.values():
            tensor[rows] = 0
        self._store_rows(rows, *snapshot)

    def _groups(self, count: int, device: torch.device) -> Iterator[tuple[Tensor, int]]:
        """Yield groups of the indices below `count`, padded, each with its number of indices before padding.

        A group is padded with its first index to the size of a learner: 1, 4, 16, … or `together`.
        """
        for first in range(0, count, self.together):
            number, size = min(self.together, count - first), self.together if self._padded else 1
            while size < number:
                size *= 4
            offsets = torch.arange(min(size, self.together), device=device)
            yield torch.where(offsets < number, offsets, 0) + first, number

    def _learner(self, size: int) -> Learner:
        if size not in self._learners:
            self._learners[size] = self._make_learner(size)
        return self._learners[size]

    def _make_learner(self, size: int) -> Learner:
        return Learner(self._net, size, self._method, self._settings, self.shape)

    def _resident_learner(self) -> Learner:
        """Move all replicas to the learner of size S, and return it."""
        learner = self._learner(self.count)
        if not self._resident and self._pieces:
            learner.restore(Snapshot(self._pieces, self._memory), learner.all_rows)
        self._resident = True
        return learner

    def _unload(self) -> None:
        """Move all replicas to the tensors of S rows."""
        if self._resident:
            self._pieces, self._memory = self._resident_learner().snapshot()
            self._resident = False
        elif not self._pieces:
            self._pieces = [row.repeat_interleave(self.count, 0) for row in self._origin()]

    def _origin(self) -> list[Tensor]:
        """Return the row of a replica that has learned nothing."""
        learner = next(iter(self._learners.values()), None) or self._learner(1)
        return [piece[:1] for piece in learner.origin]

    def _load_rows(self, learner: Learner, rows: Tensor) -> None:
        """Copy rows to a learner."""
        learner.restore(self.copy_rows(rows), learner.all_rows)

    def _store_rows(self, rows: Tensor, pieces: list[Tensor], memory: Mapping[Any, Tensor]) -> None:
        """Store the first replicas of a learner as the given rows."""
        for piece, new in zip(self._pieces, pieces, strict=True):
            piece[rows] = new[: len(rows)]
        for key, new in memory.items():
            if key not in self._memory:
                self._memory[key] = new.new_zeros(self.count, *new.shape[1:])
            self._memory[key][rows] = new[: len(rows)]
