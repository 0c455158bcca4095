"""What surrounds a CUDA graph, on a CPU: a function that is called stands in for a graph that is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from testtime import capture
from testtime.capture import Beside, Series


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
    monkeypatch.setattr(capture, "Captured", Called)
    total = torch.zeros(2, 3)

    def add(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        total.add_(x * factor)
        return total.clone(), total > 1

    x, factor = torch.rand(11, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(11) % 3
    series = Series(add, 4, x[0], factor[0])
    total.zero_()
    sums, high = series(x[:count], factor[:count])
    kept = sums.clone()
    expected = (x[:count] * factor[:count, None, None]).cumsum(0)
    assert torch.allclose(sums, expected)
    assert torch.equal(high, sums > 1)
    series(x[:3], factor[:3])  # goes on, and what was given stays as it was
    assert torch.equal(sums, kept)
    assert torch.allclose(total, expected[-1] + (x[:3] * factor[:3, None, None]).sum(0))


def test_beside_on_a_cpu_is_in_turn() -> None:
    beside, done = Beside(torch.device("cpu")), []
    with beside:
        done.append(1)
    beside.join()
    with pytest.raises(ValueError, match="within"), beside:
        raise ValueError("within")
    assert done == [1]
