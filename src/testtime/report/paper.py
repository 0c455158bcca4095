"""The paper's own numbers, as data: every table of Sun et al. (2020), exactly as printed.

`paper.json` holds them; a table's values are in percent, of errors or of right answers as the paper has it (`measure`),
under testtime's names of the methods. `PAPER_NAMES` says what the paper calls them.
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
"""The methods in the order of the paper's tables, and its names of them."""

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
"""The original set and the corruptions in the order of the paper's tables, and its short names of them."""


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        title: What it shows.
        set: The data set, as `testtime.data` calls it.
        level: Level of the corruptions, or None.
        network: Architecture.
        norm: `group` or `batch`.
        measure: Whether the values are errors or accuracies.
        note: What to know when reading it; mostly empty.
        columns: What the columns are: `original` and corruptions, or classes and `average`.
        values: Percent by method, one for each column.
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
        """One number in the measure asked for; None where the paper gives none."""
        row = self.values.get(method)
        if row is None or column not in self.columns:
            return None
        found = row[self.columns.index(column)]
        return found if measure == self.measure else 100 - found

    def mean(self, method: str, columns: Sequence[str] | None = None, measure: Measure = "error") -> float | None:
        """The mean over some columns, by default all corruptions, which the paper's tables leave to the reader."""
        wanted = [name for name in self.columns if name in CORRUPTIONS] if columns is None else columns
        found = [self.value(method, name, measure) for name in wanted]
        values = [value for value in found if value is not None]
        return sum(values) / len(values) if values and len(values) == len(found) else None


@functools.cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables of the paper."""
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
    """The paper's table of a data set (and level, and kind of normalization), or None."""
    for table in paper_tables():
        if (table.set, table.level, table.norm) == (set_name, level, norm):
            return table
    return None
