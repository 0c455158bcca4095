"""Predictions as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.prediction import Prediction

_VALUES = ("loss_before", "loss_after", "confidence")
_FLAGS = ("adapted", "rolled_back", "alarmed")
assert [f.name for f in fields(Prediction)] == ["logits", "logits_before", *_VALUES, *_FLAGS]


def pack(prediction: Prediction) -> Tensor:
    """Return everything in a prediction as one tensor of floats `(N, 2K + 6)`, on its device.

    A step is copied from the device at once, since every copy costs time and lets other threads run.
    """
    return torch.cat([getattr(prediction, f.name).float().reshape(len(prediction), -1) for f in fields(Prediction)], 1)


def make_answers(packed: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the answer for each image, JSON-serialisable.

    Args:
        packed: Predictions as `pack` returns them, on the CPU, `(N, 2K + 6)`.
        names: Names of the classes; may be empty.
    """
    classes = (packed.shape[1] - len(_VALUES) - len(_FLAGS)) // 2
    logits, logits_before, values, flags = packed.split([classes, classes, len(_VALUES), len(_FLAGS)], 1)
    after, before = _classify(logits, names), _classify(logits_before, names)
    rows = zip(after, before, _list(values), flags.bool().tolist(), strict=True)
    return [
        {**one, "before": other, **dict(zip(_VALUES, value)), **dict(zip(_FLAGS, flag))}  # noqa: B905 (three each)
        for one, other, value, flag in rows
    ]


def _classify(logits: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    probabilities = _list(logits.softmax(-1))
    return [
        {
            "class": number,
            "name": names[number] if number < len(names) else str(number),
            "probability": row[number],
            "probabilities": row,
        }
        for number, row in zip(logits.argmax(-1).tolist(), probabilities, strict=True)
    ]


def _list(values: Tensor) -> list[Any]:
    """Return values as lists, with None for those that are not finite, which JSON does not have."""
    if values.isfinite().all():
        return values.tolist()
    return [_list(row) if row.dim() else row.item() if row.isfinite() else None for row in values]


def replace_answer(answer: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of shadow mode: the class is the original network's, the rest is unchanged."""
    return answer | {name: fixed[name] for name in ("class", "name", "probability", "probabilities", "before")}
