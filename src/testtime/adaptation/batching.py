"""How many episodes or streams are computed at once: found by measurement, and bounded by the memory."""

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
    """The count whose trial takes the least time for each of them; remembered by `key` as long as the process lives.

    Args:
        key: What the choice depends on: network, sizes, device.
        counts: Counts to try, rising; the first must work.
        trial: Does the work for a count and returns the seconds it took.

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
    log.info("episodes per second by how many run in parallel: %s; taking %d", rates, best)
    _CHOICES[key] = best
    return best


def find_most(net: YNet, settings: Settings, shape: Sequence[int]) -> int:
    """How many episodes or streams to compute at once at most, however large the memory.

    Beyond a number of pixels more at once are no faster, and what they hold for the backward pass fills the memory; or
    tensors become too large for kernels.

    Args:
        net: The network, in evaluation mode.
        settings: How it learns, with augmentation and task.
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
    """How many times these views, `(M, C, H, W)`, go through a network at once on CUDA kernels."""
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
    return max(1, (kernels.CUDA_LARGEST - 1) // (len(views) * max(sizes)))


def run_fitting(count: int, work: Callable[[int], Result]) -> Result:
    """What `work(count)` returns; where the memory is too small, what it returns with half as many, and so on.

    Args:
        count: How many to try first.
        work: Does the work with at most so many at once. What a failed try has changed, it undoes itself.

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
        log.warning("%d at once do not fit into the memory; continuing with %d", count, (count + 1) // 2)
        count = (count + 1) // 2
        torch.cuda.empty_cache()
