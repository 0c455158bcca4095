"""Predictions as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from testtime.adaptation.prediction import Prediction


def make_answers(prediction: Prediction, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the answer for each image, JSON-serialisable.

    Args:
        prediction: The predictions.
        names: Names of the classes; may be empty.
    """
    here = Prediction(*(getattr(prediction, f.name).cpu() for f in fields(Prediction)))
    after, before = (_classify(logits, names) for logits in (here.logits, here.logits_before))
    return [
        {
            **after[row],
            "before": before[row],
            "loss_before": _finite(float(here.loss_before[row])),
            "loss_after": _finite(float(here.loss_after[row])),
            "confidence": _finite(float(here.confidence[row])),
            "adapted": bool(here.adapted[row]),
            "rolled_back": bool(here.rolled_back[row]),
            "alarmed": bool(here.alarmed[row]),
        }
        for row in range(len(here))
    ]


def _classify(logits: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    probabilities = logits.float().softmax(-1).tolist()
    classes = logits.argmax(-1).tolist()
    return [
        {
            "class": number,
            "name": names[number] if number < len(names) else str(number),
            "probability": _finite(row[number]),
            "probabilities": [_finite(value) for value in row],
        }
        for number, row in zip(classes, probabilities, strict=True)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def replace_answer(answer: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of shadow mode: the class is the original network's, the rest is unchanged."""
    return answer | {name: fixed[name] for name in ("class", "name", "probability", "probabilities", "before")}
