"""Find by measurement how many episodes to run side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch

log = logging.getLogger(__name__)

_CHOICES: dict[Hashable, int] = {}


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
