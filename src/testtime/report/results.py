"""From runs to tables, with intervals and tests.

`collect` arranges the units of runs in tables like the paper's (the original set and the corruptions of one level;
other sets), averages each image's verdicts over repetitions, and computes for each cell the 95% interval over images,
the spread over repetitions, and a paired test against `fixed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from testtime.corruptions import CORRUPTIONS
from testtime.data.vid import CIFAR7
from testtime.evaluation import Run
from testtime.report.paper import ABBREVIATIONS, PAPER_NAMES, Measure, PaperTable, find_table
from testtime.report.sources import (
    RunUnit,
    RunUnits,
    SetVerdicts,
    check_images,
    find_norms,
    read_verdicts,
    sort_units,
)
from testtime.report.statistics import Interval, bootstrap_means, holm, interval_of, sign_test, spread, wilson
from testtime.storage import printable

BASELINE = "fixed"
SIGNIFICANT = 0.05
ORIGINAL, MEAN = "original", "mean"
FEW = 10
"""Images, wrong or right, below which intervals are Wilson's."""


@dataclass(frozen=True)
class Cell:
    """One method on one set.

    Attributes:
        error: Error in percent, averaged over repetitions.
        interval: Its 95% interval over images.
        spread: Standard deviation over repetitions; None for a single one.
        images: Number of images.
        repetitions: Number of (run, seed) pairs.
        p_value: P-value of the paired test against `fixed`, corrected for the number of tests in the table; None for
            `fixed` itself, or if it is missing.
        to_right: Images that are right more often than with `fixed`; with one repetition, the wrong→right flips.
        to_wrong: Images that are right less often than with `fixed`.
    """

    error: float
    interval: Interval
    spread: float | None
    images: int
    repetitions: int
    p_value: float | None = None
    to_right: int | None = None
    to_wrong: int | None = None

    def value(self, measure: Measure) -> float:
        """Return the value in percent."""
        return self.error if measure == "error" else 100 - self.error

    def ends(self, measure: Measure) -> Interval:
        """Return the interval in percent."""
        low, high = self.interval
        return self.interval if measure == "error" else Interval(100 - high, 100 - low)

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.interval.high - self.interval.low) / 2

    @property
    def significance(self) -> str:
        """`*` if significantly better than `fixed`, `†` if worse, else empty."""
        if self.p_value is None or self.p_value >= SIGNIFICANT:
            return ""
        return "*" if (self.to_right or 0) > (self.to_wrong or 0) else "†"


@dataclass(frozen=True)
class Table:
    """Methods × sets.

    Attributes:
        title: Its title.
        family: The data set of the columns.
        level: Corruption level, or None.
        columns: Keys of the columns in order: `original`, corruptions, `mean`; or names of sets; or classes.
        rows: Cells by method and column; a method need not have all columns.
        paper: The corresponding table of the paper, or None.
        norm: The networks' normalization; each of the paper's tables is for one kind.
    """

    title: str
    family: str
    level: int | None
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Cell]]
    paper: PaperTable | None = None
    norm: str = "group"

    @property
    def shifted(self) -> tuple[str, ...]:
        """The columns that are averaged."""
        return tuple(name for name in self.columns if name not in (ORIGINAL, MEAN))

    def set_name(self, column: str) -> str:
        """Return the name of a column's set."""
        if column == ORIGINAL:
            return original_of(self.family)
        if self.level is not None:
            return f"{self.family}/{column}/{self.level}"
        return f"{self.family}/{column}" if self.family else column

    def best(self, column: str) -> float:
        """Return the lowest error in a column, as printed."""
        return min(round(row[column].error, 1) for row in self.rows.values() if column in row)

    def is_best(self, method: str, column: str) -> bool:
        """Whether a method's printed error is the lowest in its column; False if all methods have it."""
        errors = {round(row[column].error, 1) for row in self.rows.values() if column in row}
        return len(errors) > 1 and round(self.rows[method][column].error, 1) == self.best(column)

    def short_titles(self) -> list[str]:
        """Return short titles of the columns: the paper's abbreviations if it has one for each, else the titles."""
        usual = all(column in (*ABBREVIATIONS, MEAN) for column in self.columns)
        return [column_short(column) if usual else column_title(column) for column in self.columns]

    def paper_value(self, method: str, column: str, measure: Measure) -> float | None:
        """Return the paper's value for a cell, or None."""
        if self.family == "":
            table = find_table(column, None, self.norm)
            return None if table is None else table.value(method, "average", measure)
        if self.paper is None:
            return None
        if column == MEAN:
            return self.paper.mean(method, self.shifted, measure)
        return self.paper.value(method, column, measure)


@dataclass(frozen=True)
class Results:
    """The results of some runs.

    Attributes:
        runs: The runs.
        tables: The tables, highest corruption level first, then other sets.
        sources: The labelled units by method and set name.
        seconds: Seconds per image by method, over all its units.
        notes: Notes for the reader, on what was omitted and why.
    """

    runs: Sequence[Run]
    tables: tuple[Table, ...]
    sources: Mapping[tuple[str, str], tuple[RunUnit, ...]]
    seconds: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the paper's order, then others."""
        return order_methods({method for method, _ in self.sources})


def order_methods(methods: set[str]) -> tuple[str, ...]:
    """Sort methods in the paper's order, then others by name."""
    known = [method for method in PAPER_NAMES if method in methods]
    return (*known, *sorted(methods - set(known)))


def order_corruptions(names: Iterable[str]) -> tuple[str, ...]:
    """Sort corruptions in the paper's order, then others by name."""
    wanted = set(names)
    known = [name for name in CORRUPTIONS if name in wanted]
    return (*known, *sorted(wanted - set(known)))


def original_of(family: str) -> str:
    """Return the original set of a family of shifted sets: `cifar10` for `cifar10-c`."""
    return family.rpartition("-")[0]


def column_title(key: str) -> str:
    """Return a column's title."""
    return key.replace("_", " ") if key in ABBREVIATIONS else printable(key)


def column_short(key: str) -> str:
    """Return a column's short title, abbreviated as in the paper."""
    return ABBREVIATIONS.get(key) or printable(key)


def method_title(method: str) -> str:
    """Return a method's name and the paper's name for it."""
    return f"{method} ({PAPER_NAMES[method]})" if method in PAPER_NAMES else printable(method)


def collect(runs: Sequence[Run], seed: int = 0) -> Results:
    """Arrange the units of runs in tables.

    Units with the same method and set, from several seeds or runs, are repetitions.

    Args:
        runs: Runs with one kind of network on the same data.
        seed: Seed of the bootstrap.

    Raises:
        ResultsError: There is nothing to report, or the runs cannot be combined.
    """
    sources, notes = sort_units(runs)
    verdicts = {key: read_verdicts(key, found) for key, found in sources.items()}
    check_images(verdicts, sources)
    norm = "batch" if find_norms(runs) == {"batch"} else "group"
    tables = [replace(_measure(*layout, verdicts, seed), norm=norm) for layout in _lay_out(sources, norm)]
    classes = _by_class(sources, verdicts, norm, seed)
    seconds = {
        method: float(np.mean([part / len(verdicts[key].samples) for key in keys for part in verdicts[key].seconds]))
        for method in {method for method, _ in sources}
        if (keys := [key for key in sources if key[0] == method])
    }
    return Results(runs, (*tables, *classes), sources, seconds, tuple(notes))


_Layout = tuple[str, str, int | None, dict[str, str], "PaperTable | None"]  # title, family, level, key → set, paper


def _lay_out(sources: RunUnits, norm: str) -> Iterator[_Layout]:
    """Yield the sets of each table."""
    units = {key[1]: entries[0].unit for key, entries in sources.items()}
    taken: set[str] = set()
    families = sorted({name.split("/")[0] for name, unit in units.items() if unit.level is not None})
    for family in families:
        original = original_of(family)
        levels = {unit.level for name, unit in units.items() if name.split("/")[0] == family and unit.level}
        for level in sorted(levels, reverse=True):
            keys = {ORIGINAL: original} if original in units else {}
            shifts = {
                unit.corruption: name
                for name, unit in units.items()
                if name.split("/")[0] == family and unit.level == level and unit.corruption
            }
            keys |= {name: shifts[name] for name in order_corruptions(shifts)}
            taken |= set(keys.values())
            yield f"{family}, level {level}", family, level, keys, find_table(family, level, norm)
    gradual = {name: unit for name, unit in units.items() if unit.corruption is not None and unit.level is None}
    for family in sorted({name.split("/")[0] for name in gradual}):
        noises = {str(unit.corruption): name for name, unit in gradual.items() if name.split("/")[0] == family}
        keys = {noise: noises[noise] for noise in order_corruptions(noises)}
        taken |= set(keys.values())
        yield f"{family}, noise growing from level 1 to 5", family, None, keys, None
    for family in dict.fromkeys(name.split("/")[0] for name in units if "/" in name and name not in taken):
        shifts = {name.partition("/")[2]: name for name in units if name.split("/")[0] == family and name not in taken}
        if len(shifts) < 2 or family == "folder":
            continue  # image folders are not shifts of one set
        keys = ({ORIGINAL: original_of(family)} if original_of(family) in units else {}) | shifts
        taken |= set(keys.values())
        yield family, family, None, keys, None
    rest = {name: name for name in units if name not in taken}
    if rest:
        yield "Other test sets" if taken else "Test sets", "", None, rest, None


def _measure(
    title: str,
    family: str,
    level: int | None,
    keys: Mapping[str, str],
    paper: PaperTable | None,
    verdicts: Mapping[tuple[str, str], SetVerdicts],
    seed: int,
) -> Table:
    shifts = [column for column in keys if column != ORIGINAL]
    with_mean = family != "" and len(shifts) > 1
    methods = order_methods({method for method, name in verdicts if name in keys.values()})
    seen = {method for method, name in verdicts if name in keys.values() and name != keys.get(ORIGINAL)}
    elsewhere = {method for method, name in verdicts if name.split("/")[0] == family} - seen
    methods = tuple(method for method in methods if method not in elsewhere)  # it was run on other levels only
    rows: dict[str, dict[str, Cell]] = {}
    for method in methods:
        here = {column: verdicts[method, name] for column, name in keys.items() if (method, name) in verdicts}
        base = {column: verdicts[BASELINE, name] for column, name in keys.items() if (BASELINE, name) in verdicts}
        rows[method] = _measure_row(here, {} if method == BASELINE else base, shifts if with_mean else [], seed)
    columns = [column for column in keys if any(column in row for row in rows.values())]
    columns = (*columns, MEAN) if with_mean else tuple(columns)
    return Table(title, family, level, columns, _correct(rows), paper)


def _measure_row(
    here: Mapping[str, SetVerdicts], base: Mapping[str, SetVerdicts], averaged: Sequence[str], seed: int
) -> dict[str, Cell]:
    """Return the cells of one method, with the mean over `averaged` if all of them are available."""
    cells: dict[str, Cell] = {}
    drawn: dict[str, np.ndarray] = {}
    groups: dict[bytes, list[str]] = {}
    for column, found in here.items():
        groups.setdefault(found.samples.tobytes(), []).append(column)
    for columns in groups.values():  # the same images: resampled together
        wrong = 100 * (1 - np.stack([here[column].share for column in columns], 1))
        drawn |= dict(zip(columns, bootstrap_means(wrong, seed).T, strict=True))
    gains: dict[str, np.ndarray] = {}
    for column, found in here.items():
        errors = 100 * (1 - found.right.mean(1))
        cell = Cell(
            float(errors.mean()),
            _find_interval(found.share, drawn[column]),
            spread(errors.tolist()),
            len(found.samples),
            len(found.right),
        )
        if column in base:
            gains[column] = found.share - base[column].share
            cell = _compare(cell, gains[column])
        cells[column] = cell
    if averaged and all(column in here for column in averaged):
        parts = [cells[column] for column in averaged]
        repetitions = min(part.repetitions for part in parts)
        errors = [
            float(np.mean([100 * (1 - here[column].right[index].mean()) for column in averaged]))
            for index in range(repetitions)
        ]
        together = len({here[column].samples.tobytes() for column in averaged}) == 1
        shares = [here[column].share for column in averaged]
        share = np.mean(shares, axis=0) if together else np.concatenate(shares)
        cell = Cell(
            float(np.mean([part.error for part in parts])),
            _find_interval(share, np.mean([drawn[column] for column in averaged], axis=0)),
            spread(errors) if len({part.repetitions for part in parts}) == 1 else None,
            sum(part.images for part in parts),
            repetitions,
        )
        if all(column in gains for column in averaged):
            stacked = [gains[column] for column in averaged]
            # One image under all corruptions is one observation, not fifteen.
            cell = _compare(cell, np.sum(stacked, axis=0) if together else np.concatenate(stacked))
        cells[MEAN] = cell
    return cells


def _find_interval(share: np.ndarray, drawn: np.ndarray) -> Interval:
    """Return the interval of an error in percent: Wilson's where few are wrong or right and a bootstrap misleads.

    Args:
        share: How often each image is right, `(N,)`.
        drawn: Errors of bootstrap samples, in percent.
    """
    wrong = float((1 - share).sum())
    if min(wrong, len(share) - wrong) >= FEW:
        return interval_of(drawn)
    low, high = wilson(wrong, len(share))
    return Interval(100 * low, 100 * high)


def _compare(cell: Cell, gains: np.ndarray) -> Cell:
    more, fewer = int((gains > 1e-9).sum()), int((gains < -1e-9).sum())
    return replace(cell, p_value=sign_test(more, fewer), to_right=more, to_wrong=fewer)


def _correct(rows: Mapping[str, Mapping[str, Cell]]) -> dict[str, dict[str, Cell]]:
    """Correct the p-values for the number of tests in the table."""
    tests = [(method, column) for method, row in rows.items() for column in row if row[column].p_value is not None]
    corrected = holm([rows[method][column].p_value or 0.0 for method, column in tests])
    changed = {method: dict(row) for method, row in rows.items()}
    for (method, column), p_value in zip(tests, corrected, strict=True):
        changed[method][column] = replace(changed[method][column], p_value=p_value)
    return changed


def _by_class(
    sources: RunUnits, verdicts: Mapping[tuple[str, str], SetVerdicts], norm: str, seed: int
) -> Iterator[Table]:
    """Yield the paper's table of the seven classes shared by VID-Robust and CIFAR-10."""
    name = "vid-cifar7"
    found = {method: verdicts[method, name] for method, key in sources if key == name}
    if not found:
        return
    numbers = {title: number for number, title in enumerate(CIFAR7)}  # as the set's labels
    parts: dict[tuple[str, str], SetVerdicts] = {(method, "average"): one for method, one in found.items()}
    for title, number in numbers.items():
        for method, one in found.items():
            mask = one.labels == number
            if mask.any():
                parts[method, title] = SetVerdicts(one.samples[mask], one.labels[mask], one.right[:, mask], one.seconds)
    keys = {title: title for title in (*numbers, "average") if any(key[1] == title for key in parts)}
    table = _measure("vid-cifar7 by class", "", None, keys, find_table(name, None, norm), parts, seed)
    yield replace(table, family=name)
