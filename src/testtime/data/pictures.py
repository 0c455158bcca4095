"""Decode untrusted picture files.

Whatever the content of a file, the result is an RGB picture or a `DataError` that names the file and the fault. The
EXIF orientation is applied, 16-bit gray is scaled to 8 bits, transparent parts become white, and pictures with more
pixels than the limit are rejected before they are decoded.

`fit_picture` applies the paper's test-time transform for ImageNet (its appendix on experimental details): resize the
short side to 256, then crop the centre 224, with the rounding of the usual PIL pipeline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from testtime.corruptions.registry import PIXEL_LIMIT
from testtime.data.sets import DataError, convert_file_errors
from testtime.storage import check_file, error_text
from testtime.threads import count_cpus

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""Suffixes of picture files, in lower case."""

# Only formats that Pillow decodes itself: others (EPS) start external programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_ORIENTATION, _BITS = 0x0112, 0x0102
_LUMA = (0.299, 0.587, 0.114)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The filter that ignores Pillow's warnings, as an entry of `warnings.filters`.
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
logging.getLogger("PIL").addHandler(logging.NullHandler())  # otherwise its errors are printed to standard error

PictureFile = str | os.PathLike[str] | BinaryIO
Resize = int | Literal["stretch"]


def open_picture(source: PictureFile, limit: int = PIXEL_LIMIT) -> Image.Image:
    """Open a picture, upright, in RGB or, if it is gray, in 8-bit gray; arguments and errors as for `read_picture`."""
    with _opened(source, limit) as image:
        picture = _to_rgb(image, source)
        is_gray = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
        return picture.convert("L") if is_gray else picture


def read_size(source: PictureFile, limit: int = PIXEL_LIMIT) -> tuple[int, int]:
    """Read width and height from the header of a picture; arguments and errors as for `read_picture`."""
    with _opened(source, limit) as image:
        return image.size


def read_picture(source: PictureFile, limit: int = PIXEL_LIMIT) -> Tensor:
    """Read a picture in RGB at its original size.

    Args:
        source: A path, or a file open for reading in binary mode.
        limit: Maximum number of pixels.

    Returns:
        uint8 `(3, H, W)`.

    Raises:
        DataError: The file is missing, empty, not a picture, damaged, truncated or too large.
    """
    with _opened(source, limit) as image:
        return torch.from_numpy(np.array(_to_rgb(image, source))).permute(2, 0, 1).contiguous()


def fit_picture(source: PictureFile, size: int, resize: Resize | None = None, limit: int = PIXEL_LIMIT) -> Tensor:
    """Read a picture, resized and cropped to a square.

    Large JPEGs are decoded at a reduced resolution, at least twice the result's.

    Args:
        source: A path, or a file open for reading in binary mode.
        size: Height and width of the result.
        resize: Length of the short side before the centre crop, at least `size`; None: 8/7 of the size (256 for 224).
            `"stretch"` resizes the whole picture to the square instead, without a crop.
        limit: Maximum number of pixels, before and after resizing.

    Returns:
        uint8 `(3, size, size)`.

    Raises:
        DataError: As in `read_picture`, or the picture is too elongated to be resized within the limit.
    """
    return torch.from_numpy(_fit(source, size, checked_resize(size, resize), limit).transpose(2, 0, 1).copy())


def to_gray(image: Tensor) -> Tensor:
    """Return an RGB picture, uint8 `(3, H, W)`, in gray, uint8 `(1, H, W)`."""
    luma = (image * torch.tensor(_LUMA, dtype=torch.float32, device="cpu").view(3, 1, 1)).sum(0, keepdim=True)
    return luma.round().clamp(0, 255).to(torch.uint8)


def fit_pictures(
    paths: Sequence[Path],
    size: int,
    resize: Resize | None = None,
    limit: int = PIXEL_LIMIT,
    threads: int | None = None,
    faults: dict[int, DataError] | None = None,
) -> Tensor:
    """Read several pictures in parallel; Pillow releases the GIL while it decodes and resizes.

    Args:
        paths: The files.
        size: As in `fit_picture`.
        resize: As in `fit_picture`.
        limit: As in `fit_picture`.
        threads: Number of threads; None: one per core, at most 32.
        faults: If given, errors of unreadable pictures are stored here by index in `paths` instead of raised, and the
            pictures are black in the result.

    Returns:
        uint8 `(len(paths), 3, size, size)`.

    Raises:
        DataError: A picture is unreadable, and `faults` is not given.
    """
    resize = checked_resize(size, resize)
    out = np.empty((len(paths), 3, size, size), dtype=np.uint8)

    def fit(position: int) -> None:
        try:
            out[position] = _fit(paths[position], size, resize, limit).transpose(2, 0, 1)
        except DataError as error:
            if faults is None:
                raise
            faults[position] = error
            out[position] = 0

    count = min(threads or min(count_cpus(), 32), len(paths))
    if count > 1:
        with ThreadPoolExecutor(count) as pool:
            for _ in pool.map(fit, range(len(paths))):
                pass  # propagates errors
    else:
        for position in range(len(paths)):
            fit(position)
    return torch.from_numpy(out)


def checked_resize(size: int, resize: Resize | None) -> Resize:
    """Check `resize` and apply its default.

    Raises:
        ValueError: `size` or `resize` is invalid.
    """
    if size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}.")
    if resize is None:
        return round(size * 8 / 7)
    if resize == "stretch" or (isinstance(resize, int) and resize >= size):
        return resize
    raise ValueError(f"`resize` must be 'stretch' or at least `size` ({size}), got {resize!r}.")


def _fit(source: PictureFile, size: int, resize: Resize, limit: int) -> np.ndarray:
    """Return the fitted picture, uint8 `(size, size, 3)`."""
    with _opened(source, limit) as image:
        if resize == "stretch":
            image.draft(None, (2 * size, 2 * size))
            return np.asarray(_to_rgb(image, source).resize((size, size), Image.Resampling.BILINEAR))
        image.draft(None, (2 * resize, 2 * resize))
        picture = _to_rgb(image, source)
        short, long = min(picture.size), max(picture.size)
        long = int(resize * long / short)
        if long * resize > limit:
            raise DataError(_name(source), f"{image.width}×{image.height} pixels are too elongated to resize")
        if short != resize:
            upright = picture.width <= picture.height
            picture = picture.resize((resize, long) if upright else (long, resize), Image.Resampling.BILINEAR)
        left, top = round((picture.width - size) / 2), round((picture.height - size) / 2)
        return np.asarray(picture.crop((left, top, left + size, top + size)))


@contextlib.contextmanager
def _opened(source: PictureFile, limit: int) -> Iterator[Image.Image]:
    """Open a picture and read its header; errors within the context become a `DataError`."""
    name = _name(source)
    _ignore_warnings()
    try:
        with convert_file_errors(), _binary(source) as file, Image.open(file, formats=_FORMATS) as image:
            if image.width * image.height > limit:
                raise DataError(name, f"{image.width}×{image.height} pixels are above the limit of {limit:,}")
            if image.width * image.height == 0:
                raise DataError(name, "a picture without pixels")
            if image.format == "PNG":
                _check_png(file)
            yield image
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(name, "not a picture in a known format") from None
    except Image.DecompressionBombError:
        raise DataError(name, f"more pixels than the limit of {limit:,}") from None
    except MemoryError:
        raise DataError(name, "too large for the available memory") from None
    except Exception as error:
        # Pillow raises almost any exception for damaged files: OSError, SyntaxError, struct.error, ...
        raise DataError(name, f"cannot be decoded ({error_text(error)})") from None


@contextlib.contextmanager
def _binary(source: PictureFile) -> Iterator[BinaryIO]:
    """Open a file for reading; a file that is already open stays open."""
    if not isinstance(source, str | os.PathLike):
        yield source
        return
    check_file(source)
    with open(source, "rb") as file:
        yield file


def _check_png(file: BinaryIO) -> None:
    """Verify the checksums of a PNG's pixels, which Pillow does not; the file position is restored."""
    position = file.tell()
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind != b"IDAT":
            file.seek(length + 4, os.SEEK_CUR)
            continue
        found = zlib.crc32(kind)
        while length and (content := file.read(min(length, 1 << 20))):
            found, length = zlib.crc32(content, found), length - len(content)
        given = file.read(4)
        if len(given) == 4 and found != int.from_bytes(given, "big"):
            raise ValueError("its pixels do not match their checksum")
    file.seek(position)


def _ignore_warnings() -> None:
    """Ignore Pillow's warnings about damage to optional parts of a picture, for example its EXIF data.

    `warnings.catch_warnings` is not thread-safe, and pictures are decoded in threads. So this is a global filter, which
    is moved to the front again if another was inserted: under `-W error` a picture must not fail.
    """
    if not warnings.filters or warnings.filters[0] != _QUIET:
        warnings.filterwarnings("ignore", module=_QUIET[3].pattern)


def _name(source: PictureFile) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "picture"


def _to_rgb(image: Image.Image, source: PictureFile) -> Image.Image:
    """Return the decoded picture, upright and in RGB."""
    image.load()  # not within `getexif`, where damage to the picture would be mistaken for damage to its EXIF data
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # damaged EXIF data is ignored
        orientation = None
    if image.mode.startswith("I"):
        values = np.asarray(image)
        # Formats other than TIFF have at most 16 bits, whatever Pillow's mode.
        if values.min() < 0 or values.max() > 65535 or 32 in getattr(image, "tag_v2", {}).get(_BITS, ()):
            raise DataError(_name(source), "its pixels have more than 16 bits")
        picture = Image.fromarray(((values.astype(np.int32) + 128) // 257).astype(np.uint8)).convert("RGB")
    elif image.mode == "F":
        raise DataError(_name(source), "its pixels are floating-point numbers of unknown range")
    elif image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        picture = image.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    else:
        picture = image.convert("RGB")
    transpose = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return picture if transpose is None else picture.transpose(transpose)
