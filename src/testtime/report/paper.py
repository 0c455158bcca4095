"""The paper's numbers: every table of Sun et al. (2020), exactly as printed.

They are in `paper.json`, in percent, as error or accuracy (`measure`) like in the paper, under testtime's names of the
methods; `PAPER_NAMES` maps them to the paper's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from testtime.corruptions import CORRUPTIONS

Measure = Literal["error", "accuracy"]

PAPER_NAMES: Mapping[str, str] = {
    "plain": "B",
    "fixed": "JT",
    "episodic": "TTT",
    "online": "TTT-Online",
    "uda": "UDA-SS",
    "alp": "ALP",
}
"""The paper's names of the methods, in the order of its tables."""

ABBREVIATIONS: Mapping[str, str] = {
    "original": "orig",
    "gaussian_noise": "gauss",
    "shot_noise": "shot",
    "impulse_noise": "impul",
    "defocus_blur": "defoc",
    "glass_blur": "glass",
    "motion_blur": "motn",
    "zoom_blur": "zoom",
    "snow": "snow",
    "frost": "frost",
    "fog": "fog",
    "brightness": "brit",
    "contrast": "contr",
    "elastic_transform": "elast",
    "pixelate": "pixel",
    "jpeg_compression": "jpeg",
}
"""The paper's short names of the original set and the corruptions, in the order of its tables."""


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        title: Its title.
        set: The data set's name in `testtime.data`.
        level: Corruption level, or None.
        network: Architecture.
        norm: `group` or `batch`.
        measure: Whether the values are errors or accuracies.
        note: A note for the reader, usually empty.
        columns: `original` and corruptions, or classes and `average`.
        values: Percentages by method, one per column.
    """

    title: str
    set: str
    level: int | None
    network: str
    norm: str
    measure: Measure
    note: str
    columns: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]

    def value(self, method: str, column: str, measure: Measure = "error") -> float | None:
        """Return a value in the requested measure; None if the paper has none."""
        row = self.values.get(method)
        if row is None or column not in self.columns:
            return None
        found = row[self.columns.index(column)]
        return found if measure == self.measure else 100 - found

    def mean(self, method: str, columns: Sequence[str] | None = None, measure: Measure = "error") -> float | None:
        """Return the mean over some columns, by default all corruptions; the paper's tables do not have it."""
        wanted = [name for name in self.columns if name in CORRUPTIONS] if columns is None else columns
        found = [self.value(method, name, measure) for name in wanted]
        values = [value for value in found if value is not None]
        return sum(values) / len(values) if values and len(values) == len(found) else None


@functools.cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Return all tables of the paper."""
    entries = json.loads((files("testtime.report") / "paper.json").read_text(encoding="utf-8"))
    return tuple(
        PaperTable(
            **{
                **entry,
                "columns": tuple(entry["columns"]),
                "values": {method: tuple(row) for method, row in entry["values"].items()},
            }
        )
        for entry in entries
    )


def find_table(set_name: str, level: int | None = None, norm: str = "group") -> PaperTable | None:
    """Return the paper's table for a data set, level and kind of normalization, or None."""
    for table in paper_tables():
        if (table.set, table.level, table.norm) == (set_name, level, norm):
            return table
    return None
