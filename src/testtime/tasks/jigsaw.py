"""Jigsaw puzzles (Noroozi & Favaro 2016), on whole images rather than separate tiles."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from testtime.randomness import Draws
from testtime.tasks.base import ClassTask

_OBSERVED = 4  # arrangements of the probe
_MOST = 24  # arrangements of a 3×3 grid


@dataclass(frozen=True)
class Jigsaw(ClassTask):
    """Predict how the tiles of an image were rearranged.

    The image is cut into `grid`×`grid` tiles, so its sides must be multiples of `grid`. For 2×2 tiles the classes are
    all 24 arrangements; for 3×3 tiles 24 of the 362,880, chosen to differ from each other in as many tiles as possible.

    Attributes:
        grid: Tiles per side, 2 or 3.
    """

    grid: int = 2

    def __post_init__(self) -> None:
        if self.grid not in (2, 3):
            raise ValueError(f"`grid` must be 2 or 3, got {self.grid!r}.")

    @property
    def name(self) -> str:
        return "jigsaw"

    @property
    def outputs(self) -> int:
        return len(list_arrangements(self.grid))

    def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        targets = draws.purpose("jigsaw").integers(self.outputs)
        return self._arrange(images, targets), targets

    def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(_OBSERVED, device=images.device) * (self.outputs // _OBSERVED)  # 0: the image itself
        targets = numbers.repeat(len(images))
        return self._arrange(images.repeat_interleave(_OBSERVED, 0), targets), targets

    def _arrange(self, images: Tensor, targets: Tensor) -> Tensor:
        """Rearrange the tiles of images `(M, C, H, W)`, each by the arrangement of its target."""
        grid, (height, width) = self.grid, images.shape[-2:]
        if height % grid or width % grid:
            raise ValueError(f"The task 'jigsaw' needs images with sides divisible by {grid}, got {height}×{width}.")
        tiles = images.unflatten(-2, (grid, -1)).unflatten(-1, (grid, -1))  # (M, C, rows, h, columns, w)
        tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (M, tiles, C, h, w)
        orders = _make_table(grid, images.device)[targets]  # (M, tiles)
        tiles = tiles.gather(1, orders[:, :, None, None, None].expand_as(tiles))
        tiles = tiles.unflatten(1, (grid, grid)).permute(0, 3, 1, 4, 2, 5)  # (M, C, rows, h, columns, w)
        return tiles.flatten(4, 5).flatten(2, 3).contiguous()


@functools.cache
@torch.inference_mode(False)
def _make_table(grid: int, device: torch.device) -> Tensor:
    # Cached, since a recorded graph cannot copy it from the host.
    return torch.tensor(list_arrangements(grid), dtype=torch.int64, device=device)


@functools.cache
def list_arrangements(grid: int) -> tuple[tuple[int, ...], ...]:
    """Return the arrangements of a grid's tiles, the identity first."""
    tiles = grid * grid
    orders = list(itertools.permutations(range(tiles)))  # in lexicographic order
    everything = torch.tensor(orders, dtype=torch.int64, device="cpu")
    if grid == 2:
        return tuple(tuple(order) for order in everything.tolist())
    chosen = [0]
    # Differing tiles to the most similar chosen one.
    nearest = torch.full((len(everything),), tiles + 1, dtype=torch.int64, device="cpu")
    while len(chosen) < _MOST:
        nearest = torch.minimum(nearest, (everything != everything[chosen[-1]]).sum(1))
        chosen.append(int(nearest.argmax()))  # of several, the first
    return tuple(tuple(order) for order in everything[chosen].tolist())
