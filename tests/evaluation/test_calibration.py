"""The calibration of Auto: fitted to streams that are made for it, and read from a run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from testtime import Calibration, load, resnet26
from testtime.evaluation import MethodSpec, Plan, SetSpec, run_plan
from testtime.evaluation.calibration import Trace, fit_calibration, measure_accuracy, read_traces


def make_trace(name: str, drift: float, right: tuple[float, float, float], count: int = 200) -> Trace:
    """A stream around a drift, evenly spread, in which the sure predictions fall from 0.9 half as far as the right."""
    places = np.arange(count) * 0.618 % 1
    flags = np.stack([places < one for one in right])
    sure = np.stack([np.full(count, 0.45 + one / 2) for one in right])
    return Trace(name, drift + 0.1 * (places - 0.5), flags, sure, 0.9)


def test_a_calibration_is_fitted() -> None:
    """Online learning harms below a drift of 2 and helps above; episodes never help."""
    traces = [make_trace(f"{n}", n, (0.9 - 0.1 * n, 0.8 - 0.1 * n, 0.7 if n > 2 else 0.5)) for n in (1, 1.5, 3, 4, 5)]
    found = fit_calibration(traces)
    assert found.online is not None
    assert 1.55 < found.online < 2.95
    assert found.episodic is None
    best = [measure_accuracy(found, trace) for trace in traces]
    assert best[:2] == [trace.right[0].mean() for trace in traces[:2]]
    assert min(best[2:]) > 0.5
    assert found.slope == pytest.approx(2, abs=0.03)  # up to whole images
    assert found.spread < 0.01
    assert Calibration(**json.loads(json.dumps(asdict(found)))) == found
    with pytest.raises(ValueError, match="at least 3 streams"):
        fit_calibration(traces[:2])
    with pytest.raises(ValueError, match="one for each of the 5 streams, got 2"):
        fit_calibration(traces, weights=[1, 1])
    assert fit_calibration(traces, weights=[1, 1, 0, 0, 0]).online is None  # those that it harms
    for value in (np.nan, np.inf):
        traces[0].drift[0] = value
        assert fit_calibration(traces).online == pytest.approx(found.online, abs=0.01)


def test_gains_that_may_be_chance_are_not_learned_from() -> None:
    """Without a shift learning flips nearly all answers, and one more is right; with one it is right more often."""
    odd = np.arange(200) % 2
    chance = np.stack([1 - odd, 1 - odd, np.where(np.arange(200) == 0, 1, odd)]).astype(bool)
    traces = [make_trace("original", 1, (0, 0, 0))._replace(right=chance)]
    traces += [make_trace(f"{n}", n, (0.5, 0.5, 0.8)) for n in (3, 4)]
    found = fit_calibration(traces)
    assert found.online is not None
    assert measure_accuracy(found, traces[0]) == 0.5
    assert min(measure_accuracy(found, trace) for trace in traces[1:]) > 0.75


def test_a_longer_average_for_noisy_drifts() -> None:
    """Drifts differ more from image to image than from stream to stream; learning helps from a mean of 2 on."""
    noise = np.random.default_rng(0).exponential(size=(6, 400))
    right = {True: np.repeat([[0.0], [0.0], [1.0]], 400, 1), False: np.repeat([[1.0], [0.0], [0.0]], 400, 1)}
    empty = np.zeros((3, 400))
    traces = [
        Trace(f"{mean}", mean * row, right[mean > 2].astype(bool), empty)
        for mean, row in zip((1, 1.2, 1.4, 2.6, 2.8, 3), noise, strict=True)
    ]
    found = fit_calibration(traces)
    assert found.momentum > 0.9
    assert found.online is not None

    def measure(momentum: float) -> float:
        return float(np.mean([measure_accuracy(replace(found, momentum=momentum), trace) for trace in traces]))

    assert measure(found.momentum) > measure(0.9)
    assert fit_calibration(traces, [0.5]).momentum == 0.5
    with pytest.raises(ValueError, match="must not be empty"):
        fit_calibration(traces, [])


def test_single_unusual_images_get_episodes() -> None:
    drift = np.where(np.arange(200) % 10 == 0, 5.0, 1.0)
    right = np.stack([drift < 2, np.ones(200), np.zeros(200)]).astype(bool)
    trace = Trace("mixed", drift, right, np.full((3, 200), 0.5) + 0.1 * right)
    found = fit_calibration([trace, trace, trace])
    assert found.episodic is not None
    assert 1 < found.episodic <= 5
    assert measure_accuracy(found, trace) == 1


def test_traces_of_a_run(tmp_path: Path) -> None:
    methods = tuple(
        MethodSpec(mode, mode, settings={} if mode == "fixed" else {"copies": 2, "steps": 1})
        for mode in ("fixed", "episodic", "online")
    )
    sets = tuple(SetSpec(name) for name in ("digits", "digits-c/fog/5"))
    plan = Plan({"joint": "digits-resnet8-gn-joint"}, sets, methods, (0,), shuffle=True, limit=12)
    run = run_plan(plan, tmp_path / "run")
    net = load("digits-resnet8-gn-joint")
    assert net.statistics is not None
    known = {"images": 3, "task": {"plain": 0.5}, "accuracy": 0.8, "confidence": 0.9}
    net.statistics = replace(net.statistics, about={"unseen": known})
    traces = read_traces(run, net)
    assert [trace.name for trace in traces] == ["digits", "digits-c/fog/5"]
    for trace in traces:
        columns = {unit.method: unit.columns() for unit in run.units if unit.set_name == trace.name}
        fixed = dict(zip(columns["fixed"]["sample"], columns["fixed"]["loss_before"], strict=True))
        expected = [fixed[sample] / 0.5 for sample in columns["online"]["sample"]]
        np.testing.assert_allclose(trace.drift, expected, rtol=1e-6)
        assert trace.right[2].tolist() == columns["online"]["is_right"].astype(bool).tolist()
        assert trace.sure[2].tolist() == (columns["online"]["probability"] > 0.9).tolist()
        assert trace.usual == 0.8
    with pytest.raises(ValueError, match="no best on digits"):
        read_traces(run, net, ("fixed", "episodic", "best"))
    with pytest.raises(ValueError, match="how hard its task was"):
        read_traces(run, resnet26(depth=8))
