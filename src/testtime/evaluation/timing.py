"""The cost of methods, and streams that do not wait: a method slower than the stream learns only from some calls.

A stream of `rate` images per second delivers a batch every `batch / rate` seconds. A method that takes k times as long
per call, rounded up, learns from every k-th; the others are answered by its current network. The seconds per call are
measured once and stored in the run, `RUN/speeds.json`, so that a resumed run is the same (Alfarra et al., "Evaluation
of Test-Time Adaptation Under Computational Time Constraints", 2024).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from testtime.adaptation.adapters import Adapter
from testtime.adaptation.prediction import Prediction
from testtime.checks import is_number, is_table_of
from testtime.evaluation.units import SPEEDS, RunError
from testtime.storage import FileError, read_json, write_atomic

CALLS = 4
"""Calls of a measurement, of which the first is not counted."""


class Paced:
    """Predicts with an adapter that learns only from every k-th call.

    Args:
        adapter: The adapter.
        every: k.
        first: Number of the first call; those divisible by k are learned from.
        idle: Predicts without learning in place of the adapter, whose state it cannot know.
    """

    def __init__(self, adapter: Adapter, every: int, first: int = 0, idle: Adapter | None = None) -> None:
        self.adapter, self.every, self.idle = adapter, every, idle
        self._call = first

    def predict(self, images: Tensor, samples: Tensor) -> Prediction:
        """Predict images `(N, C, H, W)` with sample numbers `(N,)`."""
        call, self._call = self._call, self._call + 1
        if call % self.every == 0:
            return self.adapter.predict(images, samples=samples)
        if self.idle is not None:
            return self.idle.predict(images, samples=samples)
        return predict_only(self.adapter, images, samples)


def predict_only(adapter: Adapter, images: Tensor, samples: Tensor) -> Prediction:
    """Predict images with what an online adapter has learned so far, without learning from them.

    It learns from them, and its state is restored: loading a state would remake its replicas and recordings.
    """
    size = 1 if adapter.settings.share == "image" else len(images)  # single images would learn from each other
    parts: list[Prediction] = []
    for some, numbers in zip(images.split(size), samples.split(size), strict=True):
        undo, others = adapter._make_undo(), (adapter.seen, adapter._counts, dict(adapter._extra))
        found = adapter.predict(some, samples=numbers)
        undo()
        adapter.seen, adapter._counts, adapter._extra = others
        parts.append(Prediction.unadapted(found.logits_before, found.loss_before, found.confidence))
    return Prediction.join(parts)


def measure(adapter: Adapter, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the median seconds per call of an adapter; the first call is not counted.

    Args:
        adapter: The adapter.
        batches: Sample numbers and images of each call, at least one.
    """
    seconds = []
    for numbers, images in batches:
        begin = time.perf_counter()
        adapter.predict(images, samples=numbers).logits.cpu()  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:] or seconds)


def count_state(adapter: Adapter) -> int:
    """Return the bytes of what an adapter has learned: what a stream stores between images."""
    state = {name: tensor for name, tensor in adapter.state_dict().items() if name.startswith("learner/")}
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def find_every(seconds: float, batch: int, rate: float) -> int:
    """Return the k for which a method that takes some seconds per call learns from every k-th.

    Args:
        seconds: Seconds per call.
        batch: Images per call.
        rate: Images per second of the stream.
    """
    return max(1, math.ceil(seconds * rate / batch))


def read_speeds(folder: str | Path) -> dict[str, float]:
    """Return the seconds per call of each method measured so far, from a run's folder.

    Raises:
        RunError: The file is damaged.
    """
    path, remedy = Path(folder) / SPEEDS, "remove it and the run's units to measure again"
    if not path.exists():
        return {}
    try:
        held = read_json(path, 1 << 20)
    except FileError as error:
        raise RunError(path, error.fault, remedy) from None
    if not is_table_of(lambda value: is_number(value) and value >= 0)(held):
        raise RunError(path, "not seconds by method", remedy)
    return {name: float(seconds) for name, seconds in held.items()}


def write_speeds(folder: str | Path, speeds: Mapping[str, float]) -> None:
    """Write the seconds per call of each method to a run's folder, atomically."""
    write_atomic(Path(folder) / SPEEDS, json.dumps(dict(speeds), indent=1) + "\n")
