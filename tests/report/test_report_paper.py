"""The paper's numbers as shipped: complete, and in agreement with what its text says about them."""

from __future__ import annotations

import pytest

from testtime.corruptions import CORRUPTIONS
from testtime.report.paper import ABBREVIATIONS, PAPER_NAMES, find_table, paper_tables

LEVEL_5 = {
    "plain": (8.9, 34.6),
    "fixed": (8.1, 33.3),
    "episodic": (7.9, 31.0),
    "online": (8.2, 20.4),
    "uda": (9.0, 22.6),
    "alp": (16.5, 30.0),
}


def test_every_table_is_there_and_whole() -> None:
    kinds = [(table.set, table.level, table.norm, len(table.values)) for table in paper_tables()]
    assert kinds == [
        ("cifar10-c", 5, "group", 6),
        *(("cifar10-c", level, "group", 5) for level in (4, 3, 2, 1)),
        ("cifar10-c", 5, "batch", 3),
        ("imagenet-c", 5, "group", 4),
        ("vid-robust", None, "group", 4),
        ("vid-cifar7", None, "group", 4),
        ("cifar10.1", None, "group", 3),
    ]
    for table in paper_tables():
        assert set(table.values) <= set(PAPER_NAMES)
        for row in table.values.values():
            assert len(row) == len(table.columns)
            assert all(0 < value < 100 for value in row)
        if table.level:
            assert table.columns == tuple(ABBREVIATIONS) == ("original", *CORRUPTIONS)


@pytest.mark.parametrize("method", LEVEL_5)
def test_level_5_has_the_known_means(method: str) -> None:
    table = find_table("cifar10-c", 5)
    assert table is not None
    original, mean = LEVEL_5[method]
    assert table.value(method, "original") == original
    assert table.mean(method) == pytest.approx(mean, abs=0.0501)


def test_joint_training_has_the_mean_over_all_levels_that_the_text_gives() -> None:
    tables = [find_table("cifar10-c", level) for level in range(1, 6)]
    means = [table.mean("fixed") for table in tables if table is not None]
    assert len(means) == 5
    assert sum(mean or 0 for mean in means) / 5 == pytest.approx(22.8, abs=0.05)


def test_online_beats_the_oracle_on_13_corruptions_and_the_original() -> None:
    table = find_table("cifar10-c", 5)
    assert table is not None
    wins = [ours < theirs for ours, theirs in zip(table.values["online"], table.values["uda"], strict=True)]
    assert wins[0]
    assert sum(wins[1:]) == 13


def test_single_values_by_eye() -> None:
    batch, imagenet = find_table("cifar10-c", 5, "batch"), find_table("imagenet-c", 5)
    seven, new = find_table("vid-cifar7"), find_table("cifar10.1")
    assert batch is not None
    assert imagenet is not None
    assert seven is not None
    assert new is not None
    assert batch.value("episodic", "contrast") == 35.2
    assert imagenet.value("online", "fog", "accuracy") == 47.6
    assert imagenet.value("online", "fog") == pytest.approx(52.4)
    assert seven.value("online", "dog", "accuracy") == 22.4
    assert seven.value("online", "average", "accuracy") == 45.4
    assert new.value("episodic", "average") == 15.9


def test_what_the_paper_does_not_say_is_none() -> None:
    table = find_table("cifar10-c", 4)
    assert table is not None
    assert table.value("uda", "fog") is None
    assert table.value("fixed", "rain") is None
    assert table.mean("uda") is None
    assert table.mean("fixed", ["fog", "rain"]) is None
    assert find_table("cifar10-c", 3, "batch") is None
    assert find_table("digits-c", 5) is None
