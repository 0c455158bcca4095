"""Training augmentations, also used to make views of a test image (paper, section 2).

Batched tensor code for any device. An augmentation maps images `(N, C, H, W)` and `Draws` with keys `(N, K)` to K
copies of each image, `(N, K, C, h, w)`. Copy k of image n depends only on key `[n, k]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.randomness import Draws

Augment = Callable[[Tensor, Draws], Tensor]


@dataclass(frozen=True)
class CropFlip:
    """Zero-pad, take a random crop of the original size, flip horizontally with probability 0.5 (CIFAR).

    Attributes:
        padding: Black pixels added on each side before the crop.
        flip: Whether to flip; disable it where mirror images are invalid, as for digits.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.padding, int) or isinstance(self.padding, bool) or self.padding < 0:
            raise ValueError(f"`padding` must be an integer of at least 0, got {self.padding!r}.")
        _check_flip(self.flip)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        height, width = images.shape[-2:]
        offsets = draws.purpose("crop").integers(2 * self.padding + 1, 2)  # (N, K, 2)
        rows = offsets[..., :1] + torch.arange(height, device=images.device)  # (N, K, H)
        columns = torch.arange(width, device=images.device).expand(*draws.keys.shape, width)
        if self.flip:
            flipped = draws.purpose("flip").integers(2).bool().unsqueeze(-1)
            columns = torch.where(flipped, width - 1 - columns, columns)
        columns = offsets[..., 1:] + columns  # (N, K, W)
        padded = F.pad(images, (self.padding,) * 4)
        indices = rows.unsqueeze(-1) * padded.shape[-1] + columns.unsqueeze(-2)  # (N, K, H, W) into the padded plane
        return _pick(padded, indices)


@dataclass(frozen=True)
class ResizedCropFlip:
    """Crop a box of random area and aspect ratio, resize it, flip horizontally with probability 0.5 (ImageNet).

    Resizing is bilinear with antialiasing, as in image libraries; the result is float in [0, 1].

    Attributes:
        size: Side of the result; None: the image's height and width.
        scale: Lower and upper bound of the box's area, as a fraction of the image's.
        ratio: Lower and upper bound of the box's aspect ratio, width over height.
        flip: Whether to flip.
    """

    size: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        if self.size is not None and not (isinstance(self.size, int) and self.size >= 1):
            raise ValueError(f"`size` must be an integer of at least 1, got {self.size!r}.")
        for name in ("scale", "ratio"):
            bounds = getattr(self, name)
            numbers = isinstance(bounds, tuple) and all(isinstance(bound, int | float) for bound in bounds)
            if not numbers or len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] < math.inf:
                raise ValueError(f"`{name}` must be two increasing positive numbers, got {bounds!r}.")
        _check_flip(self.flip)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        height, width = images.shape[-2:]
        top, left, box_height, box_width = self.boxes(height, width, draws)
        rows = _resize_matrix(top, box_height, height, self.size or height)  # (N, K, h, H)
        columns = _resize_matrix(left, box_width, width, self.size or width)  # (N, K, w, W)
        if self.flip:
            flipped = draws.purpose("flip").integers(2).bool()[..., None, None]
            columns = torch.where(flipped, columns.flip(-2), columns)
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        # (N, K, 1, h, H) @ (N, 1, C, H, W) @ (N, K, 1, W, w)
        rows, columns = rows.to(pixels.dtype), columns.to(pixels.dtype)
        return rows.unsqueeze(2) @ pixels.unsqueeze(1) @ columns.unsqueeze(2).transpose(-1, -2)

    def boxes(self, height: int, width: int, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return top, left, height and width of the crops, int64 `(N, K)` each.

        The first of ten draws that fits the image is used; if none fits, the largest central box within `ratio`.
        """
        area, shape = draws.purpose("box").uniform(2, 10).unbind(-2)  # (N, K, 10)
        area = (self.scale[0] + area * (self.scale[1] - self.scale[0])) * height * width
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        shape = torch.exp(low + shape * (high - low))
        widths, heights = (area * shape).sqrt().round().long(), (area / shape).sqrt().round().long()
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first = fits.byte().argmax(-1, keepdim=True)
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        central = max(1, min(width, round(height * ratio))), max(1, min(height, round(width / ratio)))
        any_fits = fits.any(-1)
        box_width = torch.where(any_fits, widths.gather(-1, first)[..., 0], central[0])
        box_height = torch.where(any_fits, heights.gather(-1, first)[..., 0], central[1])
        corner = draws.purpose("place")
        top = corner.fold(0).integers(height - box_height + 1)
        left = corner.fold(1).integers(width - box_width + 1)
        top = torch.where(any_fits, top, (height - box_height) // 2)
        left = torch.where(any_fits, left, (width - box_width) // 2)
        return top, left, box_height, box_width


@dataclass(frozen=True)
class AugMix:
    """Mix an image with randomly processed versions of itself (Hendrycks et al. 2020).

    Three chains of one to three operations are applied to the image; their results are averaged with random weights,
    and the average is mixed with the image. The operations are rotation, shear and translation along each axis,
    posterization, solarization and autocontrast. Those that resemble test corruptions are left out, as published:
    contrast, brightness, color and sharpness. So is equalization, whose histograms are slow to compute in batches.

    The result is float in [0, 1]; pixels from outside the image are black.

    Attributes:
        severity: Maximum strength of the operations, up to 10.
    """

    severity: float = 3.0

    def __post_init__(self) -> None:
        if not (isinstance(self.severity, int | float) and 0.1 <= self.severity <= 10):
            raise ValueError(f"`severity` must be from 0.1 to 10, got {self.severity!r}.")

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        pixels = as_floats(images)[:, None, None]  # (N, 1, 1, C, H, W)
        draws = draws.purpose("augmix")  # (N, K)
        chains = draws.copies(3)  # (N, K, 3)
        lengths = 1 + chains.purpose("length").integers(3).flatten()
        mixed = pixels.expand(*chains.keys.shape, *pixels.shape[3:]).flatten(0, 2)  # (N·K·3, C, H, W)
        for position in range(3):
            processed = self.process(mixed, chains.fold(position).flatten())
            mixed = torch.where((lengths > position)[:, None, None, None], processed, mixed)
        weights = -(1 - chains.purpose("weight").uniform()).log()  # normalised exponentials: a flat Dirichlet
        weights = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1)  # (N, K, 3, 1)
        average = (mixed.unflatten(0, chains.keys.shape).flatten(3) * weights).sum(2)  # (N, K, C·H·W)
        average = average.unflatten(-1, pixels.shape[3:])
        share = draws.purpose("share").uniform()[..., None, None, None]
        return (1 - share) * pixels[:, 0] + share * average

    def process(self, images: Tensor, draws: Draws) -> Tensor:
        """Apply one random operation to each image.

        Args:
            images: Float in [0, 1], `(M, C, H, W)`.
            draws: Keys `(M,)`.
        """
        operation = draws.purpose("operation").integers(8)
        level = (0.1 + draws.purpose("level").uniform() * (self.severity - 0.1)) / 10
        signed = torch.where(draws.purpose("sign").integers(2).bool(), -level, level)
        kind, strength = operation[:, None, None, None], level[:, None, None, None]
        result = torch.where(kind < 5, _warp(images, operation, signed), images)
        width = 2.0 ** (4 + (4 * strength).floor())  # of the steps in 0..255: 4 bits are left, or fewer
        result = torch.where(kind == 5, (images * 255 / width).floor() * width / 255, result)
        result = torch.where((kind == 6) & (images >= 1 - strength), 1 - images, result)
        low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
        return torch.where((kind == 7) & (high > low), (images - low) / (high - low), result)


def _warp(images: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Rotate (operation 0), shear (1, 2) or translate (3, 4) images `(M, C, H, W)`."""
    height, width = images.shape[-2:]
    angle = torch.where(operation == 0, strength * math.radians(30), 0.0)
    aspect = height / width  # coordinates are relative to the sides
    shear_x = torch.where(operation == 1, strength * 0.3, 0.0) * aspect
    shear_y = torch.where(operation == 2, strength * 0.3, 0.0) / aspect
    # By up to a third of the side, whose coordinates run from -1 to 1.
    shift_x, shift_y = (torch.where(operation == kind, strength * 2 / 3, 0.0) for kind in (3, 4))
    # Sampling positions; not `affine_grid`, a matrix product that TF32 would round.
    x, y = ((2 * torch.arange(side, device=images.device).float() + 1) / side - 1 for side in (width, height))
    cosine, sine = angle.cos()[:, None, None], angle.sin()[:, None, None]
    x, y, shear_x, shear_y = x[None, None, :], y[None, :, None], shear_x[:, None, None], shear_y[:, None, None]
    columns = cosine * x + (shear_x - sine * aspect) * y + shift_x[:, None, None]
    rows = (shear_y + sine / aspect) * x + cosine * y + shift_y[:, None, None]
    grid = torch.stack([columns, rows], dim=-1)  # (M, H, W, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def as_floats(images: Tensor) -> Tensor:
    """Return images, uint8 or float in [0, 1], as float32 in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def narrow(images: Tensor) -> Tensor:
    """Return images in float64, as numpy makes them, as float32; others as they are."""
    return images.float() if images.dtype == torch.float64 else images


def make(specification: Mapping[str, Any]) -> Augment:
    """Build an augmentation from its name and arguments, e.g. `{"name": "crop-flip", "padding": 4}`."""
    kinds = {"crop-flip": CropFlip, "resized-crop-flip": ResizedCropFlip}
    arguments = dict(specification)
    name = arguments.pop("name", None)
    if name not in kinds:
        raise ValueError(f"`augment` must be named one of {', '.join(kinds)}, got {name!r}.")
    try:
        return kinds[name](
            **{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
        )
    except TypeError as error:
        raise ValueError(f"`augment` {name!r}: {error}.") from None


def _check_flip(flip: object) -> None:
    if not isinstance(flip, bool):
        raise ValueError(f"`flip` must be true or false, got {flip!r}.")


def _pick(images: Tensor, indices: Tensor) -> Tensor:
    """Gather pixels of images `(N, C, H, W)` at flat indices `(N, K, h, w)` → `(N, K, C, h, w)`."""
    count, channels = images.shape[:2]
    _, copies, height, width = indices.shape
    planes = images.flatten(2).unsqueeze(1).expand(count, copies, channels, -1)
    index = indices.view(count, copies, 1, -1).expand(-1, -1, channels, -1)
    return planes.gather(-1, index).view(count, copies, channels, height, width)


def _resize_matrix(start: Tensor, length: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return matrices that resample `inputs` pixels to `outputs`, reading only `start .. start + length - 1`.

    Each row is a triangle filter around its source position, widened when downscaling (antialiasing), truncated at the
    ends of the box and normalised to sum 1.

    Args:
        start: First pixel of the box, int64 `(...)`.
        length: Pixels in the box, int64 `(...)`.
        inputs: Pixels in the image.
        outputs: Pixels in the result.

    Returns:
        float32 `(..., outputs, inputs)`.
    """
    device = start.device
    scale = (length.float() / outputs)[..., None, None]
    centre = (torch.arange(outputs, dtype=torch.float32, device=device)[:, None] + 0.5) * scale - 0.5  # within the box
    pixel = torch.arange(inputs, device=device) - start[..., None, None]
    weight = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weight = weight * ((pixel >= 0) & (pixel < length[..., None, None]))
    return weight / weight.sum(-1, keepdim=True)
