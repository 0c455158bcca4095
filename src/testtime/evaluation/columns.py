"""The records of a unit as columns, one array per field, and what summaries and reports compute from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from testtime.evaluation.descriptions import BINS
from testtime.evaluation.records import COLUMNS, PROBABILITIES, Columns, Record, list_columns

WINDOW = 200
"""Consecutive images in which a collapse is detected."""

_COLLAPSED, _EXPECTED = 0.8, 0.5
_FLAGS = ("is_right", "was_right", "adapted", "rolled_back")


def make_columns(records: Iterable[Record]) -> Columns:
    """Convert records to columns, with `PROBABILITIES` if all records have them."""
    plain = [
        record._replace(
            label=-1 if record.label is None else record.label,
            is_right=bool(record.is_right),
            was_right=bool(record.was_right),
        )
        for record in records
    ]
    has_all = plain and all(None not in (record.probability, record.probability_before) for record in plain)
    kinds = {**COLUMNS, **PROBABILITIES} if has_all else COLUMNS
    return {name: np.array([getattr(record, name) for record in plain], kind) for name, kind in kinds.items()}


def join_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> Columns:
    """Concatenate columns, with `PROBABILITIES` if all parts have them."""
    names = list_columns(set.intersection(*(set(part) for part in parts)))
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def check_columns(columns: Mapping[str, np.ndarray]) -> None:
    """Check that columns are complete, of equal length and the right dtypes, with each image once.

    Raises:
        ValueError: The columns are invalid.
    """
    kinds = {**COLUMNS, **(PROBABILITIES if PROBABILITIES.keys() & columns.keys() else {})}
    for name, kind in kinds.items():
        if name not in columns:
            raise ValueError(f"the column {name} is missing")
        if str(columns[name].dtype) != kind or columns[name].ndim != 1:
            raise ValueError(f"the column {name} is not of type {kind}")
    if len({len(columns[name]) for name in kinds}) > 1:
        raise ValueError("its columns have different lengths")
    if any(columns[name].max(initial=0) > 1 for name in _FLAGS):
        raise ValueError("a column of flags contains other values")
    for name in PROBABILITIES.keys() & columns.keys():
        if ((columns[name] < 0) | (columns[name] > 1.001)).any():  # not NaN, which a network may answer
            raise ValueError(f"the column {name} is not in [0, 1]")
    samples, labels = columns["sample"], columns["label"]
    if samples.min(initial=0) < 0 or labels.min(initial=-1) < -1 or len(np.unique(samples)) < len(samples):
        raise ValueError("its images have invalid indices")


def count_columns(columns: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Count the records for a unit's metadata."""
    flags = {name: int(columns[name].sum()) for name in _FLAGS}
    return {"images": len(columns["sample"]), "labelled": int((columns["label"] >= 0).sum()), **flags}


def count_probabilities(columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, list[Any]]] | None:
    """Count the labelled records in bins of equal width of their probability.

    Args:
        columns: The records.

    Returns:
        For `before` and `after` the update: the number of images, the sum of their probabilities and how many are
        right, each a list of `BINS`; None if the records have no probabilities. Probabilities that are not a number
        count as 0.
    """
    if not columns.keys() >= PROBABILITIES.keys():
        return None
    found = {}
    labelled = columns["label"] >= 0
    for when, name, verdict in (("before", "probability_before", "was_right"), ("after", "probability", "is_right")):
        values = np.clip(np.nan_to_num(columns[name][labelled].astype(np.float64)), 0, 1)
        bins = np.minimum((values * BINS).astype(int), BINS - 1)
        sums = np.bincount(bins, values, BINS).round(4)
        right = np.bincount(bins, columns[verdict][labelled], BINS).astype(int)
        count = np.bincount(bins, minlength=BINS)
        found[when] = {"images": count.tolist(), "probability": sums.tolist(), "right": right.tolist()}
    return found


def find_collapses(columns: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """Return the parts of a stream in which predictions collapse to one class, as positions (start, stop).

    In `WINDOW` consecutive images, more than 80% of the predictions are one class that fewer than half of the labels
    are. Windows that overlap or touch are one collapse.
    """
    predicted, labels = columns["prediction"], columns["label"]
    starts: list[np.ndarray] = [np.array([], int)]
    if len(predicted) >= WINDOW:
        classes, counts = np.unique(predicted, return_counts=True)
        for name in classes[counts > _COLLAPSED * WINDOW]:
            often = _count_windows(predicted == name) > _COLLAPSED * WINDOW
            starts.append(np.flatnonzero(often & (_count_windows(labels == name) < _EXPECTED * WINDOW)))
    found: list[tuple[int, int]] = []
    for start in np.unique(np.concatenate(starts)).tolist():
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], start + WINDOW
        else:
            found.append((start, start + WINDOW))
    return found


def _count_windows(flags: np.ndarray) -> np.ndarray:
    """Return how many of `WINDOW` consecutive flags `(N,)` are set, `(N - WINDOW + 1,)`."""
    sums = np.concatenate([[0], np.cumsum(flags)])
    return sums[WINDOW:] - sums[:-WINDOW]
