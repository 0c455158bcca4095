"""CUDA graphs on a CPU: a function that is called stands in for a graph that is replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from testtime.kernels import graphs
from testtime.kernels.graphs import Concurrent, Series, can_record, on_side_stream, record

CPU = torch.device("cpu")


class Called:
    """Stands in for `Captured`."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        self.function = function
        for _ in range(2):  # as before a recording
            function(*inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(*inputs))


@pytest.mark.parametrize("count", [1, 4, 5, 11])
def test_a_series_is_one_call_after_another(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Captured", Called)
    total = torch.zeros(2, 3)

    def add(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        total.add_(x * factor)
        return total.clone(), total > 1

    x, factor = torch.rand(11, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(11) % 3
    series = Series(add, 4, x[0], factor[0])
    total.zero_()
    sums, high = series(x[:count], factor[:count])
    copied = sums.clone()
    expected = (x[:count] * factor[:count, None, None]).cumsum(0)
    assert torch.allclose(sums, expected)
    assert torch.equal(high, sums > 1)
    series(x[:3], factor[:3])  # goes on, and what was given stays as it was
    assert torch.equal(sums, copied)
    assert torch.allclose(total, expected[-1] + (x[:3] * factor[:3, None, None]).sum(0))


def test_later_on_a_cpu_is_at_once() -> None:
    concurrent = Concurrent(CPU)
    done: list[int] = []
    later = concurrent.later(done.append, 1)
    assert done == [1]
    assert later.result() is None
    assert concurrent.later(max, 3, 5).result() == 5
    concurrent.wait()

    def fail() -> None:
        raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        concurrent.later(fail)


def test_a_side_stream_of_a_cpu_is_the_function_itself() -> None:
    def make() -> list[Tensor]:
        return [torch.zeros(1)]

    assert on_side_stream(make, CPU) is make


def test_graphs_are_recorded_on_cuda_alone_and_where_kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTTIME_KERNELS", raising=False)
    assert not can_record(CPU)
    assert can_record(torch.device("cuda"))
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert not can_record(torch.device("cuda"))


def test_what_cannot_be_recorded_is_a_warning_unless_the_memory_is_too_small() -> None:
    def fail(error: Exception) -> Any:
        raise error

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record(lambda: 7) == 7
    with pytest.warns(UserWarning, match="no such graph"):
        assert record(lambda: fail(RuntimeError("no such graph"))) is None
    with pytest.raises(torch.OutOfMemoryError, match="too small"):
        record(lambda: fail(torch.OutOfMemoryError("too small")))
