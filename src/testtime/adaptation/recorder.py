"""Episodes of a learner, recorded as CUDA graphs when images of a new shape first come."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from testtime.capture import Captured, Series
from testtime.learner import Learner
from testtime.prediction import Prediction

_STRETCH = 64  # images of a stream for which one call is enough

Episode = Callable[[Learner, Tensor, Tensor, Tensor], Prediction]


def replay(learner: Learner, episode: Episode, images: Tensor, samples: Tensor, active: Tensor) -> Prediction | None:
    """What an episode answers, from a graph; None where there is none to replay.

    Args:
        learner: S replicas and their optimizer.
        episode: What to record; it takes the learner and the arguments that follow.
        images: `(S, B, C, H, W)`.
        samples: `(S, B)`.
        active: `(S,)`.
    """
    if not images.is_cuda or learner.eager:
        return None
    key = (*images.shape, images.dtype)
    if key not in learner.graphs:
        _record(learner, key, lambda: Captured(_answers(learner, episode), images, samples, active))
    return None if learner.eager else Prediction(*learner.graphs[key](images, samples, active))


def replay_each(learner: Learner, episode: Episode, images: Tensor, samples: Tensor) -> Prediction | None:
    """As `replay`, for images `(N, C, H, W)` that are N episodes of a single replica, one after another."""
    if not images.is_cuda or learner.eager:
        return None
    key = ("each", *images.shape[1:], images.dtype)
    inputs = images[:, None, None], samples[:, None, None]
    if key not in learner.graphs:
        one = _answers(learner, lambda own, image, sample: episode(own, image, sample, own.everyone))
        _record(learner, key, lambda: Series(one, _STRETCH, *(tensor[0] for tensor in inputs)))
    return None if learner.eager else Prediction(*(answer[:, 0, 0] for answer in learner.graphs[key](*inputs)))


def _answers(learner: Learner, episode: Callable[..., Prediction]) -> Callable[..., tuple[Tensor, ...]]:
    def answers(*inputs: Tensor) -> tuple[Tensor, ...]:
        prediction = episode(learner, *inputs)
        return tuple(getattr(prediction, f.name) for f in fields(Prediction))

    return answers


def _record(learner: Learner, key: tuple[object, ...], record: Callable[[], Captured | Series]) -> None:
    """Record a graph; what trying it out changed is put back. Where that fails, the learner goes on without graphs."""
    good = learner.snapshot()
    try:
        learner.graphs[key] = record()
    except torch.OutOfMemoryError:  # without a graph it would take as much
        raise
    except RuntimeError as error:
        learner.eager = True
        warnings.warn(f"CUDA graph capture failed, going on without it: {error}", stacklevel=2)
    finally:
        learner.restore(good, learner.everyone)
