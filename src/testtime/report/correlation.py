"""Gradient correlation against improvement: a gradient study joined with the errors of runs (paper, figure 4).

`join` takes the file of `testtime gradients` and runs of the same network, and computes the linear correlation of each
predictor with the improvement of each method, with a bootstrap interval over the sets. The paper reports 0.93 for the
standard and 0.89 for the online version, over 75 sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from testtime.checks import format_value
from testtime.diagnosis.gradient_study import read_gradient_study
from testtime.evaluation import open_runs
from testtime.randomness import Draws
from testtime.report.canvas import Drawing, Tones, colour_of
from testtime.report.results import BASELINE, MEAN, Results, collect, method_title
from testtime.report.sources import ResultsError
from testtime.report.statistics import ROUNDS, Interval, fit_line, interval_of
from testtime.storage import printable, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER: Mapping[str, float] = {"episodic": 0.93, "online": 0.89}
"""The paper's correlation of the inner product per batch with the improvement."""

PREDICTORS: Mapping[str, str] = {
    "batch.inner": "inner product, by batch",
    "batch.cosine": "cosine, by batch",
    "single.inner": "inner product, by image",
    "single.cosine": "cosine, by image",
    "stand_in_batch.inner": "inner product, by batch, no labels",
    "stand_in_batch.cosine": "cosine, by batch, no labels",
    "balance.inner": "inner product, balance, no labels",
    "balance.cosine": "cosine, balance, no labels",
    "stand_in_single.inner": "inner product, by image, no labels",
    "stand_in_single.cosine": "cosine, by image, no labels",
    "task_loss": "the task's loss",
    "task_error": "the task's error",
    "entropy": "the classifier's entropy",
    "error": "the error before adaptation",
}
"""The predictors and their titles; the first is the paper's."""


@dataclass(frozen=True)
class Fit:
    """How well a predictor explains the improvement of a method.

    Attributes:
        predictor: A key of `PREDICTORS`.
        method: The method.
        sets: Number of sets.
        correlation: Pearson's r.
        interval: Its 95% bootstrap interval over sets.
        slope: Improvement in points per unit of the predictor.
        offset: The line's value at 0.
    """

    predictor: str
    method: str
    sets: int
    correlation: float
    interval: Interval
    slope: float
    offset: float


@dataclass(frozen=True)
class Joined:
    """A gradient study joined with improvements.

    Attributes:
        names: The sets in both.
        values: Each predictor on each set; NaN where the study has none.
        improvements: Points by which each method's error is below that of `fixed`, per set.
        fits: Every predictor with every method, the paper's first.
        notes: Notes for the reader.
    """

    names: tuple[str, ...]
    values: Mapping[str, np.ndarray]
    improvements: Mapping[str, np.ndarray]
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the result as JSON-serializable data."""
        return {
            "sets": list(self.names),
            "values": {key: [None if v != v else v for v in row.tolist()] for key, row in self.values.items()},
            "improvements": {method: row.tolist() for method, row in self.improvements.items()},
            "fits": [asdict(fit) | {"interval": list(fit.interval)} for fit in self.fits],
            "paper": dict(PAPER),
            "notes": list(self.notes),
        }


def join(study: str | Path, runs: Sequence[str | Path], seed: int = 0) -> Joined:
    """Join a gradient study with the errors of runs.

    Args:
        study: The study's file.
        runs: Run folders or summaries, of the same network, with `fixed` and methods that adapt.
        seed: Seed of the bootstrap.

    Raises:
        StudyError: The file is not a gradient study.
        RunError: A path is not a run.
        ResultsError: The networks differ, or there are too few sets in common.
    """
    found, results = read_gradient_study(study), collect([run for path in runs for run in open_runs(path)], seed)
    _check_network(found, results)
    errors = _errors(results)
    adapting = [method for method in results.methods if method != BASELINE and method in PAPER]
    names = [
        name
        for name in found["sets"]
        if (BASELINE, name) in errors and all((method, name) in errors for method in adapting)
    ]
    if not adapting or BASELINE not in results.methods:
        fault = "has no fixed" if adapting else "has neither episodic nor online"
        raise ResultsError(results.runs[0].path, fault, "pass the runs of both, on the same sets")
    if len(names) < 3:
        raise ResultsError(study, f"needs at least 3 sets in common with the runs, got {len(names)}")
    values = {key: np.array([_value(found["sets"][name], key) for name in names]) for key in PREDICTORS}
    improvements = {
        method: np.array([errors[BASELINE, name] - errors[method, name] for name in names]) for method in adapting
    }
    fits = [
        fit
        for key in PREDICTORS
        for method in adapting
        if (fit := _fit(key, method, values[key], improvements[method], seed)) is not None
    ]
    left = sorted(set(found["sets"]) - set(names))
    notes = [f"{len(left)} sets of the study are not in the runs: {printable(', '.join(left[:3]))}…"] if left else []
    return Joined(tuple(names), values, improvements, tuple(fits), tuple(notes))


def bootstrap_correlation(x: np.ndarray, y: np.ndarray, seed: int = 0, rounds: int = ROUNDS) -> Interval:
    """Return the 95% bootstrap interval of Pearson's r for points `(N,)`."""
    count = len(x)
    drawn = (
        Draws.of(seed, torch.arange(rounds, device="cpu"))
        .purpose("bootstrap correlation")
        .integers(count, count)
        .numpy()
    )
    xs, ys = x[drawn], y[drawn]  # (rounds, N)
    xs, ys = xs - xs.mean(1, keepdims=True), ys - ys.mean(1, keepdims=True)
    scale = np.sqrt((xs**2).sum(1) * (ys**2).sum(1))
    usable = scale > 1e-12 * max(scale.max(), 1e-300)  # a round may draw only one distinct point
    return interval_of((xs * ys).sum(1)[usable] / scale[usable])


def draw_correlation(
    correlations: np.ndarray,
    improvements: np.ndarray,
    *,
    name: str = "correlation",
    title: str = "gradient correlation against improvement",
    x_label: str = "inner product of the two tasks' gradients",
    y_label: str = "improvement in error, points",
    colour: str = "online",
) -> Drawing:
    """Draw gradient correlation against improvement: a point per test set, a line and its 99% band (figure 4).

    Args:
        correlations: Mean inner product of the main and the self-supervised gradient on each set, `(N,)`.
        improvements: Decrease of the error on each set, `(N,)`.
        name: The drawing's name.
        title: The drawing's title.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        colour: The method whose colour to use.

    Raises:
        ValueError: There are too few points for a line.
    """
    x, y = np.asarray(correlations, float), np.asarray(improvements, float)
    line = fit_line(x, y, 0.99)

    def draw(figure: Figure, tones: Tones) -> None:
        axes = figure.add_subplot()
        axes.fill_between(line.at, line.low, line.high, color=colour_of(colour), alpha=0.18, linewidth=0)
        axes.plot(line.at, line.slope * line.at + line.offset, color=colour_of(colour), linewidth=1.9)
        axes.plot(x, y, linestyle="none", marker="o", markersize=4.5, color=colour_of(colour), alpha=0.8)
        axes.annotate(
            f"r = {line.correlation:.2f}, n = {len(x)}",
            (0.03, 0.97),
            xycoords="axes fraction",
            va="top",
            color=tones.ink,
        )
        axes.axhline(0, color=tones.rule, linewidth=1)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid()

    return Drawing(name, title, (4.6, 3.6), draw)


def draw(joined: Joined) -> list[Drawing]:
    """Draw the paper's scatter plot for each method, and those without labels."""
    drawings = []
    for key in ("batch.inner", "balance.inner", "stand_in_batch.inner"):
        for method, improvement in joined.improvements.items():
            usable = np.isfinite(joined.values[key])
            if usable.sum() < 3 or np.ptp(joined.values[key][usable]) == 0:
                continue
            what, _, how = PREDICTORS[key].partition(", ")
            drawings.append(
                draw_correlation(
                    joined.values[key][usable],
                    improvement[usable],
                    name=f"gradients-{method}-{key.replace('.', '-').replace('_', '-')}",
                    title=f"{PREDICTORS[key]} against the improvement of {method}",
                    x_label=f"{what} of the two gradients" + (f" ({how})" if how != "by batch" else ""),
                    y_label=f"improvement of {method}, points",
                    colour=method,
                )
            )
    return drawings


def format_correlations(joined: Joined) -> str:
    """Format the correlations as a text table."""
    methods = list(joined.improvements)
    width = max(map(len, PREDICTORS.values()))
    lines = [f"Linear correlation with the improvement in error over {len(joined.names)} sets, 95% intervals"]
    lines.append(" ".join([f"{'':<{width}}", *(f"{method_title(method):>24}" for method in methods)]))
    for key, words in PREDICTORS.items():
        row = {fit.method: fit for fit in joined.fits if fit.predictor == key}
        if row:
            cells = [_cell(row.get(method)) for method in methods]
            lines.append(" ".join([f"{words:<{width}}", *(f"{cell:>24}" for cell in cells)]))
    paper = [f"{PAPER[method]:+.2f}" for method in methods]
    lines.append(" ".join([f"{'the paper: inner product':<{width}}", *(f"{text:>24}" for text in paper)]))
    return "\n".join([*lines, *joined.notes])


def publish(joined: Joined, out: str | Path) -> list[Path]:
    """Write `correlation.json` and the figures atomically; returns their paths."""
    folder = Path(out)
    write_atomic(folder / "correlation.json", json.dumps(joined.describe(), indent=1, allow_nan=False) + "\n")
    written = [folder / "correlation.json"]
    for drawing in draw(joined):
        write_atomic(folder / f"{drawing.name}.svg", drawing.svg(inline=False))
        write_atomic(folder / f"{drawing.name}.png", drawing.png())
        written += [folder / f"{drawing.name}.svg", folder / f"{drawing.name}.png"]
    return written


def _cell(fit: Fit | None) -> str:
    return "–" if fit is None else f"{fit.correlation:+.2f} [{fit.interval.low:+.2f}, {fit.interval.high:+.2f}]"


def _errors(results: Results) -> dict[tuple[str, str], float]:
    """Return the error in percent, averaged over repetitions, by method and set."""
    return {
        (method, table.set_name(column)): cell.error
        for table in results.tables
        for method, row in table.rows.items()
        for column, cell in row.items()
        if column != MEAN
    }


def _check_network(study: Mapping[str, Any], results: Results) -> None:
    expected = study["configuration"].get("network")
    for run in results.runs:
        networks = run.configuration.get("networks")
        joint = networks.get("joint") if isinstance(networks, Mapping) else None
        fingerprint = joint.get("fingerprint") if isinstance(joint, Mapping) else None
        if isinstance(fingerprint, str) and fingerprint != expected:
            raise ResultsError(run.path, f"has network {fingerprint}, the study has network {format_value(expected)}")


def _value(entry: Mapping[str, Any], key: str) -> float:
    part, _, name = key.partition(".")
    held = entry.get(part)
    found = held.get(name) if isinstance(held, Mapping) else held if not name else None
    return float(found) if isinstance(found, int | float) else float("nan")


def _fit(key: str, method: str, values: np.ndarray, improvement: np.ndarray, seed: int) -> Fit | None:
    usable = np.isfinite(values)
    x, y = values[usable], improvement[usable]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    line = fit_line(x, y, 0.99)
    interval = bootstrap_correlation(x, y, seed)
    return Fit(key, method, len(x), line.correlation, interval, line.slope, line.offset)
