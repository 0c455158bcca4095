"""More streams than are computed side by side: they take turns, and what each has learned waits meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from testtime.adapt import run
from testtime.learner import Learner, Settings
from testtime.networks.ynet import YNet
from testtime.prediction import Prediction


class Groups:
    """S replicas that learn, at most `together` of them side by side.

    Where all are side by side, they live in the learner. Otherwise they live here, in tensors of S rows; the rows of a
    group are copied to the learner and come back changed.

    Args:
        net: The network they start from.
        count: S.
        together: How many replicas the learner has, at most S.
        settings: How they learn, with an optimizer that keeps rows apart.
        shape: (C, H, W) of the images to come.
    """

    def __init__(self, net: YNet, count: int, together: int, settings: Settings, shape: tuple[int, ...]) -> None:
        self.count, self.together, self.shape = count, together, shape
        self._learner = Learner(net, together, settings, shape)
        self._places = torch.arange(together, device=self._learner.everyone.device)
        self._origin: list[Tensor] = []  # a row
        self._pieces: list[Tensor] = []  # S rows
        self._memory: dict[Any, Tensor] = {}  # of the optimizer, when it has any
        if together < count:
            self._origin = [piece[:1].clone() for piece in self._learner.snapshot()[0]]
            self._pieces = [piece.repeat_interleave(count, 0) for piece in self._origin]

    def predict(self, images: Tensor, samples: Tensor, streams: Tensor | None) -> Prediction:
        """Adapt each of the streams, or all in their order, to an image and predict it.

        Args:
            images: `(M, C, H, W)`.
            samples: Their numbers, `(M,)`.
            streams: Which replicas they belong to, `(M,)`, none twice; None for all.
        """
        if self.together == self.count:
            return self._predict_at_once(images, samples, streams)
        answers, learned = [], []
        for first in range(0, len(images), self.together):
            number = min(self.together, len(images) - first)
            # A group that is not full repeats its first stream; that is computed, but not allowed to learn or kept.
            full = self._places < number
            chosen = torch.where(full, self._places, 0) + first
            rows = chosen if streams is None else streams[chosen]
            self._take(rows)
            answers.append(run(self._learner, images[chosen, None], samples[chosen, None], full)[:number, 0])
            learned.append((rows[:number], *self._learner.snapshot()))
        for rows, pieces, memory in learned:  # at the end: a call that is cut short leaves all as they were
            self._put(rows, pieces, memory)
        return Prediction.join(answers)

    def _predict_at_once(self, images: Tensor, samples: Tensor, streams: Tensor | None) -> Prediction:
        if streams is None:
            return run(self._learner, images[:, None], samples[:, None], self._learner.everyone)[:, 0]
        all_images = images.new_zeros(self.count, 1, *images.shape[1:])
        all_samples, active = samples.new_zeros(self.count, 1), streams.new_zeros(self.count, dtype=torch.bool)
        all_images[streams, 0], all_samples[streams, 0], active[streams] = images, samples, True
        return run(self._learner, all_images, all_samples, active)[streams, 0]

    def reset(self, rows: Tensor) -> None:
        """Put the replicas where `rows`, bool `(S,)`, is true back to the network as it was given."""
        if self.together == self.count:
            return self._learner.reset(rows)
        for piece, origin in zip(self._pieces, self._origin, strict=True):
            piece[rows] = origin
        for tensor in self._memory.values():
            tensor[rows] = 0

    def state(self) -> dict[str, Tensor]:
        """A copy of everything that learning changes, by name, S rows each, whatever the groups."""
        if self.together == self.count:
            return self._learner.state()
        parts: list[dict[str, Tensor]] = []
        for rows, number in self._turns():
            self._take(rows)
            parts.append({name: tensor[:number] for name, tensor in self._learner.state().items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that as many replicas of the same network and settings made.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape.
        """
        if self.together == self.count:
            return self._learner.load(state)
        for name, tensor in state.items():
            if tensor.shape[:1] != (self.count,):
                raise ValueError(f"The state does not fit: tensor {name!r} has another shape.")
        for rows, number in self._turns():
            here = rows.cpu()
            self._learner.load({name: tensor[here] for name, tensor in state.items()})
            self._put(rows[:number], *self._learner.snapshot())

    def _turns(self) -> list[tuple[Tensor, int]]:
        """All replicas in groups: the rows of each, filled up with its first, and how many are its own."""
        turns = []
        for first in range(0, self.count, self.together):
            rows, number = self._places + first, min(self.together, self.count - first)
            turns.append((torch.where(rows < self.count, rows, first), number))
        return turns

    def _take(self, rows: Tensor) -> None:
        """Bring replicas to the learner."""
        memory = {key: tensor[rows] for key, tensor in self._memory.items()}
        self._learner.restore(([piece[rows] for piece in self._pieces], memory), self._learner.everyone)

    def _put(self, rows: Tensor, pieces: list[Tensor], memory: Mapping[Any, Tensor]) -> None:
        """Keep what the first of a learner's replicas have become as these rows."""
        for piece, new in zip(self._pieces, pieces, strict=True):
            piece[rows] = new[: len(rows)]
        for key, new in memory.items():
            if key not in self._memory:
                self._memory[key] = new.new_zeros(self.count, *new.shape[1:])
            self._memory[key][rows] = new[: len(rows)]
