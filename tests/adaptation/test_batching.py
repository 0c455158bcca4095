"""The choice of how many episodes or streams are computed at once."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch

from testtime.adaptation import batching
from testtime.adaptation.batching import choose_fastest, find_most, find_most_for_kernels, run_fitting
from testtime.adaptation.settings import Settings
from testtime.augment import CropFlip
from testtime.networks import resnet18, resnet26
from testtime.tasks import Rotation


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_CHOICES", {})


def test_the_highest_rate_is_taken() -> None:
    assert choose_fastest("key", (1, 4, 16), {1: 1.0, 4: 2.0, 16: 12.0}.__getitem__) == 4  # 1, 2 and 1.33 a second


def test_a_larger_count_must_earn_its_memory() -> None:
    assert choose_fastest("key", (1, 4), {1: 1.0, 4: 3.8}.__getitem__) == 1  # faster by a twentieth only


def test_what_was_found_once_is_not_tried_again() -> None:
    tried: list[int] = []

    def trial(count: int) -> float:
        tried.append(count)
        return 1.0

    assert [choose_fastest("key", (1, 8), trial) for _ in range(2)] == [8, 8]
    assert tried == [1, 8]
    assert choose_fastest("other", (1, 8), trial) == 8
    assert tried == [1, 8, 1, 8]


@pytest.mark.parametrize(("fits", "expected"), [(16, 16), (64, 64), (0, 16)])
def test_counts_that_do_not_fit_into_memory_are_passed_over(fits: int, expected: int) -> None:
    def trial(count: int) -> float:
        if count > fits:
            raise torch.OutOfMemoryError
        return 1.0

    assert choose_fastest("key", (16, 64, 256), trial) == expected


@pytest.mark.parametrize(("fits", "tried"), [(16, [16]), (5, [16, 8, 4]), (1, [16, 8, 4, 2, 1])])
def test_what_does_not_fit_is_halved(fits: int, tried: list[int], caplog: pytest.LogCaptureFixture) -> None:
    counts: list[int] = []

    def work(count: int) -> str:
        counts.append(count)
        if count > fits:
            raise torch.OutOfMemoryError
        return "done"

    assert run_fitting(16, work) == "done"
    assert counts == tried
    assert [record.args for record in caplog.records] == list(itertools.pairwise(tried))


def test_one_that_does_not_fit_is_an_error() -> None:
    def work(count: int) -> None:
        raise torch.OutOfMemoryError(f"not even {count}")

    with pytest.raises(torch.OutOfMemoryError, match="not even 1"):
        run_fitting(3, work)


def describe(copies: int, turns: Literal["random", "all"] = "random") -> Settings:
    return Settings(steps=1, copies=copies, task=Rotation(turns), augment=CropFlip())


@pytest.mark.parametrize(("copies", "size", "most"), [(32, 32, 4), (8, 16, 64), (32, 33, 3), (64, 224, 1), (1, 512, 1)])
def test_a_cpu_takes_no_more_pixels_at_once_than_are_fast(copies: int, size: int, most: int) -> None:
    net = resnet26(depth=8).eval()
    assert find_most(net, describe(copies), (3, size, size)) == most
    assert find_most(net, describe(copies, "all"), (3, size, size)) == max(1, most // 4)


def test_the_limit_of_kernels_is_the_largest_tensor_on_the_way() -> None:
    net = resnet18(8).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    # After the first convolution 64 channels of 112×112: below 2**30 with 20 times 64 views, above it with 21.
    assert find_most_for_kernels(net, torch.zeros(1, 3, 224, 224).expand(64, -1, -1, -1)) == 20
    assert find_most_for_kernels(resnet26(depth=8).eval(), torch.zeros(32, 3, 32, 32)) == 2047
    assert find_most_for_kernels(net, torch.zeros(1, 3, 32, 32).expand(2**20, -1, -1, -1)) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not any(layer._forward_hooks for layer in net.modules())
