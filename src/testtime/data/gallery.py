"""A figure of every corruption at every severity: rows are corruptions, columns the original and levels 1 to 5."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from testtime.corruptions.registry import CORRUPTIONS, SEVERITIES, Scale, corrupt
from testtime.data.corrupt_files import check_apart, picture_tensor, read_picture, save_picture, tensor_picture
from testtime.data.frost import read_frost
from testtime.storage import FileError, PathLike

_SHOWN = 150  # approximate longer side of a cell in pixels
_GAP = 6
_MARGIN = 150  # for the names
_HEADER = 30
_LARGEST = 224  # short side that larger pictures are reduced to, the size that the severities are defined for


def draw_gallery(
    image: Tensor,
    *,
    seed: int = 0,
    number: int = 0,
    scale: Scale = "auto",
    frost: PathLike | None = None,
) -> Image.Image:
    """Draw every corruption of one image at every severity, with labels.

    Args:
        image: uint8, or float in [0, 1], `(C, H, W)`.
        seed: Seed of the draws.
        number: Sample index of the image, which the draws also depend on.
        scale: Parameters of "cifar" or "imagenet", or "auto" by the image's size.
        frost: Folder of frost photographs; None: procedural textures.

    Returns:
        The figure, 15 rows of 6 images.
    """
    if image.is_floating_point():
        image = (image * 255).round().clamp(0, 255).to(torch.uint8)
    height, width = image.shape[-2:]
    zoom = _SHOWN / max(height, width)
    factor = max(1, int(zoom))  # an integer, so that the pixels of small images are equal blocks
    size = (width * factor, height * factor) if zoom >= 1 else (max(1, int(width * zoom)), max(1, int(height * zoom)))
    filter = Image.Resampling.NEAREST if zoom >= 1 else Image.Resampling.BOX

    columns = 1 + len(SEVERITIES)
    whole = (_MARGIN + columns * (size[0] + _GAP), _HEADER + len(CORRUPTIONS) * (size[1] + _GAP))
    sheet = Image.new("RGB", whole, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for column in range(columns):
        middle = _MARGIN + column * (size[0] + _GAP) + size[0] // 2
        title = "original" if column == 0 else f"severity {column}" if size[0] >= 70 else str(column)
        draw.text((middle, _HEADER // 2), title, fill="black", font=font, anchor="mm")
    textures = read_frost(frost)
    for row, name in enumerate(CORRUPTIONS):
        top = _HEADER + row * (size[1] + _GAP)
        draw.text((_MARGIN - 10, top + size[1] // 2), name.replace("_", " "), fill="black", font=font, anchor="rm")
        cells = [image]
        for severity in SEVERITIES:
            samples = torch.tensor([number], dtype=torch.int64, device="cpu")
            made = corrupt(image[None], name, severity, seed=seed, samples=samples, scale=scale, frost=textures)
            cells.append(made[0])
        for column, cell in enumerate(cells):
            picture = tensor_picture(cell).convert("RGB").resize(size, filter)
            sheet.paste(picture, (_MARGIN + column * (size[0] + _GAP), top))
    return sheet


def write_gallery(
    source: PathLike,
    target: PathLike,
    *,
    seed: int = 0,
    scale: Scale = "auto",
    frost: PathLike | None = None,
) -> Path:
    """Write the gallery of a picture file. A short side above 224 is first reduced to that.

    Args:
        source: Input picture.
        target: Output PNG.
        seed: Seed of the draws.
        scale: Parameters of "cifar" or "imagenet", or "auto" by the picture's size.
        frost: Folder of frost photographs; None: procedural textures.

    Returns:
        The target.

    Raises:
        FileError: The source cannot be read, or the target is the source or not a .png.
    """
    target = Path(target)
    if target.suffix.lower() != ".png":
        raise FileError(target, "not the name of a PNG", "use the suffix .png")
    check_apart(source, target)
    picture = read_picture(source)
    short = min(picture.size)
    if short > _LARGEST:
        size = (round(picture.width * _LARGEST / short), round(picture.height * _LARGEST / short))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    save_picture(draw_gallery(picture_tensor(picture), seed=seed, scale=scale, frost=frost), target)
    return target
