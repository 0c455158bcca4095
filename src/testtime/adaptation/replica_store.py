"""Many replicas of which a few are computed at a time: what each has learned waits in a row of its own.

A step computes the streams that take part in it, in groups of a few sizes, and not all there are. There may be more of
them than the memory could hold at once: a stream that waits needs no room for its views on their way.
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

    Learners of a few sizes do the work. The replicas live in tensors of S rows; those of a group are copied to a
    learner and come back changed. Only where all take part at once they live in the learner, from call to call.

    Args:
        net: The network they start from.
        count: S.
        together: The most replicas of a learner, at most S.
        method: What they learn.
        settings: How they learn, with an optimizer that keeps rows apart.
        shape: (C, H, W) of the images to come.
    """

    def __init__(
        self, net: YNet, count: int, together: int, method: Method, settings: Settings, shape: tuple[int, ...]
    ) -> None:
        self.count, self.together, self.shape = count, together, shape
        self._net, self._method, self._settings = net, method, settings
        self._learners: dict[int, Learner] = {}
        self._resident = False  # whether all are in the learner of S
        self._pieces: list[Tensor] = []  # S rows each, once they are needed
        self._memory: dict[Any, Tensor] = {}  # of the optimizer, when it has any

    def predict(self, images: Tensor, samples: Tensor, streams: Tensor | None) -> Prediction:
        """Adapt each of the streams, or all in their order, to an image and predict it.

        Args:
            images: `(M, C, H, W)`.
            samples: Their numbers, `(M,)`.
            streams: Which replicas they belong to, `(M,)`, none twice; None for all.
        """
        if streams is None and self.together == self.count:
            home = self._resident_learner()
            return run(home, images[:, None], samples[:, None])[:, 0]
        self._leave()
        answers, learned = [], []
        for chosen, number in self._groups(len(images), images.device):
            learner, rows = self._learner(len(chosen)), chosen if streams is None else streams[chosen]
            self._take(learner, rows)
            answers.append(run(learner, images[chosen, None], samples[chosen, None])[:number, 0])
            learned.append((rows[:number], *learner.snapshot()))
        for rows, pieces, memory in learned:
            self._put(rows, pieces, memory)
        return Prediction.join(answers)

    def remember(self, streams: Tensor | None = None) -> Callable[[], None]:
        """A function that brings back what some streams, or all, have learned up to now."""
        if self._resident:
            home = self._resident_learner()
            good = home.snapshot()

            def undo() -> None:
                home.restore(good, home.everyone)
                self._resident = True  # whatever the call did to the tensors of S rows

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
        """A copy of one replica's tensors, by their names in the network."""
        if self._resident:
            return self._resident_learner().replicas.read(row)
        learner = self._learner(1)
        self._take(learner, torch.tensor([row], dtype=torch.int64, device=learner.everyone.device))
        return learner.replicas.read(0)

    def reset(self, rows: Tensor) -> None:
        """Put the replicas where `rows`, bool `(S,)`, is true back to the network as it was given."""
        if self._resident:
            return self._resident_learner().reset(rows)
        for piece, origin in zip(self._pieces, self._origin(), strict=True):
            piece[rows] = origin
        for tensor in self._memory.values():
            tensor[rows] = 0

    def state(self) -> dict[str, Tensor]:
        """A copy of everything that learning changes, by name, S rows each, however they are grouped."""
        if self._resident:
            return self._resident_learner().state()
        self._leave()
        parts: list[dict[str, Tensor]] = []
        for rows, number in self._groups(self.count, self._pieces[0].device):
            learner = self._learner(len(rows))
            self._take(learner, rows)
            parts.append({name: tensor[:number] for name, tensor in learner.state().items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that as many replicas of the same network and settings made.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape.
        """
        if self.together == self.count:
            return self._resident_learner().load(state)
        for name, tensor in state.items():
            if tensor.shape[:1] != (self.count,):
                raise ValueError(f"The state does not fit: tensor {name!r} has another shape.")
        self._leave()
        for rows, number in self._groups(self.count, self._pieces[0].device):
            learner, here = self._learner(len(rows)), rows.cpu()
            learner.load({name: tensor.cpu()[here] for name, tensor in state.items()})
            self._put(rows[:number], *learner.snapshot())

    def _groups(self, count: int, device: torch.device) -> Iterator[tuple[Tensor, int]]:
        """Numbers from 0 to `count - 1` in groups, and how many of a group are its own.

        Each is filled up with its first to the size of a learner (1, 4, 16, … or `together`), which is not kept.
        """
        for first in range(0, count, self.together):
            number, size = min(self.together, count - first), 1
            while size < number:
                size *= 4
            places = torch.arange(min(size, self.together), device=device)
            yield torch.where(places < number, places, 0) + first, number

    def _learner(self, size: int) -> Learner:
        if size not in self._learners:
            self._learners[size] = Learner(self._net, size, self._method, self._settings, self.shape)
        return self._learners[size]

    def _resident_learner(self) -> Learner:
        """The learner of S, with all replicas in it."""
        learner = self._learner(self.count)
        if not self._resident and self._pieces:
            learner.restore(Snapshot(self._pieces, self._memory), learner.everyone)
        self._resident = True
        return learner

    def _leave(self) -> None:
        """See to it that all replicas are in the tensors of S rows."""
        if self._resident:
            self._pieces, self._memory = self._resident_learner().snapshot()
            self._resident = False
        elif not self._pieces:
            self._pieces = [row.repeat_interleave(self.count, 0) for row in self._origin()]

    def _origin(self) -> list[Tensor]:
        """A row as it was before anything was learned."""
        learner = next(iter(self._learners.values()), None) or self._learner(1)
        return [piece[:1] for piece in learner.origin]

    def _take(self, learner: Learner, rows: Tensor) -> None:
        """Bring replicas to a learner."""
        memory = {key: tensor[rows] for key, tensor in self._memory.items()}
        learner.restore(Snapshot([piece[rows] for piece in self._pieces], memory), learner.everyone)

    def _put(self, rows: Tensor, pieces: list[Tensor], memory: Mapping[Any, Tensor]) -> None:
        """Keep what the first of a learner's replicas have become as these rows."""
        for piece, new in zip(self._pieces, pieces, strict=True):
            piece[rows] = new[: len(rows)]
        for key, new in memory.items():
            if key not in self._memory:
                self._memory[key] = new.new_zeros(self.count, *new.shape[1:])
            self._memory[key][rows] = new[: len(rows)]
