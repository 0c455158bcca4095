"""How far long work is, and reading ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Progress = Callable[[int, int, str], None]
"""Called with how much is done, out of how much, and a word on what is being done (may be empty)."""

T = TypeVar("T")


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; the next one is read on a thread while the last one is worked on."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, "read-ahead") as reader:
        coming = reader.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, source, end)
            yield item  # type: ignore[misc]
