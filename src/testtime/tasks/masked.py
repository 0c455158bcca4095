"""Reconstruction of masked patches (He et al. 2022), the task of TTT-MAE (Gandelsman et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from testtime.augment import as_floats
from testtime.randomness import Draws

COORDINATES = 2
"""Channels of a view in addition to those of the image: row and column of each patch."""
_OBSERVED = 4  # masks of the probe, at most
_SMALLEST_VARIANCE = 1e-4  # added to that of a patch: about 2.5 grey levels, so that noise of blank ones is not learned


@dataclass(frozen=True)
class Masked:
    """Reconstruct the patches of an image that are hidden, from those that are visible.

    For networks whose encoder processes any number of patches, such as `testtime.vit`, and whose self-supervised branch
    is a decoder. A view has the v visible patches only, as `(C + 2, v, patch²)`: row i has the pixels of patch i, and
    the last two channels its row and column in the image. The decoder's outputs are the pixels of all T patches,
    `(T, C·patch²)`. Targets are `(T, C·patch² + 1)`: the pixels of each patch, normalised by their mean and standard
    deviation as published, and whether the patch was hidden, 0 or 1.

    The loss is the mean squared error over the hidden patches. Since they are normalised, it is the share of their
    variance that is not reconstructed, 1 for a constant: so it is also the error, and exp(-loss) the confidence, 0.37
    at chance level.

    Attributes:
        ratio: Share of the patches to hide; at least one is hidden and at least one visible.
        patch: Side of a patch in pixels, which must be that of the network's.
    """

    ratio: float = 0.75
    patch: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"`ratio` must be in (0, 1), got {self.ratio}.")
        if not isinstance(self.patch, int) or isinstance(self.patch, bool) or self.patch < 1:
            raise ValueError(f"`patch` must be an integer of at least 1, got {self.patch!r}.")

    @property
    def name(self) -> str:
        return "masked"

    @property
    def outputs(self) -> None:
        return None

    @property
    def chance(self) -> float:
        return 1.0

    def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        total, visible = self._count(images)
        order = draws.purpose("mask").uniform(total).argsort(stable=True)  # (N, T)
        return self._mask(images, order[:, :visible].sort(-1).values)

    def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return views with the same masks for every image, no two of which show the same patch."""
        total, visible = self._count(images)
        draws = Draws.of(0, torch.zeros((), dtype=torch.int64, device=images.device)).purpose("probe")
        order = draws.uniform(total).argsort(stable=True)
        masks = min(_OBSERVED, total // visible)
        shown = order[: masks * visible].unflatten(0, (masks, visible)).sort(-1).values
        return self._mask(images.repeat_interleave(masks, 0), shown.repeat(len(images), 1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        pixels, hidden = targets[..., :-1], targets[..., -1]
        errors = (outputs.float() - pixels).square().mean(-1)  # (M, T)
        return (errors * hidden).sum(-1) / hidden.sum(-1)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def confidence(self, losses: Tensor) -> Tensor:
        return torch.exp(-losses.mean(-1))

    def _count(self, images: Tensor) -> tuple[int, int]:
        """Return the number of patches of an image, and how many of them are visible."""
        height, width = images.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"The task 'masked' needs images with sides divisible by {self.patch}, got {height}×{width}."
            )
        total = (height // self.patch) * (width // self.patch)
        if total < 2:
            raise ValueError(f"The task 'masked' needs at least 2 patches of {self.patch}, got {height}×{width}.")
        return total, min(max(1, total - round(self.ratio * total)), total - 1)

    def _mask(self, images: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
        """Return the views of images `(M, C, H, W)` with some visible patches, int `(M, v)`, and the targets."""
        columns = images.shape[-1] // self.patch
        patches = cut_patches(as_floats(images), self.patch)  # (M, T, C, patch²)
        visible = patches.gather(1, shown[:, :, None, None].expand(-1, -1, *patches.shape[2:]))
        places = torch.stack([shown // columns, shown % columns], dim=1)  # (M, 2, v)
        places = places.unsqueeze(-1).expand(-1, -1, -1, patches.shape[-1]).to(patches.dtype)
        views = torch.cat([visible.transpose(1, 2), places], dim=1)  # (M, C + 2, v, patch²)
        pixels = patches.flatten(2).float()
        variance, mean = torch.var_mean(pixels, -1, correction=0, keepdim=True)
        hidden = torch.ones(pixels.shape[:2], dtype=torch.float32, device=images.device).scatter(1, shown, 0.0)
        return views, torch.cat([(pixels - mean) / (variance + _SMALLEST_VARIANCE).sqrt(), hidden[..., None]], dim=-1)


def cut_patches(images: Tensor, patch: int) -> Tensor:
    """Cut images `(N, C, H, W)` into patches `(N, T, C, patch²)`, row by row."""
    patches = images.unflatten(-2, (-1, patch)).unflatten(-1, (-1, patch))  # (N, C, rows, patch, columns, patch)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(3)
