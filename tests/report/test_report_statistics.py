"""Intervals, tests and lines against plain loops and numbers worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testtime.randomness import Draws
from testtime.report import statistics
from testtime.report.statistics import (
    bootstrap_means,
    calibration_error,
    fit_line,
    holm,
    interval_of,
    rank,
    sign_test,
    spread,
    student_quantile,
)


def test_bootstrap_is_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_DRAWS_AT_ONCE", 100)  # several pieces
    values = np.random.default_rng(0).random((17, 3))
    means = []
    for number in range(40):
        drawn = Draws.of(5, torch.tensor([number])).purpose("bootstrap").integers(17, 17)[0]
        means.append([sum(values[place, column] for place in drawn.tolist()) / 17 for column in range(3)])
    np.testing.assert_allclose(bootstrap_means(values, seed=5, rounds=40), means, rtol=1e-12)


def test_columns_are_drawn_together() -> None:
    values = np.random.default_rng(1).random((50, 1))
    means = bootstrap_means(np.hstack([values, 1 - values]))
    np.testing.assert_allclose(means.sum(1), 1)


def test_the_interval_is_that_of_a_binomial_share() -> None:
    right = np.zeros((400, 1))
    right[:100] = 1
    low, high = interval_of(bootstrap_means(right, rounds=4000)[:, 0])
    half = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert low == pytest.approx(0.25 - half, abs=0.005)
    assert high == pytest.approx(0.25 + half, abs=0.005)


def test_the_interval_by_sorting() -> None:
    means = np.random.default_rng(2).permutation(np.arange(1001.0))
    assert interval_of(means) == pytest.approx((25, 975))
    assert interval_of(means, 0.9) == pytest.approx((50, 950))


def test_mcnemar_by_hand() -> None:
    # 12 flips, 3 of them the rarer way: 2 · (1 + 12 + 66 + 220) / 2¹²
    assert sign_test(9, 3) == pytest.approx(598 / 4096)
    assert sign_test(3, 9) == sign_test(9, 3)
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(4, 4) == 1
    assert sign_test(0, 0) == 1


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_test_is_the_exact_sum(more: int, fewer: int) -> None:
    count, rarer = more + fewer, min(more, fewer)
    exact = Fraction(2 * sum(math.comb(count, k) for k in range(rarer + 1)), 2**count)
    assert sign_test(more, fewer) == pytest.approx(float(min(exact, Fraction(1))), rel=1e-9)


def test_many_flips_do_not_overflow() -> None:
    assert 0 <= sign_test(5000, 1000) < 1e-300
    assert sign_test(20_100, 19_900) == pytest.approx(0.3197, abs=1e-3)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []


def test_spread_by_hand() -> None:
    assert spread([2.0, 4.0, 9.0]) == pytest.approx(math.sqrt(13))
    assert spread([3.0]) is None


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.995, 4, 4.604),
        (0.975, 10, 2.228),
        (0.995, 30, 2.750),
        (0.995, 120, 2.617),
    ],
)
def test_student_quantiles_of_the_printed_tables(share: float, freedom: int, value: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(value, abs=6e-4)


def test_a_line_through_points_on_a_line() -> None:
    x = np.array([0.0, 1.0, 2.0, 5.0])
    line = fit_line(x, 3 - 2 * x)
    assert (line.slope, line.offset, line.correlation) == pytest.approx((-2, 3, -1))
    np.testing.assert_allclose(line.low, line.high, atol=1e-6)


def test_the_line_and_its_band_by_hand() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 1.0, 4.0, 3.0])
    line = fit_line(x, y, 0.95, points=2)
    # slope 3/5, offset 1; residuals .4 -1.2 1.2 -.4; s² = 3.2/2; at x = 1: s² (1/4 + 2.25/5)
    assert (line.slope, line.offset, line.correlation) == pytest.approx((0.6, 1, 0.6))
    half = 4.30265 * math.sqrt(1.6 * (0.25 + 0.45))
    assert (line.high[0] - line.low[0]) / 2 == pytest.approx(half, rel=1e-5)
    assert line.at.tolist() == [1, 4]
    assert line.correlation == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_lines_need_points() -> None:
    with pytest.raises(ValueError, match="at least 3 points"):
        fit_line(np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match="not all at the same"):
        fit_line(np.ones(5), np.arange(5.0))
    with pytest.raises(ValueError, match="the same length"):
        fit_line(np.arange(4.0), np.arange(5.0))


def test_calibration_by_hand() -> None:
    # Three images at 0.9 of which two are right, one at 0.2 that is right.
    assert calibration_error([1, 3], [0.2, 2.7], [1, 2]) == pytest.approx(0.25 * 0.8 + 0.75 * (0.9 - 2 / 3))
    assert calibration_error([0, 2], [0, 2.0], [0, 2]) == 0
    with pytest.raises(ValueError, match="no images"):
        calibration_error([0, 0], [0, 0], [0, 0])


def test_equal_values_share_their_ranks() -> None:
    assert rank([3.0, 1.0, 2.0]) == [3, 1, 2]
    assert rank([1.0, 2.0, 1.0, 1.0]) == [2, 4, 2, 2]
    assert rank([]) == []
