"""Storage for many replicas, of which only some are computed at a time.

A step computes only the streams that have an image, in groups of a few sizes. There may be more streams than could be
computed at once: an inactive one needs memory for its parameters only, not for activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

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
        self._device = next(net.parameters()).device
        self._make = functools.partial(Learner, net, method=method, settings=settings, shape=shape)
        self._learners: dict[int, Learner] = {}
        self._resident = False  # whether all replicas are in the learner of size S
        self._stored: Snapshot | None = None  # S rows, made on demand
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
        rows = torch.arange(self.count, device=images.device) if streams is None else streams
        predictions, learned = [], []
        for learner, chosen, number in self._load(rows):
            predictions.append(run(learner, images[chosen, None], samples[chosen, None])[:number, 0])
            learned.append((rows[chosen[:number]], learner.snapshot()))
        for updated, snapshot in learned:
            self.unload().put(updated, snapshot)
        return Prediction.join(predictions)

    def observe(self, images: Tensor, streams: Tensor) -> Prediction:
        """Predict images `(M, C, H, W)` with the replicas of their streams, `(M,)`, as they are."""
        predictions = []
        for learner, chosen, number in self._load(streams):
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
            rows = torch.arange(self.count, device=self._device) if streams is None else streams
            saved = None if self._stored is None else self._stored.take(rows)

            def undo() -> None:
                self._resident = False
                if saved is None:  # nothing had been learned
                    self._stored = None
                else:
                    self.unload().put(rows, saved)

        return undo

    def read(self, row: int) -> dict[str, Tensor]:
        """Return a copy of one replica's tensors, by their names in the network."""
        if self._resident:
            return self._resident_learner().replicas.read(row)
        learner = self._learner(1)
        chosen = torch.tensor([row], dtype=torch.int64, device=self._device)
        learner.restore(self.unload().take(chosen), learner.all_rows)
        return learner.replicas.read(0)

    def reset(self, rows: Tensor) -> None:
        """Reset the replicas where `rows`, bool `(S,)`, is true to the original network."""
        if self._resident:
            return self._resident_learner().reset(rows)
        self.unload().put(rows, self._origin())

    def state(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return a copy of everything that learning changes, by name: S rows each, or the given rows, int `(M,)`."""
        if self._resident and rows is None:
            return self._resident_learner().state()
        rows = torch.arange(self.count, device=self._device) if rows is None else rows
        parts: list[dict[str, Tensor]] = []
        for learner, _, number in self._load(rows):
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
        stored = self.unload()
        for rows, number in _make_groups(self.count, self.together, self._padded, self._device):
            learner, here = self._learner(len(rows)), rows.cpu()
            learner.load({name: tensor.cpu()[here] for name, tensor in state.items()})
            stored.put(rows[:number], learner.snapshot())

    def load_rows(self, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Continue the given replicas, int `(M,)`, from a state of as many; raises like `load`."""
        learner = self._staging = self._staging or self._make(1)
        ready: list[Snapshot] = []
        for index in range(len(rows)):
            learner.load({name: tensor[index : index + 1] for name, tensor in state.items()})
            ready.append(learner.snapshot())
        for row, snapshot in zip(rows[:, None], ready, strict=True):  # only now: what does not fit changes nothing
            self.unload().put(row, snapshot)

    def unload(self) -> Snapshot:
        """Move all replicas to tensors of S rows, and return these: a change of them changes the replicas."""
        if self._resident:
            self._stored = self._resident_learner().snapshot()
            self._resident = False
        elif self._stored is None:
            self._stored = Snapshot([row.repeat_interleave(self.count, 0) for row in self._origin().pieces], {})
        return self._stored

    def _load(self, rows: Tensor) -> Iterator[tuple[Learner, Tensor, int]]:
        """Copy the given replicas, int `(M,)`, to learners, a group at a time.

        Yields:
            A learner, the indices of its replicas in `rows`, and how many of these are not padding.
        """
        stored = self.unload()
        for chosen, number in _make_groups(len(rows), self.together, self._padded, rows.device):
            learner = self._learner(len(chosen))
            learner.restore(stored.take(rows[chosen]), learner.all_rows)
            yield learner, chosen, number

    def _learner(self, size: int) -> Learner:
        if size not in self._learners:
            self._learners[size] = self._make(size)
        return self._learners[size]

    def _resident_learner(self) -> Learner:
        """Move all replicas to the learner of size S, and return it."""
        learner = self._learner(self.count)
        if not self._resident and self._stored is not None:
            learner.restore(self._stored, learner.all_rows)
        self._resident = True
        return learner

    def _origin(self) -> Snapshot:
        """Return the row of a replica that has learned nothing."""
        learner = next(iter(self._learners.values()), None) or self._learner(1)
        return Snapshot([piece[:1] for piece in learner.origin], {})


def _make_groups(count: int, most: int, padded: bool, device: torch.device) -> Iterator[tuple[Tensor, int]]:
    """Yield groups of at most `most` indices below `count`, each with its number of indices before padding.

    A group is padded with its first index to the size of a learner: 1, 4, 16, … or `most`; always `most` if `padded`.
    """
    for first in range(0, count, most):
        number, size = min(most, count - first), most if padded else 1
        while size < number:
            size *= 4
        offsets = torch.arange(min(size, most), device=device)
        yield torch.where(offsets < number, offsets, 0) + first, number
