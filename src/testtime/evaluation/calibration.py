"""Fits the calibration of `Auto` to runs with labels: when to learn, and how confidence becomes accuracy.

Fit it on held-out images and the extra corruptions, never on test sets:

    testtime eval -c net.safetensors --data digits-held-out-c --levels 1-5 --methods fixed,episodic,online --out RUN
    traces = read_traces(open_run("RUN"), read_task_loss(net).loss)
    tt.Auto(net, calibration=fit_calibration(traces))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from testtime.adaptation.auto import Calibration
from testtime.evaluation.units import Run
from testtime.networks.task_loss import measure_drift

_MODES = ("fixed", "episodic", "online")


class Trace(NamedTuple):
    """One stream, predicted in the three modes.

    Attributes:
        name: The set.
        drift: Drift of each image by the unadapted network, `(N,)`, in the order of the stream.
        right: Which predictions are right, bool `(3, N)`: fixed, episodic, online.
        probability: Probability of the predicted classes, `(3, N)`.
    """

    name: str
    drift: np.ndarray
    right: np.ndarray
    probability: np.ndarray


def read_traces(run: Run, reference: float, methods: Sequence[str] = _MODES) -> list[Trace]:
    """Read the streams of a run that has the three modes.

    Args:
        run: The run; its sets have labels.
        reference: The task's loss on training data, as for `Auto`.
        methods: The run's names of the fixed, the episodic and the online method.

    Raises:
        ValueError: A method is missing, or records have no probabilities.
        RunError: A unit is not finished or damaged.
    """
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
        drift = measure_drift(parts[0]["loss_before"].astype(np.float64), reference)
        right, probability = (np.stack([part[key] for part in parts]) for key in ("is_right", "probability"))
        traces.append(Trace(name, drift, right.astype(bool), probability.astype(np.float64)))
    return traces


def fit_calibration(traces: Sequence[Trace], momentum: float = Calibration.momentum) -> Calibration:
    """Choose the thresholds with the highest mean accuracy over streams, and fit the line of the accuracy.

    Args:
        traces: The streams.
        momentum: As in `Calibration`.

    Raises:
        ValueError: There are fewer than three streams.
    """
    if len(traces) < 3:
        raise ValueError(f"`traces` must be at least 3 streams, got {len(traces)}.")
    drifts = np.concatenate([trace.drift for trace in traces])
    quantiles = [float(value) for value in np.quantile(drifts, np.linspace(0.05, 0.95, 19))]
    # The middle between the mean drifts of two streams, which tells them apart; no threshold first, so that ties go to
    # not learning.
    means = sorted(float(trace.drift.mean()) for trace in traces)
    middles = [(low + high) / 2 for low, high in itertools.pairwise(means)]
    candidates = [
        Calibration(online, episodic, momentum)
        for online in (None, *reversed(middles), 0.0)
        for episodic in (None, *reversed(quantiles))
    ]
    best = max(candidates, key=lambda one: np.mean([measure_accuracy(one, trace) for trace in traces]))
    confidence = np.array([row.mean() for trace in traces for row in trace.probability])
    accuracy = np.array([row.mean() for trace in traces for row in trace.right])
    slope, intercept = np.polyfit(confidence, accuracy, 1)
    spread = float(np.std(accuracy - (intercept + slope * confidence), ddof=2))
    return Calibration(best.online, best.episodic, momentum, float(slope), float(intercept), spread)


def measure_accuracy(calibration: Calibration, trace: Trace) -> float:
    """Return the accuracy of choosing among the modes of a stream by a calibration.

    This is that of `Auto`, but that the online mode has learned from the whole stream.
    """
    modes, _ = calibration.choose(torch.from_numpy(trace.drift), 1.0)
    return float(trace.right[modes.numpy(), np.arange(len(trace.drift))].mean())
