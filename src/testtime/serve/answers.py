"""Predictions as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime.adaptation.prediction import Prediction

_VALUES = ("loss_before", "loss_after", "confidence")
_FLAGS = ("adapted", "rolled_back", "alarmed")


def pack(prediction: Prediction) -> Tensor:
    """Return everything in a prediction as one tensor of floats `(N, 2K + 6)`, on its device.

    A step is copied from the device at once, in few calls: each of them lets other threads run, and waits for them.
    """
    values = torch.stack([getattr(prediction, name) for name in (*_VALUES, *_FLAGS)], 1)
    return torch.cat([prediction.logits, prediction.logits_before, values], 1).float()


def make_answers(packed: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the answer for each image, JSON-serialisable.

    Args:
        packed: Predictions as `pack` returns them, on the CPU, `(N, 2K + 6)`.
        names: Names of the classes; may be empty.
    """
    count, classes = len(packed), (packed.shape[1] - len(_VALUES) - len(_FLAGS)) // 2
    logits, others = packed[:, : 2 * classes].reshape(2 * count, classes), packed[:, 2 * classes :].numpy()
    both = _classify(logits.numpy(), logits.softmax(-1).numpy(), names)  # after and before, in turn
    values, flags = _list(others[:, : len(_VALUES)]), (others[:, len(_VALUES) :] != 0).tolist()
    return [
        {**after, "before": before, **dict(zip(_VALUES, numbers)), **dict(zip(_FLAGS, truths))}  # noqa: B905
        for after, before, numbers, truths in zip(both[::2], both[1::2], values, flags, strict=True)
    ]


def _classify(logits: np.ndarray, probabilities: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "class": number,
            "name": names[number] if number < len(names) else str(number),
            "probability": row[number],
            "probabilities": row,
        }
        for number, row in zip(logits.argmax(-1).tolist(), _list(probabilities), strict=True)
    ]


def _list(values: np.ndarray) -> list[Any]:
    """Return rows as lists, with None for values that are not finite, which JSON does not have."""
    if np.isfinite(values).all():
        return values.tolist()
    return [[value if math.isfinite(value) else None for value in row] for row in values.tolist()]


def replace_answer(answer: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of shadow mode: the class is the original network's, the rest is unchanged."""
    return answer | {name: fixed[name] for name in ("class", "name", "probability", "probabilities", "before")}
