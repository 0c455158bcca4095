"""How many episodes or streams run side by side: found by measurement, and bounded by the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CHOICES: dict[Hashable, int] = {}
_PIXELS = 2**17  # of views that a CPU computes at once


def fastest(key: Hashable, counts: Sequence[int], trial: Callable[[int], float]) -> int:
    """The count whose trial takes the least time for each of them; remembered by `key` as long as the process lives.

    Args:
        key: What the choice depends on: network, sizes, device.
        counts: Counts to try, rising; the first must work.
        trial: Does the work for a count and gives the seconds it took.

    Returns:
        One of `counts`. Counts that do not fit into memory are passed over, and so are all larger ones.
    """
    if key in _CHOICES:
        return _CHOICES[key]
    rates: dict[int, float] = {}
    for count in counts:
        try:
            rates[count] = count / trial(count)
        except torch.OutOfMemoryError:  # noqa: PERF203 (it ends the loop)
            torch.cuda.empty_cache()
            break
    if not rates:
        return counts[0]
    # A larger count must earn its memory: by a tenth.
    best = counts[0]
    for count, rate in rates.items():
        if rate > 1.1 * rates[best]:
            best = count
    log.info("episodes a second by how many run side by side: %s; taking %d", rates, best)
    _CHOICES[key] = best
    return best


def most_on_cpu(copies: int, shape: Sequence[int]) -> int:
    """How many episodes or streams to compute side by side on a CPU at most.

    Steps on more pixels at once are no faster, and what they keep for the way back fills the memory.

    Args:
        copies: Views of an image in a step.
        shape: (C, H, W) of the images.
    """
    return max(1, _PIXELS // (copies * shape[-2] * shape[-1]))


def fit(count: int, work: Callable[[int], Result]) -> Result:
    """What `work(count)` gives; where the memory is too small for it, what it gives with half as many, and so on.

    Args:
        count: How many to try first.
        work: Does the work with at most so many side by side. What a failed try has changed, it undoes itself.

    Raises:
        torch.OutOfMemoryError: A single one is too much.
    """
    while True:
        try:
            return work(count)
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        # Out here the error is gone, and with it what its traceback held.
        log.warning("%d side by side do not fit into the memory; going on with %d", count, (count + 1) // 2)
        count = (count + 1) // 2
        torch.cuda.empty_cache()
