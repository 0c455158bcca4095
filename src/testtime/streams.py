"""Many online streams at once: cameras, users, test sets, each with a state of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from testtime.adapt import run
from testtime.adapters import Adapter
from testtime.learner import Learner, Preset, Settings, find_preset, has_rows, is_rowwise, load_learner, save_learner
from testtime.networks.ynet import YNet
from testtime.prediction import Prediction


class Streams(Adapter):
    """S online streams of images, stepped together; each is what `Online` would be by itself.

    A call takes at most one image for each stream. A stream that is not in the call stays as it is, bit for bit.

    Args:
        net: The network all streams start from; it is copied.
        count: Number of streams, S.
        preset: "paper" or "best", as for `Online`.
        **settings: Fields of `Settings`; they go before the preset's. `share` does not apply.
    """

    def __init__(self, net: YNet, count: int, *, preset: Preset = "paper", **settings: Any) -> None:
        if count < 1:
            raise ValueError(f"`count` must be at least 1, got {count}.")
        self.count = count
        super().__init__(net, Settings(**{**find_preset(preset), **settings}))
        if self.settings.share != "image":
            raise ValueError("Streams take one image each, so there is no batch to `share`.")
        if not (is_rowwise(self.settings) and has_rows(self.settings)):
            raise ValueError("This optimizer's steps or memory mix streams; use SGD, with momentum or without.")

    def reset(self, streams: Tensor | None = None) -> None:
        """Forget everything, or what the given streams, int `(M,)`, learned and counted."""
        with torch.inference_mode(False):
            if streams is None:
                super().reset()
                self._learner: Learner | None = None
                # On the network's device, as the counts.
                self._numbers = torch.zeros(self.count, dtype=torch.int64, device=self._device)
                return
            self._check_streams(streams, len(streams))
            chosen = torch.zeros(self.count, dtype=torch.bool, device=self._device)
            chosen[streams.to(self._device)] = True
            self._numbers[chosen] = 0
            if self._learner is not None:
                fresh = Learner(self._networks[0], self.count, self.settings, self._learner.shape)
                self._learner.restore(fresh.snapshot(), chosen)

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
        with torch.inference_mode(False):
            self._streams = None if streams is None else streams.to(self._device, copy=True)
            chosen = slice(None) if self._streams is None else self._streams
            answers = super().predict(images, self._numbers[chosen] if samples is None else samples)
            self._numbers[chosen] += 1
        return answers

    def _check_streams(self, streams: Tensor, count: int) -> None:
        if streams.shape != (count,) or streams.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"`streams` must be {count} integers, got {streams.dtype} {tuple(streams.shape)}.")
        if len(streams.unique()) < count or (streams < 0).any() or (streams >= self.count).any():
            raise ValueError(f"`streams` must be different numbers from 0 to {self.count - 1}, got {streams.tolist()}.")

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        if self.settings.steps == 0 or len(images) == 0:
            return self._unadapted(images)
        shape = tuple(images.shape[1:])
        if self._learner is None:
            self._learner = Learner(self._networks[0], self.count, self.settings, shape)
        if self._streams is None:
            return run(self._learner, images[:, None], samples[:, None], self._learner.everyone)[:, 0]
        chosen = self._streams
        all_images = images.new_zeros(self.count, 1, *shape)
        all_samples, active = samples.new_zeros(self.count, 1), chosen.new_zeros(self.count, dtype=torch.bool)
        all_images[chosen, 0], all_samples[chosen, 0], active[chosen] = images, samples, True
        return run(self._learner, all_images, all_samples, active)[chosen, 0]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().state_dict() | {"numbers": self._numbers.to("cpu", copy=True)} | save_learner(self._learner)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        if "numbers" not in state or state["numbers"].shape != (self.count,):
            raise ValueError(f"The state is not one of {self.count} streams.")
        self._learner = load_learner(self._networks[0], self.count, self.settings, state)
        self._numbers = state["numbers"].to(self._device, copy=True)
