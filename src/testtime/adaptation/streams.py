"""Many online streams at once: cameras, users, test sets, each with a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from testtime.adapters import Adapter
from testtime.calibrate import fit
from testtime.groups import Groups
from testtime.learner import (
    Preset,
    Settings,
    find_preset,
    has_rows,
    is_rowwise,
    load_learner,
    read_counts,
    save_learner,
)
from testtime.networks.ynet import YNet
from testtime.prediction import Prediction


class Streams(Adapter):
    """S online streams of images, stepped together; each is what `Online` would be by itself.

    A call takes at most one image for each stream. A stream that is not in the call stays as it is, bit for bit.

    A call computes the streams that take part, in groups of 1, 4, 16 and so on, and not all of them. There may be many
    more than can be computed side by side: a stream that waits takes the memory of what it has learned, not that of its
    views on their way through the network.

    Args:
        net: The network all streams start from; it is copied.
        count: Number of streams, S.
        together: At most so many are computed side by side; by default as many as are fast, if they fit into the
            memory.
        preset: "paper" or "best", as for `Online`.
        **settings: Fields of `Settings`; they go before the preset's. `share` does not apply.
    """

    def __init__(
        self, net: YNet, count: int, *, together: int | None = None, preset: Preset = "paper", **settings: Any
    ) -> None:
        for name, value in (("count", count), ("together", together)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.count, self._limit = count, together
        self._streams: Tensor | None = None  # of the call at work; None for all
        super().__init__(net, Settings(**{**find_preset(preset), **settings}))
        if self.settings.share != "image":
            raise ValueError("Streams take one image each, so there is no batch to `share`.")
        if not (is_rowwise(self.settings) and has_rows(self.settings)):
            raise ValueError("This optimizer's steps or memory mix streams; use SGD, with momentum or without.")

    @property
    def together(self) -> int:
        """How many streams are computed side by side; before the first images, the most that may be."""
        return self._groups.together if self._groups else min(self.count, self._limit or self.count)

    def reset(self, streams: Tensor | None = None) -> None:
        """Forget everything, or what the given streams, int `(M,)`, learned and counted."""
        with self._turn, torch.inference_mode(False):
            if streams is None:
                super().reset()
                self._groups: Groups | None = None
                # On the network's device, as the counts.
                self._numbers = torch.zeros(self.count, dtype=torch.int64, device=self._device)
                return
            self._check_streams(streams, len(streams))
            chosen = torch.zeros(self.count, dtype=torch.bool, device=self._device)
            chosen[streams.to(self._device)] = True
            self._numbers[chosen] = 0
            if self._groups is not None:
                self._groups.reset(chosen)

    def predict(self, images: Tensor, samples: Tensor | None = None, *, streams: Tensor | None = None) -> Prediction:
        """Adapt each stream to its next image and predict it.

        Args:
            images: `(M, C, H, W)`, uint8 or floats in [0, 1].
            samples: The images' numbers within their streams, `(M,)`; each stream counts its own by default.
            streams: Which stream each image belongs to, int `(M,)`, no stream twice; by default all S in order.

        Raises:
            ValueError: Images, numbers or streams do not fit; nothing was learned.
        """
        self._check(images, samples)
        if streams is not None:
            self._check_streams(streams, len(images))
        elif len(images) != self.count:
            raise ValueError(f"`images` must be one for each of the {self.count} streams, got {len(images)}.")
        with self._turn, torch.inference_mode(False):
            self._streams = None if streams is None else streams.to(self._device, copy=True)
            return super().predict(images, self._numbers[self._chosen()] if samples is None else samples)

    def _chosen(self) -> slice | Tensor:
        """The streams of the call at work."""
        return slice(None) if self._streams is None else self._streams

    def _remember(self) -> Callable[[], None]:
        numbers, groups = self._numbers, self._groups
        undo_groups = None if groups is None else groups.remember(self._streams)

        def undo() -> None:
            self._numbers, self._groups = numbers, groups
            if undo_groups is not None:
                undo_groups()

        return undo

    def network(self, stream: int) -> YNet:
        """A network with what a stream has learned so far, to save or to use as it is. The stream goes on without it.

        Raises:
            ValueError: There is no such stream.
        """
        if not 0 <= stream < self.count:
            raise ValueError(f"`stream` must be from 0 to {self.count - 1}, got {stream}.")
        with self._turn, torch.inference_mode(False):
            return self._network(self._groups.read(stream) if self._groups else {})

    def _check_streams(self, streams: Tensor, count: int) -> None:
        if streams.shape != (count,) or streams.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"`streams` must be {count} integers, got {streams.dtype} {tuple(streams.shape)}.")
        if len(streams.unique()) < count or (streams < 0).any() or (streams >= self.count).any():
            raise ValueError(f"`streams` must be different numbers from 0 to {self.count - 1}, got {streams.tolist()}.")

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        numbers = self._numbers.clone()
        numbers[self._chosen()] += 1
        self._numbers = numbers
        if self.settings.steps == 0 or len(images) == 0:
            return self._unadapted(images)
        shape = tuple(images.shape[1:])

        def attempt(together: int) -> Prediction:
            groups = self._groups
            if groups is None or together < groups.together:
                groups = self._make(shape, together)
                if self._groups is not None:
                    groups.load(self._groups.state())
            answers = groups.predict(images, samples, self._streams)
            self._groups = groups  # not before: what was learned must outlive a try that fails
            return answers

        return fit(self._groups.together if self._groups else self._most(shape), attempt)

    def _most(self, shape: tuple[int, ...]) -> int:
        return min(self.count, self._limit or super()._most(shape))

    def _make(self, shape: tuple[int, ...], together: int) -> Groups:
        return Groups(self._networks[0], self.count, together, self.settings, shape)

    def _learned(self) -> dict[str, Tensor]:
        return {"numbers": self._numbers.to("cpu", copy=True)} | save_learner(self._groups)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        numbers = read_counts(state, "numbers", self.count)
        self._groups = load_learner(state, self._networks[0], lambda shape: self._make(shape, self._most(shape)))
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=self._device)
