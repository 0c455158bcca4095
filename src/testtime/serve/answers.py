"""Predictions as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.prediction import Prediction


def make_answers(prediction: Prediction, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the answer for each image, JSON-serialisable.

    Args:
        prediction: The predictions.
        names: Names of the classes; may be empty.
    """
    # One copy from the device, since every copy waits for it and lets other threads run.
    columns = [getattr(prediction, f.name).float().reshape(len(prediction), -1) for f in fields(Prediction)]
    here = {f.name: part for f, part in zip(fields(Prediction), _split(columns), strict=True)}
    after, before = (_classify(here[name], names) for name in ("logits", "logits_before"))
    values = {name: _list(here[name][:, 0]) for name in ("loss_before", "loss_after", "confidence")}
    values |= {name: here[name][:, 0].bool().tolist() for name in ("adapted", "rolled_back", "alarmed")}
    rows = zip(after, before, zip(*values.values(), strict=True), strict=True)
    return [{**one, "before": other, **dict(zip(values, row, strict=True))} for one, other, row in rows]


def _split(columns: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.cat(columns, 1).cpu().split([part.shape[1] for part in columns], 1)


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
