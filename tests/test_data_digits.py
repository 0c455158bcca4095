"""The built-in digits: the right ones, split fairly, enlarged without surprises."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
import torch

from testtime.data import digits


@pytest.fixture(scope="module")
def held() -> dict[str, np.ndarray]:
    with files("testtime.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_file_holds_the_published_counts(held: dict[str, np.ndarray]) -> None:
    assert held["images"].shape == (1797, 8, 8)
    assert held["images"].dtype == np.uint8
    assert (held["images"].min(), held["images"].max()) == (0, 16)
    # The class counts of the test part, as documented by the UCI repository.
    assert np.bincount(held["labels"]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_attribution_ships_beside_the_file() -> None:
    notice = files("testtime.data").joinpath("digits.txt").read_text()
    assert "Alpaydin" in notice
    assert "Kaynak" in notice
    assert "CC BY 4.0" in notice


def test_split_is_a_stratified_partition(held: dict[str, np.ndarray]) -> None:
    train, test = digits.load("train", size=8), digits.load("test", size=8)
    assert (len(train), len(test)) == (1297, 500)
    assert test.labels is not None
    assert test.labels.bincount().tolist() == [50] * 10
    whole = torch.cat([train.images(slice(None)), test.images(slice(None))]).flatten(1)
    counts = torch.from_numpy(held["images"]).double().mul(255 / 16).round().to(torch.uint8).flatten(1)
    assert sorted(whole.tolist()) == sorted(counts.tolist())


def test_split_never_moves() -> None:
    """Checkpoints and results refer to this split, so a change of it must be seen."""
    labels = digits.load("test").labels
    assert labels is not None
    weights = torch.arange(1, 501)
    assert int((labels * weights).sum()) == SPLIT_FINGERPRINT


SPLIT_FINGERPRINT = 562994


def test_enlarging_is_bilinear() -> None:
    small = digits.load("test", size=8).images([7])[0, 0].tolist()
    large = digits.load("test", size=16).images([7])[0, 0].tolist()
    for row in range(16):
        for column in range(16):
            total = 0.0
            for source_row, row_weight in _neighbours(row):
                for source_column, column_weight in _neighbours(column):
                    total += row_weight * column_weight * small[source_row][source_column]
            assert abs(large[row][column] - total) <= 1.0


def _neighbours(position: int) -> list[tuple[int, float]]:
    centre = position // 2
    other = centre + (1 if position % 2 else -1)
    return [(centre, 0.75), (min(max(other, 0), 7), 0.25)]


@pytest.mark.parametrize(("arguments", "word"), [({"split": "dev"}, "split"), ({"size": 7}, "size")])
def test_bad_arguments_are_named(arguments: dict, word: str) -> None:
    with pytest.raises(ValueError, match=f"`{word}`"):
        digits.load(**arguments)
