"""Runs episodes of a learner: from CUDA graphs, recorded at the first images of each shape, or eagerly.

A step consists of about a hundred small kernels, which take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor

from testtime.adaptation.learner import Learner
from testtime.adaptation.lookahead import Lookahead
from testtime.adaptation.method import episode
from testtime.adaptation.prediction import Prediction
from testtime.kernels.graphs import Captured, Series, record
from testtime.threads import limit_threads

_STRETCH = 64  # images of a stream per recorded call


def run(learner: Learner, images: Tensor, samples: Tensor) -> Prediction:
    """Run an episode on every replica.

    Args:
        learner: S replicas and their optimizer.
        images: `(S, B, C, H, W)`.
        samples: Sample numbers `(S, B)`.
    """
    key = (*images.shape, images.dtype)
    graph = _find(learner, key, lambda: Captured(partial(_run_episode, learner), images, samples))
    if graph is None:
        with limit_threads(_count_pixels(learner, images)):
            return episode(learner, images, samples)
    return Prediction(*graph(images, samples))


def run_each(learner: Learner, images: Tensor, samples: Tensor) -> Prediction:
    """Run sequential episodes on a single replica, for images `(N, C, H, W)` with sample numbers `(N,)`."""
    inputs = images[:, None, None], samples[:, None, None]  # (N, 1, 1, C, H, W)
    key = ("each", *images.shape[1:], images.dtype)
    first = [tensor[0] for tensor in inputs]
    graph = _find(learner, key, lambda: Series(partial(_run_episode, learner), _STRETCH, *first))
    if graph is None:
        with limit_threads(_count_pixels(learner, images[:1])):
            return _run_in_turn(learner, *inputs)
    return Prediction(*(output[:, 0, 0] for output in graph(*inputs)))


def _run_in_turn(learner: Learner, images: Tensor, samples: Tensor) -> Prediction:
    """Run sequential episodes, for images `(N, 1, 1, C, H, W)` with sample numbers `(N, 1, 1)`."""
    predictions, ahead = [], Lookahead(learner.objective)
    for number, given in enumerate(zip(images, samples, strict=True), start=1):
        ahead.expect(images[number] if number < len(images) else None)
        predictions.append(episode(learner, *given, ahead)[0])
    return Prediction.join(predictions)


def _count_pixels(learner: Learner, images: Tensor) -> int:
    """Return the pixels of the images `(…, C, H, W)` and their copies."""
    return images[..., 0, :, :].numel() * learner.settings.copies


def _run_episode(learner: Learner, images: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
    prediction = episode(learner, images, samples)
    return tuple(getattr(prediction, f.name) for f in fields(Prediction))


def _find(learner: Learner, key: Any, make: Callable[[], Captured | Series]) -> Captured | Series | None:
    """Return the recording for a shape of images, made if necessary and possible; the learner's state is unchanged."""
    if learner.eager:
        return None
    if key not in learner.recordings:
        learner.prepare()
        good = learner.snapshot()
        try:
            recording = record(make)
        finally:
            learner.restore(good, learner.all_rows)
        if recording is None:
            learner.eager = True
            return None
        learner.recordings[key] = recording
    return learner.recordings[key]
