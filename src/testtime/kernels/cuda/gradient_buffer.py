"""The final reductions of a backward pass, in one launch for all parameters.

The kernels for gradients w.r.t. filters, scales and shifts end with sums over blocks of pixels or over images. Each sum
is so small that a separate launch would cost more than the sum. Here the partial results are collected in one piece of
memory until the backward pass is done.
"""

# pyright: reportIndexIssue=false
# (kernels are launched as kernel[grid](...), which cannot be typed without triton installed)

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from testtime.kernels.graphs import Concurrent

_FEW = 8  # replicas up to which a side stream computes gradients, which keeps their inputs in memory

_current: ContextVar[GradientBuffer | None] = ContextVar("buffer", default=None)


@dataclass(eq=False)
class Share:
    """The contribution of one use of a parameter to its gradient: `(rows, S, columns)`, to be summed over the rows.

    Attributes:
        target: Offset of the parameter in a replica's row.
        rows: Number of rows to sum.
        columns: Elements of the parameter of one replica.
        start: Offset of the rows in the memory.
        written: Whether the rows have been written.
    """

    target: int
    rows: int
    columns: int
    start: int = 0
    written: bool = False


class GradientBuffer:
    """Collects the gradient w.r.t. parameters that are views of one tensor.

    Kernels used within `with buffer:` may take part. In the backward pass between `begin` and `collect`, they write
    partial sums to the buffer and return no gradient to autograd; `collect` adds the sums up.

    Args:
        numbers: The parameters of S replicas, `(S, P)`.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._tables: dict[Any, Tensor] = {}  # never freed: CUDA graphs read them
        self._side = Concurrent(numbers.device) if len(numbers) <= _FEW else None
        self._forget()

    def _forget(self) -> None:
        self.collects = False
        self._reserved: list[weakref.ref[Share]] = []
        self._shares: list[Share] = []
        self._memory: Tensor | None = None

    def __enter__(self) -> GradientBuffer:
        self._forget()
        self._token = _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)
        if self._side is not None:
            self._side.wait()
        self._forget()

    def reserve(self, parameter: Tensor, rows: int) -> Share | None:
        """Reserve rows for one use of a parameter; None if the parameter is not part of the tensor."""
        place = parameter.data_ptr() - self._numbers.data_ptr()
        width = self._numbers.shape[1] * self._numbers.element_size()
        if self.collects or not parameter.is_leaf or not 0 <= place < width:
            return None
        share = Share(place // self._numbers.element_size(), rows, parameter[0].numel())
        self._reserved.append(weakref.ref(share))  # freed with the graph of its use, for example an attack's
        return share

    def begin(self) -> None:
        """Start collecting, before the backward pass."""
        self.collects, size = True, 0
        shares = [share for one in self._reserved if (share := one()) is not None]
        self._shares = sorted(shares, key=lambda share: share.target)  # groups the shares of a parameter
        for share in self._shares:
            share.start, size = size, size + share.rows * len(self._numbers) * share.columns
        self._memory = self._numbers.new_empty(size)

    def rows(self, share: Share) -> Tensor:
        """Return the memory of a share, `(rows, S, columns)`, which the caller must write."""
        share.written = True
        return self._of(share)

    def _of(self, share: Share) -> Tensor:
        assert self._memory is not None
        size = share.rows * len(self._numbers) * share.columns
        return self._memory[share.start : share.start + size].view(share.rows, len(self._numbers), share.columns)

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function whose results only `collect` needs, concurrently with later work."""
        if self._side is None:
            function(*arguments)
        else:
            self._side.later(function, *arguments)

    def collect(self) -> Tensor:
        """Return the gradient `(S, P)` w.r.t. all parameters; zeros where nothing was collected."""
        assert self.collects
        if self._side is not None:
            self._side.wait()
        result = torch.empty_like(self._numbers)
        count, width = self._numbers.shape
        for share in self._shares:
            if not share.written:  # no loss depends on it
                self._of(share).zero_()
        # Few replicas have many rows to sum, many replicas few.
        block, columns = (32, 128) if count <= _FEW else (4, 1024)
        sums = tuple(_join(self._shares, width))
        if (sums, columns) not in self._tables:
            table = [
                (start + first, target + first, rows, size - first, size)
                for start, target, rows, size in sums
                for first in range(0, size, columns)
            ]
            self._tables[sums, columns] = torch.tensor(table, dtype=torch.int64, device=self._numbers.device)
        table = self._tables[sums, columns]
        _sum_rows[(len(table), count)](
            self._memory, result, table, count, width, ROWS=block, COLUMNS=columns, num_warps=4
        )
        return result


def current() -> GradientBuffer | None:
    """Return the active buffer; None if there is none or gradients are disabled."""
    return _current.get() if torch.is_grad_enabled() else None


def _join(shares: Iterable[Share], width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the sums that make up a replica's gradient: offset in the memory, target, rows (0 for gaps), columns."""
    end, last = 0, None
    for share in shares:
        if last is not None and last[1] == share.target:  # another use of the same parameter: its rows are adjacent
            last = (*last[:2], last[2] + share.rows, last[3])
            continue
        if last is not None:
            yield last
        if share.target > end:
            yield 0, end, 0, share.target - end
        last, end = (share.start, share.target, share.rows, share.columns), share.target + share.columns
    if last is not None:
        yield last
    if end < width:
        yield 0, end, 0, width - end


@triton.jit
def _sum_rows(memory_ptr, result_ptr, table_ptr, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of columns of one replica; rows are added in a fixed order."""
    table_ptr += tl.program_id(0) * 5
    start = tl.load(table_ptr)
    target = tl.load(table_ptr + 1)
    rows = tl.load(table_ptr + 2).to(tl.int32)
    left = tl.load(table_ptr + 3)
    stride = tl.load(table_ptr + 4)
    replica = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < left
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        at = start + (row.to(tl.int64) * count + replica) * stride
        total += tl.load(
            memory_ptr + at[:, None] + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
    tl.store(result_ptr + replica * width + target + column, tl.sum(total, axis=0), mask=inside)
