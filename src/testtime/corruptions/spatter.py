"""Spatter: drops of water or mud on the lens.

OpenCV's edge detection, distance transform and histogram equalisation are reimplemented as batched tensor code, in
integers, so that results are exact in any order.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from testtime.corruptions.filters import mirror_index, smooth
from testtime.corruptions.strips import by_strips, draw_rows
from testtime.corruptions.weather import gray
from testtime.randomness import Draws

Level = tuple[float, float, float, float, float, Literal["water", "mud"]]
# (mean, deviation, blur, threshold) of the drops, weight of the water or blur of the mud, kind
SPATTER: dict[str, tuple[Level, ...]] = {
    "cifar": (
        (0.62, 0.1, 0.7, 0.7, 0.5, "water"),
        (0.65, 0.1, 0.8, 0.7, 0.5, "water"),
        (0.65, 0.3, 1, 0.69, 0.5, "water"),
        (0.65, 0.1, 0.7, 0.69, 0.6, "mud"),
        (0.65, 0.1, 0.5, 0.68, 0.6, "mud"),
    ),
    "imagenet": (
        (0.65, 0.3, 4, 0.69, 0.6, "water"),
        (0.65, 0.3, 3, 0.68, 0.6, "water"),
        (0.65, 0.3, 2, 0.68, 0.5, "water"),
        (0.65, 0.3, 1, 0.65, 1.5, "mud"),
        (0.67, 0.4, 1, 0.65, 1.5, "mud"),
    ),
}
_COLORS = {"water": (175, 238, 238), "mud": (63, 42, 20)}
_NORMAL_STEPS = 4096  # normal numbers are rounded to this fraction, so that smoothing is exact

_SOBEL = ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))
_BOX = ((1, 1, 1), (1, 1, 1), (1, 1, 1))
_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))
_WEAK, _STRONG = 50, 150  # thresholds of the edges
_TANGENT = 13573  # tan(22.5°) · 2¹⁵

# Distances are in units of 2⁻¹⁶ pixel, up to 20 pixels.
_UNIT = 1 << 16
_FARTHEST = 20 * _UNIT
_STRAIGHT, _DIAGONAL, _KNIGHT = (round(cost * _UNIT) for cost in (1, 1.4, 2.1969))
_MOVES = (
    *((move, _STRAIGHT) for move in ((0, 1), (0, -1), (1, 0), (-1, 0))),
    *(((down, across), _DIAGONAL) for down in (1, -1) for across in (1, -1)),
    *(((down, across), _KNIGHT) for down in (1, -1) for across in (2, -2)),
    *(((down, across), _KNIGHT) for down in (2, -2) for across in (1, -1)),
)


def spatter(images: Tensor, level: Level, draws: Draws) -> Tensor:
    """Add drops of water, or cover an image with drops of mud.

    Args:
        images: Float pixels 0 to 255, `(N, C, H, W)`.
        level: Mean, deviation, blur and threshold of the drops; the weight of the water or the blur of the mud; the
            kind, "water" or "mud".
        draws: One stream per image, keys `(N,)`.

    Returns:
        Float pixels `(N, C, H, W)`.
    """
    mean, deviation, sigma, threshold, amount, kind = level
    count, channels, height, width = images.shape
    plane, device = (count, 1, height, width), images.device

    def draw(rows: slice) -> Tensor:
        return (draw_rows("normal", draws, plane[1:], rows) * _NORMAL_STEPS).round_()

    layer = smooth(by_strips(plane, device, draw), sigma, 4, "edge").mul_(deviation / _NORMAL_STEPS).add_(mean)
    if kind == "water":
        mask = _water_mask(layer.masked_fill_(layer < threshold, 0).squeeze(1)).unsqueeze(1).mul_(amount)
    else:
        mask = smooth(layer > threshold, amount, 4, "edge")
        mask = mask.masked_fill_(mask < 0.8, 0).to(torch.float32)
    color = torch.tensor(_COLORS[kind], dtype=torch.float32, device=device).view(1, 3, 1, 1)
    if channels == 1:
        color = gray(color)

    def cover(rows: slice) -> Tensor:
        share, part = mask[:, :, rows], images[:, :, rows]
        return (part if kind == "water" else part * (1 - share)) + share * color

    return by_strips(images.shape, device, cover)


def _water_mask(layer: Tensor) -> Tensor:
    """Return the relief of drops, float32 in [0, 1], of a layer with 0 between the drops, `(N, H, W)`."""
    drops = (layer * 255).floor_().remainder_(256).to(torch.int32)  # wraps around, as published
    distances = _correlate(edge_distances(find_edges(drops)), _BOX, "mirror")
    relief = equalize(distances.div_(9 * _UNIT, rounding_mode="floor"))
    relief = _correlate(relief, _EMBOSS, "mirror").clamp_(0, 255)
    relief = _correlate(relief, _BOX, "mirror").mul_(2).add_(9).div_(18, rounding_mode="floor")  # the rounded mean
    mask = relief.mul_(drops).to(torch.float32)
    return mask / mask.amax((1, 2), keepdim=True).clamp_(min=1)


def _correlate(planes: Tensor, kernel: tuple[tuple[int, ...], ...], border: Literal["edge", "mirror"]) -> Tensor:
    """Correlate integers `(N, H, W)` with a 3 × 3 kernel; "mirror" does not repeat the outermost pixel."""
    height, width = planes.shape[1:]
    positions = [
        mirror_index(size, 1) if border == "mirror" else np.arange(-1, size + 1).clip(0, size - 1)
        for size in (height, width)
    ]
    down, across = (torch.from_numpy(index).to(planes.device) for index in positions)
    padded = planes[:, down][:, :, across]
    result = torch.zeros_like(planes)
    for row, weights in enumerate(kernel):
        for column, weight in enumerate(weights):
            if weight:
                result.add_(padded[:, row : row + height, column : column + width], alpha=weight)
    return result


def find_edges(planes: Tensor) -> Tensor:
    """Detect edges as OpenCV's Canny does, with thresholds 50 and 150, 3 × 3 Sobel filters and the L1 norm.

    Args:
        planes: Integers from 0 to 255, int32 `(N, H, W)`.

    Returns:
        Booleans `(N, H, W)`.
    """
    height, width = planes.shape[1:]
    across = _correlate(planes, _SOBEL, "edge")
    down = _correlate(planes, tuple(zip(*_SOBEL, strict=True)), "edge")
    opposite = (across ^ down) < 0  # signs
    across, down = across.abs_(), down.abs_()
    size = across + down
    padded = F.pad(size, (1, 1, 1, 1))

    def exceeds(row: int, column: int) -> Tensor:
        return size > padded[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    # Maximal along the gradient: horizontal below 22.5°, vertical above 67.5°, else diagonal. The comparison with the
    # following pixel of a row or column admits equality: for integers, exceeding it after adding 1.
    scaled, steep = across * _TANGENT, down << 15
    peak = torch.where(opposite, exceeds(-1, 1) & exceeds(1, -1), exceeds(-1, -1) & exceeds(1, 1))
    vertical, horizontal = exceeds(-1, 0), exceeds(0, -1)
    size += 1
    peak = torch.where(steep > scaled + (across << 16), vertical & exceeds(1, 0), peak)
    peak = torch.where(steep < scaled, horizontal & exceeds(0, 1), peak)
    size -= 1
    # Weak edges count if they are connected to strong ones.
    weak = peak & (size > _WEAK)
    edges = weak & (size > _STRONG)
    while True:
        grown = (F.max_pool2d(edges.to(torch.float32), 3, 1, 1) > 0) & weak
        if torch.equal(grown, edges):
            return edges
        edges = grown


def edge_distances(edges: Tensor) -> Tensor:
    """Return each pixel's distance to the nearest edge as OpenCV's distance transform approximates it (L2, 5 × 5).

    That is the shortest path of straight, diagonal and knight's moves of lengths 1, 1.4 and 2.1969. A shortest path
    has at most two kinds of moves, in any order, so the moves are applied in turn, each 1, 2, 4, … times.

    Args:
        edges: Booleans `(N, H, W)`.

    Returns:
        Distances in units of 2⁻¹⁶ pixel, at most 20 pixels, int32 `(N, H, W)`.
    """
    height, width = edges.shape[1:]
    distances = torch.full(edges.shape, _FARTHEST, dtype=torch.int32, device=edges.device).masked_fill_(edges, 0)
    for (down, across), cost in _MOVES:
        times = 1
        while times * cost < _FARTHEST and abs(times * down) < height and abs(times * across) < width:
            y, x = times * down, times * across
            source = distances[:, max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)] + times * cost
            target = distances[:, max(0, y) : height + min(0, y), max(0, x) : width + min(0, x)]
            torch.minimum(target, source, out=target)
            times *= 2
    return distances


def equalize(planes: Tensor) -> Tensor:
    """Equalise histograms as OpenCV does.

    Args:
        planes: Integers from 0 to 20, int32 `(N, H, W)`.

    Returns:
        Integers from 0 to 255, int32 `(N, H, W)`; a constant plane is unchanged.
    """
    values = range(_FARTHEST // _UNIT + 1)
    counts = torch.stack([(planes == value).sum((1, 2)) for value in values], 1)  # (N, 21)
    sums = counts.cumsum(1)
    lowest = counts.gather(1, (sums > 0).to(torch.int8).argmax(1, keepdim=True))  # of the lowest value present
    rest = sums[:, -1:] - lowest
    scale = 255 / rest.clamp(min=1).to(torch.float32)
    table = ((sums - lowest).clamp_(min=0).to(torch.float32) * scale).round_().to(torch.int32)
    equalized = table.gather(1, planes.flatten(1).to(torch.int64)).view(planes.shape)
    return torch.where((rest > 0)[..., None], equalized, planes)
