"""Fits the calibration of `Auto` to runs with labels: when to learn, and how accuracy falls with confidence.

Fit it on held-out images and the extra corruptions, never on test sets:

    testtime eval -c net.safetensors --data digits-held-out-c --levels 1-5 --methods fixed,episodic,online --out RUN
    traces = read_traces(open_run("RUN"), net)
    tt.Auto(net, calibration=fit_calibration(traces))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from testtime.adaptation.auto import Calibration, Sureness, follow_drift
from testtime.evaluation.units import Run
from testtime.networks.task_loss import measure_drift, read_task_loss
from testtime.networks.ynet import YNet

_MODES = ("fixed", "episodic", "online")
_MOMENTA = (0.9, 0.95, 0.98, 0.99, 0.995)


class Trace(NamedTuple):
    """One stream, predicted in the three modes.

    Attributes:
        name: The set.
        drift: Drift of each image by the unadapted network, `(N,)`, in the order of the stream.
        right: Which predictions are right, bool `(3, N)`: fixed, episodic, online.
        sure: How sure the predictions are, `(3, N)`, see `Sureness`.
        usual: The accuracy where nothing has shifted.
    """

    name: str
    drift: np.ndarray
    right: np.ndarray
    sure: np.ndarray
    usual: float = 1.0


def read_traces(run: Run, net: YNet, methods: Sequence[str] = _MODES) -> list[Trace]:
    """Read the streams of a run that has the three modes.

    Args:
        run: The run; its sets have labels.
        net: Its network, whose statistics or card say how hard the task was in training.
        methods: The run's names of the fixed, the episodic and the online method.

    Raises:
        ValueError: A method is missing, the loss in training is not known, or records have no probabilities.
        RunError: A unit is not finished or damaged.
    """
    known, sureness = read_task_loss(net), Sureness.of(net)
    if known is None:
        raise ValueError("The network does not say how hard its task was in training: tt.collect(net, images) adds it.")
    units = {(unit.method, unit.set_name, unit.seed): unit for unit in run.units}
    traces = []
    for name, seed in dict.fromkeys((unit.set_name, unit.seed) for unit in run.units):
        missing = [method for method in methods if (method, name, seed) not in units]
        if missing:
            raise ValueError(f"The run has no {missing[0]} on {name} with seed {seed}.")
        online, *others = (units[method, name, seed].columns() for method in reversed(methods))
        order = {int(sample): place for place, sample in enumerate(online["sample"])}
        parts = []
        for columns in (*reversed(others), online):
            if "probability" not in columns:
                raise ValueError(f"The records of {name} have no probabilities: they are of an earlier version.")
            places = np.argsort([order[int(sample)] for sample in columns["sample"]])
            parts.append({key: columns[key][places] for key in ("loss_before", "is_right", "probability")})
        drift = measure_drift(parts[0]["loss_before"].astype(np.float64), known.loss)
        right, probability = (np.stack([part[key] for part in parts]) for key in ("is_right", "probability"))
        sure = sureness.measure(probability.astype(np.float64))
        traces.append(Trace(name, drift, right.astype(bool), sure, sureness.usual))
    return traces


def fit_calibration(
    traces: Sequence[Trace], momenta: Sequence[float] = _MOMENTA, weights: Sequence[float] | None = None
) -> Calibration:
    """Choose thresholds and momentum by the mean accuracy over streams, and fit the line of the accuracy.

    Of all choices whose accuracy is within a standard error of the highest, image by image, it is the one that learns
    from the fewest images.

    Args:
        traces: The streams.
        momenta: The values of `Calibration.momentum` to choose from.
        weights: How much each stream counts in the choice; None: all alike.

    Raises:
        ValueError: There are fewer than three streams, no `momenta`, or not as many weights.
    """
    if len(traces) < 3:
        raise ValueError(f"`traces` must be at least 3 streams, got {len(traces)}.")
    if not momenta:
        raise ValueError("`momenta` must not be empty.")
    if weights is not None and len(weights) != len(traces):
        raise ValueError(f"`weights` must be one for each of the {len(traces)} streams, got {len(weights)}.")
    best = _choose_thresholds(traces, momenta, np.ones(len(traces)) if weights is None else np.asarray(weights))
    # Both fall from what is usual; the line of the falls goes through 0.
    sure = np.array([trace.usual - row.mean() for trace in traces for row in trace.sure])
    wrong = np.array([trace.usual - row.mean() for trace in traces for row in trace.right])
    slope = float(sure @ wrong / (sure @ sure)) if sure.any() else 1.0
    spread = float(np.linalg.norm(wrong - slope * sure) / np.sqrt(len(wrong) - 1))
    return replace(best, slope=slope, spread=spread)


def _choose_thresholds(traces: Sequence[Trace], momenta: Sequence[float], weights: np.ndarray) -> Calibration:
    """Return the choice that learns least among those whose accuracy cannot be told from the highest."""
    drifts = torch.from_numpy(np.concatenate([trace.drift for trace in traces]))
    right = np.concatenate([trace.right for trace in traces], axis=1)
    shares = weights / weights.sum() / [len(trace.drift) for trace in traces]  # of an image of each stream
    shares = np.repeat(shares, [len(trace.drift) for trace in traces])
    quantiles = [float(value) for value in np.quantile(drifts[drifts.isfinite()], np.linspace(0.05, 0.95, 19))]
    # The middle between the mean drifts of two streams, which tells them apart.
    means = sorted(float(trace.drift[np.isfinite(trace.drift)].mean()) for trace in traces)
    middles = [(low + high) / 2 for low, high in itertools.pairwise(means)]
    thresholds = list(itertools.product((None, *middles, 0.0), (None, *quantiles)))

    def outcomes() -> Iterator[tuple[Calibration, np.ndarray, float]]:
        """Yield calibrations, which images they get right, and from which share they learn."""
        for momentum in momenta:
            follow = (follow_drift(torch.from_numpy(trace.drift), 1.0, momentum) for trace in traces)
            averages = torch.cat(list(follow))
            for online, episodic in thresholds:
                one = Calibration(online, episodic, momentum)
                modes = one.decide(drifts, averages).numpy()
                yield one, right[modes, np.arange(len(modes))], float((modes > 0) @ shares)

    _, highest, _ = max(outcomes(), key=lambda outcome: outcome[1] @ shares)
    within = []
    for calibration, found, learned in outcomes():
        difference = found * 1.0 - highest
        if difference @ shares >= -math.sqrt(shares**2 @ difference**2):
            within.append((learned, calibration))
    return min(within, key=lambda pair: pair[0])[1]


def measure_accuracy(calibration: Calibration, trace: Trace) -> float:
    """Return the accuracy of choosing among the modes of a stream by a calibration.

    This is that of `Auto`, but that the online mode has learned from the whole stream.
    """
    modes, _ = calibration.choose(torch.from_numpy(trace.drift), 1.0)
    return float(trace.right[modes.numpy(), np.arange(len(trace.drift))].mean())
