"""The number of parallel episodes or streams: chosen by measurement, limited by memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.adaptation.settings import Settings
from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.tasks import make_views

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CHOICES: dict[Hashable, int] = {}


def choose_fastest(key: Hashable, counts: Sequence[int], trial: Callable[[int], float]) -> int:
    """Return the count with the highest throughput; cached by `key` for the lifetime of the process.

    Args:
        key: What the choice depends on: network, sizes, device.
        counts: Counts to try, ascending; the first must work.
        trial: Called with a count; returns the seconds it took.

    Returns:
        One of `counts`. Counts that do not fit in memory are skipped.
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
    # A larger count must be 10% faster to be worth its memory.
    best = counts[0]
    for count, rate in rates.items():
        if rate > 1.1 * rates[best]:
            best = count
    log.info("episodes per second by the number of parallel ones: %s; using %d", rates, best)
    _CHOICES[key] = best
    return best


def find_most(net: YNet, settings: Settings, shape: Sequence[int]) -> int:
    """Return the maximum number of parallel episodes or streams, regardless of the available memory.

    Beyond a number of pixels, more parallelism is no faster and only costs memory for the backward pass; or tensors
    become too large for the kernels.

    Args:
        net: The network, in evaluation mode.
        settings: The settings; task and augmentation must be set.
        shape: (C, H, W) of the images.
    """
    assert settings.augment is not None
    assert settings.task is not None
    device = next(net.parameters()).device
    draws = Draws.of(0, torch.zeros(1, dtype=torch.int64, device=device))
    image = torch.zeros(1, *shape, dtype=torch.float32, device=device)
    views = make_views(image, draws, settings.copies, settings.augment, settings.task)[0]
    pixels = kernels.tuning(device).most_pixels
    if pixels is None:
        return find_most_for_kernels(net, views)
    return max(1, pixels // (len(views) * views.shape[-2] * views.shape[-1]))


def find_most_for_kernels(net: YNet, views: Tensor) -> int:
    """Return how many sets of views `(M, C, H, W)` the CUDA kernels can process in one forward pass."""
    sizes = [views[0].numel()]

    def note(layer: nn.Module, given: object, made: object) -> None:
        if isinstance(made, Tensor):
            sizes.append(made.numel())

    hooks = [layer.register_forward_hook(note) for layer in net.modules()]
    try:
        with torch.no_grad():
            net(views[:1]) if net.ssl is None else net.self_supervise(views[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return max(1, (kernels.CUDA_LARGEST - 1) // (len(views) * max(sizes)))


def run_fitting(count: int, work: Callable[[int], Result]) -> Result:
    """Return `work(count)`, halving the count while it runs out of memory.

    Args:
        count: The count to try first.
        work: Called with a count; must leave no changes behind when it fails.

    Raises:
        torch.OutOfMemoryError: A count of 1 does not fit.
    """
    while True:
        try:
            return work(count)
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        # Outside the handler, so that the traceback no longer holds tensors.
        log.warning("%d in parallel do not fit in memory; continuing with %d", count, (count + 1) // 2)
        count = (count + 1) // 2
        torch.cuda.empty_cache()
