"""The last sums of a backward pass: one launch for all parameters.

The kernels that make gradients by filters, scales and shifts end with sums over blocks of pixels or over images. Each
sum is small, and so is its place in the gradient: a launch for each would cost more than the sums. Here they wait in
one piece of memory until the backward pass is done.
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

_FEW = 8  # replicas, whose gradients are small enough to be kept until the end of the backward pass

_current: ContextVar[GradientBuffer | None] = ContextVar("buffer", default=None)


@dataclass(eq=False)
class Share:
    """What one use of a parameter adds to its gradient: rows `(rows, S, columns)`, to be summed over the first axis.

    Attributes:
        target: Where the parameter begins in a replica's numbers.
        rows: How many there are to sum.
        columns: Numbers in the parameter of one replica.
        start: Where the rows begin in the memory.
        written: Whether they are there.
    """

    target: int
    rows: int
    columns: int
    start: int = 0
    written: bool = False


class GradientBuffer:
    """The gradient by parameters that all lie in one tensor, gathered in one piece of memory.

    Whatever is computed within `with buffer:` may take part. In the one backward pass between `begin` and `collect`
    the kernels keep back the sums they would end with, and give autograd nothing in their place; `collect` adds them up
    and puts them where they belong.

    Args:
        numbers: The parameters of S replicas, `(S, P)`.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._tables: dict[Any, Tensor] = {}  # never dropped: recorded graphs read them
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
        """A place for what a use of a parameter will add to its gradient; None if it is not one of them."""
        place = parameter.data_ptr() - self._numbers.data_ptr()
        width = self._numbers.shape[1] * self._numbers.element_size()
        if self.collects or not parameter.is_leaf or not 0 <= place < width:
            return None
        share = Share(place // self._numbers.element_size(), rows, parameter[0].numel())
        self._reserved.append(weakref.ref(share))  # it goes with what was computed: an attack on the images, say
        return share

    def begin(self) -> None:
        """The next backward pass is the one to collect."""
        self.collects, size = True, 0
        shares = [share for one in self._reserved if (share := one()) is not None]
        self._shares = sorted(shares, key=lambda share: share.target)  # those of a parameter follow each other
        for share in self._shares:
            share.start, size = size, size + share.rows * len(self._numbers) * share.columns
        self._memory = self._numbers.new_empty(size)

    def rows(self, share: Share) -> Tensor:
        """The memory of a share, `(rows, S, columns)`, to be written now."""
        share.written = True
        return self._of(share)

    def _of(self, share: Share) -> Tensor:
        assert self._memory is not None
        size = share.rows * len(self._numbers) * share.columns
        return self._memory[share.start : share.start + size].view(share.rows, len(self._numbers), share.columns)

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function whose results only `collect` needs, concurrently with what follows."""
        if self._side is None:
            function(*arguments)
        else:
            self._side.later(function, *arguments)

    def collect(self) -> Tensor:
        """The gradient `(S, P)` by all parameters; zeros where nothing was kept back."""
        assert self.collects
        if self._side is not None:
            self._side.wait()
        result = torch.empty_like(self._numbers)
        count, width = self._numbers.shape
        for share in self._shares:
            if not share.written:  # no loss depends on it
                self._of(share).zero_()
        # Few replicas have many rows to sum, many have few.
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
    """The buffer that what is computed now belongs to; None where no gradient will be asked for."""
    return _current.get() if torch.is_grad_enabled() else None


def _join(shares: Iterable[Share], width: int) -> Iterator[tuple[int, int, int, int]]:
    """Sums of rows that give a whole replica's numbers: start in the memory, target, rows (0 for gaps), columns."""
    end, last = 0, None
    for share in shares:
        if last is not None and last[1] == share.target:  # another use of the same parameter: rows behind its rows
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
    """A block of columns of one replica; rows are added in an order that is always the same."""
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
