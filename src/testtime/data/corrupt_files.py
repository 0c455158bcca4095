"""Corrupt a picture file; shared functions for corrupting folders. All files are written atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from testtime.corruptions.registry import LIMITS, PIXEL_LIMIT, Scale, corrupt, fits, severity_level
from testtime.data.frost import read_frost
from testtime.data.pictures import SUFFIXES, open_picture
from testtime.provenance import find_differences
from testtime.storage import (
    FileError,
    PathLike,
    atomic_file,
    clear_parts,
    error_text,
    hold_folder,
    read_json,
    write_atomic,
)

_SETTINGS = "corruption.json"
WRITABLE = tuple(sorted(SUFFIXES - {".gif"}))
"""Suffixes of the supported output formats; GIF would lose most colours."""


def read_picture(path: PathLike) -> Image.Image:
    """Open a picture in RGB or, if it is gray, in gray; upright, with transparent parts in white.

    Raises:
        FileError: It is not a picture, damaged, or too large.
    """
    picture = open_picture(path)
    if not fits(picture.height, picture.width):
        raise FileError(path, f"has {picture.width}×{picture.height} pixels; {LIMITS} can be corrupted")
    return picture


def picture_tensor(picture: Image.Image) -> Tensor:
    """Convert a gray or RGB picture to a uint8 tensor `(C, H, W)`."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def tensor_picture(pixels: Tensor) -> Image.Image:
    """Convert a uint8 tensor `(C, H, W)` to a picture."""
    array = pixels.permute(1, 2, 0).contiguous().cpu().numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def read_middle(path: PathLike) -> Image.Image:
    """Open a picture in RGB with ImageNet's usual crop: the short side resized to 256, the centre 224 × 224 cropped.

    Raises:
        FileError: As for `read_picture`, or the picture is too elongated to be resized within the limit.
    """
    picture = read_picture(path)
    width, height = picture.size
    short = min(width, height)
    size = (int(256 * width / short), int(256 * height / short))
    if size[0] * size[1] > PIXEL_LIMIT:  # only the centre with `resize(box=…)` would round some pixels differently
        raise FileError(path, f"{width}×{height} pixels are too elongated to resize")
    picture = picture.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    return picture.crop((left, top, left + 224, top + 224))


def save_picture(picture: Image.Image, path: PathLike, quality: int = 95) -> None:
    """Write a picture atomically, in the format of its suffix.

    Raises:
        FileError: The suffix is not supported, or the file cannot be written.
    """
    target = Path(path)
    kind = Image.registered_extensions().get(target.suffix.lower())
    if kind is None or target.suffix.lower() not in WRITABLE:
        raise FileError(target, "not the name of a picture", f"use one of the suffixes {', '.join(WRITABLE)}")
    try:
        with atomic_file(target) as temporary:
            picture.save(temporary, kind, quality=quality)
    except (OSError, ValueError) as error:  # ValueError: too large for the format
        raise FileError(target, f"cannot be written ({error_text(error)})") from None


def corrupt_file(
    source: PathLike,
    target: PathLike,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    number: int = 0,
    scale: Scale = "auto",
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
) -> Path:
    """Corrupt one picture.

    Args:
        source: Input file.
        target: Output file; its suffix determines the format. An existing file is replaced.
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        seed: Seed of the draws.
        number: Sample index, which the draws also depend on.
        scale: Parameters of "cifar" or "imagenet", or "auto" by the picture's size.
        frost: Folder of frost photographs; None: procedural textures.
        device: Device to compute on.

    Returns:
        The target.

    Raises:
        FileError: The source cannot be read, the target cannot be written, or they are the same file.
        ValueError: An argument is invalid.
    """
    severity_level(name, severity, "cifar")
    source, target = Path(source), Path(target)
    check_apart(source, target)
    with name_in_memory_errors(source):
        images = picture_tensor(read_picture(source))[None].to(device)
        samples = torch.tensor([number], dtype=torch.int64, device="cpu")
        textures = read_frost(frost) if name == "frost" else None
        corrupted = corrupt(images, name, severity, seed=seed, samples=samples, scale=scale, frost=textures)
        save_picture(tensor_picture(corrupted[0]), target)
    return target


def check_apart(source: PathLike, target: PathLike) -> None:
    """Check that an output does not overwrite its input.

    Raises:
        FileError: They are the same file.
    """
    same = os.path.realpath(source) == os.path.realpath(target)
    with contextlib.suppress(OSError):  # one of them does not exist
        same = same or os.path.samefile(source, target)
    if same:
        raise FileError(target, "the input itself", "choose another output")


@contextlib.contextmanager
def name_in_memory_errors(path: PathLike) -> Iterator[None]:
    """Convert out-of-memory errors to a `FileError` that names the picture."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU, torch raises a plain RuntimeError.
        lacking = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not lacking:
            raise
        raise FileError(path, "too large for the available memory") from None


def frost_setting(frost: PathLike | None) -> str | None:
    """Return the entry for the frost in the settings of a folder."""
    return None if frost is None else str(Path(frost).resolve())


@contextlib.contextmanager
def hold_target(target: Path, settings: dict[str, object]) -> Iterator[None]:
    """Lock a folder that is new or was made with the same settings, and remove partial files of killed processes.

    `settings["pictures"]`, if any, is a checksum of the input pictures, which must be the same.
    """
    try:
        with hold_folder(target):
            _agree(target, settings)
            clear_parts(target)
            yield
    except OSError as error:
        raise FileError(error.filename or target, f"cannot be written ({error_text(error)})") from None


def _agree(target: Path, settings: dict[str, object]) -> None:
    """Write the settings to a new folder; raise an error for one that was made with others."""
    note = target / _SETTINGS
    if note.is_file():
        found = read_json(note, limit=1 << 20)
        if not isinstance(found, dict):
            raise FileError(note, "not the settings of a run", "choose another folder")
        pictures = settings.get("pictures")
        differences = find_differences(found | {"pictures": pictures}, settings)
        if differences:
            raise FileError(target, f"made with other settings ({'; '.join(differences)})", "choose another folder")
        if found.get("pictures", pictures) != pictures:
            raise FileError(target, "made from other pictures", "choose another folder")
        if "pictures" in found or pictures is None:
            return
        # Made by an earlier version, which stored no checksum: accepted once, as it cannot be checked.
    elif any(not entry.name.endswith(".part") for entry in target.iterdir()):
        raise FileError(target, f"not empty, and has no {_SETTINGS} of an earlier run", "choose another folder")
    write_atomic(note, json.dumps(settings, indent=2) + "\n")
