"""Held-out training images: never trained on, the same for every seed, without the corruptions of the test sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import testtime.data
from testtime.corruptions import CORRUPTIONS, EXTRA, corrupt
from testtime.data import TensorSet, check, cifar, cifar100, describe, digits, expand
from testtime.data.held_out import COUNTS, find_source, find_training_data, hold_out_images, was_seen
from testtime.data.sets import TestSet


def rows(found: TestSet) -> list[tuple[bytes, int]]:
    """Every image with its label."""
    assert found.labels is not None
    return [
        (image.numpy().tobytes(), label)
        for image, label in zip(found.images(slice(None)), found.labels.tolist(), strict=True)
    ]


def numbered(count: int) -> TensorSet:
    """Images that show their own index."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, 1, 8, 8)
    return TensorSet("numbered", images, torch.arange(count) % 10)


def shown(found: TestSet) -> list[int]:
    return found.images(slice(None))[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("count", [1, 7, 59])
def test_every_image_is_either_trained_on_or_held_out(count: int) -> None:
    source = numbered(60)
    training, held_out = hold_out_images(source, count)
    assert (len(training), len(held_out)) == (60 - count, count)
    assert sorted(rows(training) + rows(held_out)) == sorted(rows(source))
    assert training.held_out is held_out
    assert held_out.held_out is None
    assert source.held_out is None
    assert "held-out" in held_out.name


def test_fewer_held_out_images_are_among_more() -> None:
    few, more = (set(shown(hold_out_images(numbered(60), count)[1])) for count in (5, 20))
    assert few < more
    assert more != set(range(40, 60))  # a random order, not the last of the files


def test_the_held_out_digits_never_move() -> None:
    """Networks record only how many were held out, so a change of which ones must be seen."""
    labels = testtime.data.open("digits-held-out").labels
    assert labels is not None
    assert int((labels * torch.arange(1, 301)).sum()) == FINGERPRINT


FINGERPRINT = 210940


@pytest.mark.parametrize("count", [-1, 0, 60, 10**9])
def test_bad_counts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="`hold_out` must be 1 to 59"):
        hold_out_images(numbered(60), count)


def test_parts_are_read_in_any_order() -> None:
    training, _ = hold_out_images(numbered(60), 20)
    whole = shown(training)
    assert training.images([39, 0, 5, 5])[:, 0, 0, 0].tolist() == [whole[n] for n in (39, 0, 5, 5)]
    assert training.fingerprint() != hold_out_images(numbered(60), 21)[0].fingerprint()
    with pytest.raises(IndexError, match="0 to 39"):
        training.images([40])


def test_the_digits_by_name() -> None:
    training, held_out = hold_out_images(digits.load("train"), COUNTS["digits"])
    opened = testtime.data.open("digits-held-out")
    assert rows(opened) == rows(held_out)
    assert (opened.name, opened.fingerprint()) == ("digits-held-out", held_out.fingerprint())
    tested = {image for image, _ in rows(digits.load("test"))}
    assert not tested & {image for image, _ in rows(opened)}
    assert len(training) == 997
    assert testtime.data.open("digits-held-out", size=24).shape == (1, 24, 24)


@pytest.mark.parametrize("corruption", EXTRA)
def test_corrupted_images_depend_on_their_index_in_the_set(corruption: str) -> None:
    plain = testtime.data.open("digits-held-out")
    opened = testtime.data.open(f"digits-held-out-c/{corruption}/4", seed=3)
    numbers = torch.tensor([299, 0, 17])
    expected = corrupt(plain.images(numbers), corruption, 4, seed=3, samples=numbers)
    assert opened.images(numbers).equal(expected)
    assert opened.labels is not None
    assert plain.labels is not None
    assert opened.labels.equal(plain.labels)
    assert opened.name == f"digits-held-out-c/{corruption}/4"


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corruptions_of_the_test_sets_are_refused(corruption: str) -> None:
    with pytest.raises(ValueError, match=f"got '{corruption}'.*test sets"):
        testtime.data.open(f"digits-held-out-c/{corruption}/5")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("digits-held-out-c", "such as digits-held-out-c/speckle_noise/5"),
        ("digits-held-out-c/spatter/6", "`level`"),
        ("digits-held-out-c/mist/1", "got 'mist'"),
        ("digits-held-out/spatter", "no parts"),
        ("imagenet-held-out", "`name` must be one of"),
    ],
)
def test_bad_names(name: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        testtime.data.open(name)
    with pytest.raises(ValueError, match="no training split"):
        testtime.data.open("digits-held-out", split="train")


def test_names_and_states(tmp_path: Path) -> None:
    for source in COUNTS:
        assert expand(f"{source}-held-out") == (f"{source}-held-out",)
        listed = tuple(f"{source}-held-out-c/{name}/{level}" for name in EXTRA for level in range(1, 6))
        assert expand(f"{source}-held-out-c") == listed
        assert {find_source(name) for name in listed} == {source}
    assert describe("digits-held-out-c", tmp_path).state == "built in"
    assert describe("cifar10-held-out-c", tmp_path).detail == "testtime data get cifar10"
    assert check("digits-held-out-c") == []
    assert [find_source(name) for name in ("cifar10", "cifar10-c/fog/5", "folder/cifar10-held-out", "x-held-out")] == [
        None
    ] * 4


@pytest.mark.parametrize(("files", "label_bytes"), [(cifar.FILES, 1), (cifar100.FILES, 2)])
def test_cifar_by_name(tmp_path: Path, files, label_bytes: int) -> None:
    """In full size, since only that opens by name; each image is black but for its number."""
    folder = tmp_path / files.binary
    folder.mkdir()
    number = 0
    for split in ("train", "test"):
        for name in files.files[split]:
            count = files.per_file[split]
            records = np.zeros((count, label_bytes + 3072), dtype=np.uint8)
            numbers = np.arange(number, number + count)
            records[:, label_bytes - 1] = numbers % 10
            records[:, label_bytes], records[:, label_bytes + 1] = numbers % 256, numbers // 256
            records.tofile(folder / f"{name}.bin")
            number += count
    opened = testtime.data.open(f"{files.name}-held-out", tmp_path)
    corner = opened.images(slice(None))[:, 0, 0, :2].to(torch.int64)
    numbers = corner[:, 0] + 256 * corner[:, 1]
    assert opened.labels is not None
    assert len(opened) == len(set(numbers.tolist())) == 5_000
    assert int(numbers.max()) < 50_000
    assert opened.labels.equal(numbers % 10)
    training, _ = hold_out_images(files.load(tmp_path, "train"), 5_000)
    corner = training.images(slice(None))[:, 0, 0, :2].to(torch.int64)
    assert not set((corner[:, 0] + 256 * corner[:, 1]).tolist()) & set(numbers.tolist())
    assert testtime.data.open(f"{files.name}-held-out-c/saturate/5", tmp_path).images([4_999]).shape == (1, 3, 32, 32)
    assert describe(f"{files.name}-held-out-c", tmp_path).state == "generated"


def record(data: object, target: object = None) -> dict:
    return {"configuration": {"data": data, "target": target}}


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        ({}, False),
        (record({"name": "cifar10"}), True),
        (record({"name": "cifar10[1000]"}), True),
        (record({"name": "cifar10[:-4999]", "held_out": 4_999}), True),
        (record({"name": "cifar10[:-5000]", "held_out": 5_000}), False),
        (record({"name": "cifar10[:-5000][100]", "held_out": 6_000}), False),
        (record({"name": "cifar10", "held_out": "6000"}), True),
        (record({"name": "cifar10", "held_out": True}), True),
        (record({"name": "cifar100"}), False),
        (record({"name": "folder/cifar10"}), False),
        (record({"count": 50_000}), False),
        (record({"name": "folder/x"}, {"name": "cifar10-held-out-c/spatter/5"}), True),
        (record({"name": "folder/x"}, {"name": "cifar10"}), False),  # the test set
        (record("cifar10"), False),
        ({"configuration": ["data"]}, False),
        (record({"name": 5}), False),
    ],
)
def test_what_a_network_has_seen(found: dict, seen: bool) -> None:
    assert was_seen(found, "cifar10", 5_000) is seen


def test_the_training_data_in_a_record() -> None:
    assert find_training_data(record({"name": "digits[:-300][50]"})) == "digits"
    assert find_training_data(record({"name": None})) is None
    assert find_training_data({}) is None
