"""The records of a unit as columns, one array per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from testtime.evaluation.records import COLUMNS, Columns, Record

_FLAGS = ("is_right", "was_right", "adapted", "rolled_back")


def make_columns(records: Iterable[Record]) -> Columns:
    """Convert records to columns."""
    plain = [
        record._replace(
            label=-1 if record.label is None else record.label,
            is_right=bool(record.is_right),
            was_right=bool(record.was_right),
        )
        for record in records
    ]
    values = zip(*plain, strict=True) if plain else [()] * len(COLUMNS)
    return {name: np.array(column, kind) for (name, kind), column in zip(COLUMNS.items(), values, strict=True)}


def join_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> Columns:
    """Concatenate columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def check_columns(columns: Mapping[str, np.ndarray]) -> None:
    """Check that columns are complete, of equal length and the right dtypes, with each image once.

    Raises:
        ValueError: The columns are invalid.
    """
    for name, kind in COLUMNS.items():
        if name not in columns:
            raise ValueError(f"the column {name} is missing")
        if str(columns[name].dtype) != kind or columns[name].ndim != 1:
            raise ValueError(f"the column {name} is not of type {kind}")
    if len({len(columns[name]) for name in COLUMNS}) > 1:
        raise ValueError("its columns have different lengths")
    if any(columns[name].max(initial=0) > 1 for name in _FLAGS):
        raise ValueError("a column of flags contains other values")
    samples, labels = columns["sample"], columns["label"]
    if samples.min(initial=0) < 0 or labels.min(initial=-1) < -1 or len(np.unique(samples)) < len(samples):
        raise ValueError("its images have invalid indices")


def count_columns(columns: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Count the records for a unit's metadata."""
    flags = {name: int(columns[name].sum()) for name in _FLAGS}
    return {"images": len(columns["sample"]), "labelled": int((columns["label"] >= 0).sum()), **flags}
