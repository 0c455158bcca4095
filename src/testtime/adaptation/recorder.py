"""Episodes of a learner: replayed from CUDA graphs, recorded when images of a new shape first come, or run as they are.

A step of test-time training is some hundred small kernels; launching them one by one costs more than running them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor

from testtime.adaptation.learner import Learner
from testtime.adaptation.method import episode
from testtime.adaptation.prediction import Prediction
from testtime.kernels.graphs import Captured, Series, record

_STRETCH = 64  # images of a stream for which one call is enough


def run(learner: Learner, images: Tensor, samples: Tensor) -> Prediction:
    """An episode of every replica.

    Args:
        learner: S replicas and their optimizer.
        images: `(S, B, C, H, W)`.
        samples: `(S, B)`.
    """

    def whole(images: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
        return _answer(learner, images, samples)

    key = (*images.shape, images.dtype)
    graph = _find(learner, key, lambda: Captured(whole, images, samples))
    if graph is None:
        return episode(learner, images, samples, learner.everyone)
    return Prediction(*graph(images, samples))


def run_each(learner: Learner, images: Tensor, samples: Tensor) -> Prediction:
    """Episodes of a single replica, one after another, for images `(N, C, H, W)`; samples `(N,)`."""

    def one(image: Tensor, sample: Tensor) -> tuple[Tensor, ...]:
        return _answer(learner, image, sample)

    inputs = images[:, None, None], samples[:, None, None]  # (N, 1, 1, C, H, W)
    key = ("each", *images.shape[1:], images.dtype)
    graph = _find(learner, key, lambda: Series(one, _STRETCH, *(tensor[0] for tensor in inputs)))
    if graph is None:
        return Prediction.join([episode(learner, *both, learner.everyone)[0] for both in zip(*inputs, strict=True)])
    return Prediction(*(answer[:, 0, 0] for answer in graph(*inputs)))


def _answer(learner: Learner, images: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
    prediction = episode(learner, images, samples, learner.everyone)
    return tuple(getattr(prediction, f.name) for f in fields(Prediction))


def _find(learner: Learner, key: Any, make: Callable[[], Captured | Series]) -> Captured | Series | None:
    """The recording for images of a shape, made where it can be; what trying it out changed is put back."""
    if learner.eager:
        return None
    if key not in learner.recordings:
        good = learner.snapshot()
        try:
            recording = record(make)
        finally:
            learner.restore(good, learner.everyone)
        if recording is None:
            learner.eager = True
            return None
        learner.recordings[key] = recording
    return learner.recordings[key]
