"""How many episodes or streams run side by side: found by measurement, and bounded by the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from testtime.adapt import make_views
from testtime.learner import Settings
from testtime.networks.tall import LARGEST
from testtime.networks.ynet import YNet
from testtime.randomness import Draws

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


def most_together(net: YNet, settings: Settings, shape: Sequence[int]) -> int:
    """How many episodes or streams to compute side by side at most, however large the memory.

    On a CPU, steps on more pixels at once are no faster, and what they keep for the way back fills the memory. On CUDA
    larger tensors are not for kernels of ours, and torch's are slower.

    Args:
        net: The network, in evaluation mode.
        settings: How it learns, with augmentation and task.
        shape: (C, H, W) of the images.
    """
    device = next(net.parameters()).device
    draws = Draws.of(0, torch.zeros(1, 1, dtype=torch.int64, device=device))
    views = make_views(torch.zeros(1, 1, *shape, dtype=torch.float32, device=device), draws, settings)[0][0]
    if device.type == "cpu":
        return max(1, _PIXELS // (len(views) * views.shape[-2] * views.shape[-1]))
    return most_for_kernels(net, views)


def most_for_kernels(net: YNet, views: Tensor) -> int:
    """How many times these views, `(M, C, H, W)`, go through a network at once on CUDA kernels of ours."""
    sizes = [views[0].numel()]

    def note(layer: nn.Module, given: object, made: object) -> None:
        if isinstance(made, Tensor):
            sizes.append(made.numel())

    hooks = [layer.register_forward_hook(note) for layer in net.modules()]
    try:
        with torch.no_grad():
            net.self_supervise(views[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return max(1, (LARGEST - 1) // (len(views) * max(sizes)))


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
