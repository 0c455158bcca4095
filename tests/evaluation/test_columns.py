"""Columns: with and without probabilities, counts for calibration and collapses against plain loops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import report_runs
from testtime.evaluation import RunError, Unit
from testtime.evaluation.columns import (
    WINDOW,
    check_columns,
    count_probabilities,
    find_collapses,
    join_columns,
    make_columns,
)
from testtime.evaluation.records import COLUMNS, PROBABILITIES, Columns, Record, read_records
from testtime.evaluation.units import read_unit, write_unit

OLD = report_runs.make_columns([True, False, True, True])
NEW = OLD | {"probability": np.float32([0.9, 0.5, 1.0, 0.2]), "probability_before": np.float32([0.1, 0.4, 0.3, 0.2])}


def test_records_and_columns_are_converted_with_and_without_probabilities() -> None:
    for columns, names in ((OLD, set(COLUMNS)), (NEW, {*COLUMNS, *PROBABILITIES})):
        again = make_columns(read_records(columns))
        assert set(again) == names
        for name in names:
            np.testing.assert_array_equal(again[name], columns[name])
    mixed = [*read_records(NEW), *(record._replace(sample=9) for record in [*read_records(OLD)][:1])]
    assert set(make_columns(mixed)) == set(COLUMNS)


def test_parts_without_probabilities_join_those_with() -> None:
    assert join_columns([NEW, NEW])["probability"].tolist() == NEW["probability"].tolist() * 2
    joined = join_columns([OLD, NEW])
    assert set(joined) == set(COLUMNS)
    assert joined["prediction"].tolist() == OLD["prediction"].tolist() * 2


@pytest.mark.parametrize("columns", [OLD, NEW])
def test_units_with_and_without_probabilities_are_read(tmp_path: Path, columns: Columns) -> None:
    file = write_unit(tmp_path, Unit.of("fixed", "digits", 0), columns, 1.0).path
    assert file is not None
    found = read_unit(file)[1]
    assert set(found) == set(columns)
    for name, column in columns.items():
        np.testing.assert_array_equal(found[name], column)


def test_a_changed_or_removed_probability_is_noticed(tmp_path: Path) -> None:
    from safetensors import safe_open

    file = write_unit(tmp_path, Unit.of("fixed", "digits", 0), NEW, 1.0).path
    assert file is not None
    with safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata()
    held = load_file(file)
    for changed in (
        held | {"probability": held["probability"] / 2},
        {name: column for name, column in held.items() if name not in PROBABILITIES},
    ):
        save_file(changed, file, metadata)
        with pytest.raises(RunError, match="modified"):
            read_unit(file)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (None, "probability is missing"),
        (np.zeros(4), "not of type float32"),
        (np.zeros(3, np.float32), "different lengths"),
        (np.float32([0, 0, 0, 1.5]), r"probability is not in \[0, 1\]"),
        (np.float32([0, 0, 0, -0.5]), r"probability is not in \[0, 1\]"),
    ],
)
def test_malformed_probabilities_are_refused(column: np.ndarray | None, said: str) -> None:
    columns = {name: NEW[name] for name in NEW if name != "probability"}
    with pytest.raises(ValueError, match=said):
        check_columns(columns if column is None else columns | {"probability": column})
    check_columns(NEW | {"probability": np.full(4, np.nan, np.float32)})  # what a broken network answers


PROBABILITY = st.floats(0, 1, width=32)
RECORDS = st.lists(
    st.tuples(PROBABILITY | st.just(math.nan), st.booleans(), PROBABILITY, st.booleans(), st.booleans()), max_size=40
)


@given(RECORDS)
def test_probabilities_are_counted_as_in_a_loop(rows: list[tuple[float, bool, float, bool, bool]]) -> None:
    blank = Record(0, None, 1, 1, False, False, 0, 0, 0, True, False)
    records = [
        blank._replace(
            sample=k,
            label=0 if known else None,
            is_right=is_right and known,
            was_right=was_right and known,
            probability=after,
            probability_before=before,
        )
        for k, (after, is_right, before, was_right, known) in enumerate(rows)
    ]
    found = count_probabilities(make_columns(records) if records else {name: NEW[name][:0] for name in NEW})
    assert found is not None
    expected = {when: {name: [0.0] * 15 for name in ("images", "probability", "right")} for when in ("before", "after")}
    for after, is_right, before, was_right, known in rows:
        for when, probability, right in (("after", after, is_right), ("before", before, was_right)):
            if not known:
                continue
            value = 0.0 if math.isnan(probability) else probability
            place = min(int(value * 15), 14)
            expected[when]["images"][place] += 1
            expected[when]["probability"][place] += value
            expected[when]["right"][place] += right
    for when, table in expected.items():
        assert found[when]["images"] == table["images"]
        assert found[when]["right"] == table["right"]
        assert found[when]["probability"] == pytest.approx(table["probability"], abs=1e-4)
    assert count_probabilities(OLD) is None


def find_by_hand(predicted: list[int], labels: list[int]) -> list[tuple[int, int]]:
    touching: list[tuple[int, int]] = []
    for start in range(len(predicted) - WINDOW + 1):
        answers, truth = predicted[start : start + WINDOW], labels[start : start + WINDOW]
        if any(answers.count(c) > 0.8 * WINDOW and truth.count(c) < 0.5 * WINDOW for c in set(answers)):
            if touching and start <= touching[-1][1]:
                touching[-1] = touching[-1][0], start + WINDOW
            else:
                touching.append((start, start + WINDOW))
    return touching


def make_stream(predicted: list[int], labels: list[int]) -> Columns:
    columns = report_runs.make_columns(np.array(predicted) == np.array(labels), labels=np.array(labels))
    return columns | {"prediction": np.array(predicted, np.int32)}


def test_collapses_are_those_of_a_loop() -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 4, 1500)
    predicted = labels.copy()
    predicted[300:560] = 3  # collapses
    predicted[900:1020] = 2  # too short
    predicted[1200:] = 1  # collapses until the end
    found = find_collapses(make_stream(predicted.tolist(), labels.tolist()))
    assert found == find_by_hand(predicted.tolist(), labels.tolist())
    assert len(found) == 2
    assert found[0][0] < 300 < 560 < found[0][1]
    assert found[1][1] == 1500


def test_a_stream_of_one_class_is_no_collapse() -> None:
    assert find_collapses(make_stream([5] * 400, [5] * 400)) == []
    assert find_collapses(make_stream([5] * 400, [5] * 150 + [1] * 250)) == [(51, 400)]
    assert find_collapses(make_stream([5] * 400, [-1] * 400)) == [(0, 400)]  # without labels
    assert find_collapses(make_stream([5] * (WINDOW - 1), [1] * (WINDOW - 1))) == []
