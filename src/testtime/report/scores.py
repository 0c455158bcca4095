"""The scores of one method under one protocol, from the units of its repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from testtime.evaluation import Run, Unit
from testtime.evaluation.columns import WINDOW
from testtime.evaluation.descriptions import read_shift
from testtime.evaluation.protocols import Layout
from testtime.evaluation.units import Verdicts
from testtime.report.results import BASELINE
from testtime.report.sources import ResultsError
from testtime.report.statistics import Interval, bootstrap_means, calibration_error, interval_of, spread


class Repetition(NamedTuple):
    """What distinguishes repetitions of a protocol: order of the sets, seed, and number of the network."""

    order: int
    seed: int
    network: int


@dataclass(frozen=True)
class Score:
    """One method under one protocol; errors and shares are in percent.

    Attributes:
        error: Error on the corrupted sets; on all sets, if none is.
        interval: Its 95% interval over images.
        spread: Standard deviation over repetitions; None for a single one.
        errors: The error of each repetition.
        answers: Number of predictions of a repetition that `error` is computed from.
        clean: Error on the uncorrupted images after the first corrupted ones; None if there are none.
        clean_answers: Number of these predictions, in all repetitions.
        ece_before: Expected calibration error before the update; None if a unit has no probabilities.
        ece_after: The same after it.
        to_right: Share of the answers that are right, but wrong with `fixed`; None without `fixed` on the same images.
        to_wrong: Share of the answers that are wrong, but right with `fixed`.
        collapses: Number of collapses, see `find_collapses`; None if every stream is too short.
        collapsed: Number of streams with a collapse.
        streams: Number of streams in all repetitions.
        milliseconds: Time per image.
        together: Maximum number of streams that ran in parallel and share their time.
        peak_bytes: Peak memory of the device; None if not recorded.
        state_bytes: Size of the state of a stream; None if not recorded.
        devices: Where it was measured.
        rank: Mean rank among the methods; None if repetitions are missing.
    """

    error: float
    interval: Interval
    spread: float | None
    errors: Mapping[Repetition, float]
    answers: int
    clean: float | None
    clean_answers: int
    ece_before: float | None
    ece_after: float | None
    to_right: float | None
    to_wrong: float | None
    collapses: int | None
    collapsed: int
    streams: int
    milliseconds: float
    together: int
    peak_bytes: int | None
    state_bytes: int | None
    devices: tuple[str, ...]
    rank: float | None = None

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.interval.high - self.interval.low) / 2


class StreamUnit(NamedTuple):
    """A unit of a protocol with what its scores are computed from.

    Attributes:
        run: The run.
        unit: The unit.
        repetition: The repetition it belongs to.
        verdicts: Which of its predictions are right.
        layout: The sets and segments of its stream; None for a single set.
        details: Counts along the stream, see `read_details`.
    """

    run: Run
    unit: Unit
    repetition: Repetition
    verdicts: Verdicts
    layout: Layout | None
    details: Mapping[str, Any]

    @property
    def set_names(self) -> list[str]:
        """The sets of the stream."""
        return [self.unit.set_name] if self.layout is None else list(self.layout.sets)


def find_shifted(units: Sequence[StreamUnit]) -> dict[str, bool]:
    """Return which sets of some streams the error is computed from: corrupted ones; if none is, all."""
    names = dict.fromkeys(name for one in units for name in one.set_names)
    shifted = {name: read_shift(name)[0] is not None or "-walk/" in name for name in names}
    return shifted if any(shifted.values()) else dict.fromkeys(names, True)


def score_method(
    sources: Sequence[StreamUnit],
    is_shifted: Mapping[str, bool],
    fixed: Mapping[tuple[str, Repetition], Verdicts],
    seed: int,
) -> Score:
    """Return the score of one method.

    Args:
        sources: Its units.
        is_shifted: Which sets the error is computed from, see `find_shifted`.
        fixed: The verdicts of `fixed` by stream and repetition.
        seed: Seed of the bootstrap.
    """
    images: list[np.ndarray] = []
    wrong: list[np.ndarray] = []
    by_repetition: dict[Repetition, list[np.ndarray]] = {}
    gained = lost = compared = 0
    bases: dict[str, int] = {}
    for one in sources:
        image, mask = _identify(one, is_shifted, bases)
        verdicts, base = one.verdicts, fixed.get((one.unit.set_name, one.repetition))
        errors = 1.0 - verdicts.right[mask]
        images.append(image[mask])
        wrong.append(errors)
        by_repetition.setdefault(one.repetition, []).append(errors)
        if base is not None and np.array_equal(base.samples, verdicts.samples):
            gained += int((verdicts.right > base.right)[mask].sum())
            lost += int((verdicts.right < base.right)[mask].sum())
            compared += int(mask.sum())
    error, interval = _find_interval(np.concatenate(images), np.concatenate(wrong), seed)
    errors = {key: 100 * float(np.concatenate(parts).mean()) for key, parts in by_repetition.items()}
    clean_wrong, clean_answers = map(sum, zip(*(_count_clean(one, is_shifted) for one in sources), strict=True))
    is_fixed = sources[0].unit.method == BASELINE
    return Score(
        error=error,
        interval=interval,
        spread=spread(list(errors.values())),
        errors=errors,
        answers=sum(map(len, wrong)) // len(errors),
        clean=100 * clean_wrong / clean_answers if clean_answers else None,
        clean_answers=clean_answers,
        to_right=100 * gained / compared if compared and not is_fixed else None,
        to_wrong=100 * lost / compared if compared and not is_fixed else None,
        **_read_along(sources),
        **_read_cost([one.unit for one in sources]),
    )


def _identify(
    source: StreamUnit, is_shifted: Mapping[str, bool], bases: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for the image of each sample, the same under all corruptions, and whether it is corrupted."""
    names, samples = source.set_names, source.verdicts.samples.astype(np.int64)
    number, index = np.zeros(len(samples), int), samples
    if source.layout is not None and len(samples):
        if sum(source.layout.sets.values()) == 0:
            raise ResultsError(source.run.path, f"describes no images of {source.unit.set_name}")
        number, index, _ = source.layout.locate(samples)
    base = np.array([bases.setdefault(_find_base(name), len(bases)) for name in names])
    return (base[number] << 32) + index, np.array([is_shifted[name] for name in names])[number]


def _find_base(set_name: str) -> str:
    """Return the name of the set without corruption."""
    family, _, rest = set_name.partition("/")
    if family == "folder":
        return f"folder/{rest.split('/')[0].removesuffix('-walk')}"
    return family.removesuffix("-c").removesuffix("-walk").removesuffix("-gradual")


def _find_interval(images: np.ndarray, wrong: np.ndarray, seed: int) -> tuple[float, Interval]:
    """Return an error and its interval in percent; one image in several answers is one observation.

    Args:
        images: Number of the image of each answer, `(N,)`.
        wrong: Whether the answer is wrong, `(N,)`.
        seed: Seed of the bootstrap.
    """
    _, place = np.unique(images, return_inverse=True)
    sums = np.stack([np.bincount(place, wrong), np.bincount(place)], 1)  # (images, 2)
    drawn = bootstrap_means(sums, seed)
    return 100 * float(wrong.mean()), interval_of(100 * drawn[:, 0] / drawn[:, 1])


def _count_clean(source: StreamUnit, is_shifted: Mapping[str, bool]) -> tuple[int, int]:
    """Return the number of wrong and of all answers on uncorrupted images, after the first corrupted ones."""
    layout, unit = source.layout, source.unit
    if layout is None:
        counts = unit.about["counts"]
        return (0, 0) if is_shifted[unit.set_name] else (counts["labelled"] - counts["is_right"], counts["labelled"])
    if not layout.segments:
        mask = ~_identify(source, is_shifted, {})[1]
        return int((source.verdicts.right[mask] == 0).sum()), int(mask.sum())
    right = source.details.get("segments", [])
    if len(right) != len(layout.segments):
        return 0, 0
    shifted = [is_shifted[name] for name, _ in layout.segments]
    first = shifted.index(True) if True in shifted else len(shifted)
    after = [k for k in range(first, len(shifted)) if not shifted[k]]
    answers = sum(layout.segments[k][1] for k in after)
    return answers - sum(right[k] for k in after), answers


def _read_along(sources: Sequence[StreamUnit]) -> dict[str, Any]:
    """Return calibration errors and collapses as fields of `Score`."""
    details = [one.details for one in sources]
    found: dict[str, Any] = {"ece_before": None, "ece_after": None, "collapses": None}
    if all("calibration" in one for one in details):
        for when in ("before", "after"):
            tables: dict[Repetition, list[Mapping[str, Sequence[float]]]] = {}
            for source, one in zip(sources, details, strict=True):
                tables.setdefault(source.repetition, []).append(one["calibration"][when])
            found[f"ece_{when}"] = 100 * float(np.mean([_calibrate(part) for part in tables.values()]))
    long = [one for one in sources if one.unit.about["counts"]["images"] >= WINDOW]
    if long and all("collapses" in one for one in details):
        found["collapses"] = sum(len(one["collapses"]) for one in details)
    return found | {"collapsed": sum(bool(one.get("collapses")) for one in details), "streams": len(sources)}


def _calibrate(tables: Sequence[Mapping[str, Sequence[float]]]) -> float:
    """Return the calibration error of the images of several streams."""
    sums = [np.sum([one[key] for one in tables], 0).tolist() for key in ("images", "probability", "right")]
    return calibration_error(*sums)


def _read_cost(units: Sequence[Unit]) -> dict[str, Any]:
    """Return what units cost as fields of `Score`."""
    times = [1000 * unit.seconds / unit.about["counts"]["images"] for unit in units]
    largest = {
        name: max(unit.about[name] for unit in units) if all(name in unit.about for unit in units) else None
        for name in ("peak_bytes", "state_bytes")
    }
    together = max(unit.about.get("together", 1) for unit in units)
    devices = tuple(dict.fromkeys(str(unit.about["device"]) for unit in units if "device" in unit.about))
    return {"milliseconds": float(np.mean(times)), "together": together, "devices": devices, **largest}
