"""The built-in digits: the right ones, split fairly, enlarged without surprises."""

from __future__ import annotations

import contextlib
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from testtime.data import digits, pack
from testtime.data import open as open_set
from testtime.data.resized import Resized


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


NAMES = (
    *("digits", "digits-c/fog/3", "digits-c/frost/5", "digits-c/zoom_blur/2", "digits-gradual/shot_noise"),
    "digits-held-out-c/spatter/2",
)


def read(name: str) -> list[torch.Tensor]:
    test_set = open_set(name)
    assert test_set.labels is not None
    chunks = [chunk.images for chunk in test_set.chunks(64, order=range(100))]
    return [*chunks, test_set.images(slice(0, 500, 97)), test_set.labels, test_set.numbers()]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta", "inference", "autocast"])
def test_torchs_defaults_do_not_matter(default: torch.dtype | str, tmp_path: Path) -> None:
    expected = {name: read(name) for name in NAMES}
    modes = {"inference": torch.inference_mode(), "autocast": torch.autocast("cpu", dtype=torch.bfloat16)}
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        if default == "meta":
            torch.set_default_device("meta")
        with modes.get(str(default), contextlib.nullcontext()):
            found = {name: read(name) for name in NAMES}
            packed = pack(open_set("digits-c/contrast/1"), tmp_path / "packed").images(slice(None))
            smaller = Resized(open_set("digits", size=32), 20).images([3, 4])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for name in NAMES:
        assert all(torch.equal(a, b) for a, b in zip(expected[name], found[name], strict=True)), name
    assert torch.equal(packed, open_set("digits-c/contrast/1").images(slice(None)))
    assert torch.equal(smaller, Resized(open_set("digits", size=32), 20).images([3, 4]))


@pytest.mark.parametrize(("arguments", "word"), [({"split": "dev"}, "split"), ({"size": 7}, "size")])
def test_bad_arguments_are_named(arguments: dict, word: str) -> None:
    with pytest.raises(ValueError, match=f"`{word}`"):
        digits.load(**arguments)
