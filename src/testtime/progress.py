"""Progress callbacks, and prefetching on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Progress = Callable[[int, int, str], None]
"""Called with the number of items done, the total, and a word for the current item (may be empty)."""

T = TypeVar("T")


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, prefetching the next one on a thread."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, "read-ahead") as reader:
        coming = reader.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, source, end)
            yield item  # type: ignore[misc]
