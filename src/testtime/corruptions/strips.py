"""Process large images in strips, so that memory stays proportional to the image.

The random numbers of a pixel depend only on its position (`testtime.randomness`), so rows computed separately are
bit-identical to those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from testtime.randomness import GOLDEN, Draws

# Values per strip; more than `registry` processes at once, so that only a single large image is ever split.
_CPU_VALUES = 1 << 22
_GPU_VALUES = 1 << 25


def split_rows(height: int, row_values: int, device: torch.device) -> list[slice]:
    """Split the rows of an image into strips.

    Args:
        height: Rows of the image.
        row_values: Values in a row of the batch, N·C·W.
        device: The device that processes them.
    """
    limit = _CPU_VALUES if device.type == "cpu" else _GPU_VALUES
    step = max(1, limit // max(1, row_values))
    return [slice(top, min(top + step, height)) for top in range(0, height, step)]


def by_strips(shape: Sequence[int], device: torch.device, work: Callable[[slice], Tensor]) -> Tensor:
    """Compute images in strips.

    Args:
        shape: `(N, C, H, W)` of the images.
        device: Their device.
        work: Computes some rows: a slice of 0..H-1 → float32 `(N, C, rows, W)`.

    Returns:
        Float32 `(N, C, H, W)`.
    """
    count, channels, height, width = shape
    strips = split_rows(height, count * channels * width, device)
    if len(strips) == 1:
        return work(strips[0])
    result = torch.empty((count, channels, height, width), dtype=torch.float32, device=device)
    for rows in strips:
        result[:, :, rows] = work(rows)
    return result


def skip(draws: Draws, count: int) -> Draws:
    """Advance streams by `count` hashes; an integer or uniform number takes one, two normal numbers share one."""
    return Draws(draws.keys + torch.tensor(count, dtype=torch.int64, device=draws.keys.device) * GOLDEN)


def draw_rows(kind: Literal["uniform", "normal"], draws: Draws, shape: Sequence[int], rows: slice) -> Tensor:
    """Return some rows of `draws.uniform(*shape)` or `draws.normal(*shape)`.

    Args:
        kind: The distribution.
        draws: One stream per image, keys `(N,)`.
        shape: `(C, H, W)`.
        rows: A slice of the H rows.

    Returns:
        Float32 `(N, C, rows, W)`.
    """
    channels, height, width = shape
    if rows.stop - rows.start == height:
        return draws.normal(*shape) if kind == "normal" else draws.uniform(*shape)
    planes = []
    for channel in range(channels):
        first, count = (channel * height + rows.start) * width, (rows.stop - rows.start) * width
        if kind == "normal":
            odd = first % 2
            planes.append(skip(draws, first // 2).normal(count + odd)[..., odd:])
        else:
            planes.append(skip(draws, first).uniform(count))
    return torch.stack(planes, 1).view(-1, channels, rows.stop - rows.start, width)
