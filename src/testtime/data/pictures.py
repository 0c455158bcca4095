"""Decode picture files that nobody vouches for.

Whatever a file holds, the outcome is an RGB picture or one `DataError` that names the file and the fault. Pictures are
turned upright as their EXIF orientation says, 16-bit gray is scaled to 8 bits, transparent parts become white, and
a header that promises more pixels than the limit is refused before a single one is decoded.

`fit_picture` is the paper's test-time geometry for ImageNet (its appendix on experimental details): the short side
resized to 256, then a centre crop of 224, with the rounding of the usual PIL pipeline.
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
from testtime.data.sets import DataError, as_data_errors
from testtime.storage import check_file, error_text

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""File names that end like this, in either case, are taken for pictures."""

# Only formats that Pillow decodes by itself: others (EPS) would start programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_ORIENTATION, _BITS = 0x0112, 0x0102
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The filter with which Pillow's warnings are ignored, as `warnings.filters` holds it.
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
logging.getLogger("PIL").addHandler(logging.NullHandler())  # else its errors go to standard error

PictureFile = str | os.PathLike[str] | BinaryIO
Resize = int | Literal["stretch"]


def open_picture(source: PictureFile, limit: int = PIXEL_LIMIT) -> Image.Image:
    """A picture as it is, upright, in RGB or, if it is gray, in 8-bit gray; arguments and errors of `read_picture`."""
    with _opened(source, limit) as image:
        picture = _to_rgb(image, source)
        is_gray = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
        return picture.convert("L") if is_gray else picture


def read_size(source: PictureFile, limit: int = PIXEL_LIMIT) -> tuple[int, int]:
    """Width and height of a picture as its header gives them; arguments and errors of `read_picture`."""
    with _opened(source, limit) as image:
        return image.size


def read_picture(source: PictureFile, limit: int = PIXEL_LIMIT) -> Tensor:
    """A picture as it is, in RGB.

    Args:
        source: A path, or a file open for reading in binary.
        limit: The most pixels to accept.

    Returns:
        uint8 `(3, H, W)`.

    Raises:
        DataError: The file is missing, empty, no picture, damaged, cut short or too large.
    """
    with _opened(source, limit) as image:
        return torch.from_numpy(np.array(_to_rgb(image, source))).permute(2, 0, 1).contiguous()


def fit_picture(source: PictureFile, size: int, resize: Resize | None = None, limit: int = PIXEL_LIMIT) -> Tensor:
    """A picture resized and cropped to a square.

    Large JPEGs are decoded at a lower resolution, never below twice what is needed.

    Args:
        source: A path, or a file open for reading in binary.
        size: Height and width of the result.
        resize: The length to which the short side is resized before the centre crop, at least `size`; None takes 8/7
            of the size (256 for 224). `"stretch"` scales the whole picture to the square instead, without a crop.
        limit: The most pixels to accept, before and after resizing.

    Returns:
        uint8 `(3, size, size)`.

    Raises:
        DataError: As in `read_picture`, or the picture is too elongated to be resized within the limit.
    """
    return torch.from_numpy(_fit(source, size, checked_resize(size, resize), limit).transpose(2, 0, 1).copy())


def fit_pictures(
    paths: Sequence[Path],
    size: int,
    resize: Resize | None = None,
    limit: int = PIXEL_LIMIT,
    threads: int | None = None,
    faults: dict[int, DataError] | None = None,
) -> Tensor:
    """Several pictures, decoded in parallel; Pillow releases the interpreter lock while it decodes and resizes.

    Args:
        paths: The files.
        size: As in `fit_picture`.
        resize: As in `fit_picture`.
        limit: As in `fit_picture`.
        threads: How many at once; None takes one for each core, at most 32.
        faults: Where given, a picture that cannot be read is entered here by its index in `paths`, and is black in the
            result, instead of stopping everything.

    Returns:
        uint8 `(len(paths), 3, size, size)`.

    Raises:
        DataError: The first picture that cannot be read, where `faults` is not given.
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

    count = min(threads or min(os.cpu_count() or 1, 32), len(paths))
    if count > 1:
        with ThreadPoolExecutor(count) as pool:
            for _ in pool.map(fit, range(len(paths))):
                pass  # the loop raises what a thread raised
    else:
        for position in range(len(paths)):
            fit(position)
    return torch.from_numpy(out)


def checked_resize(size: int, resize: Resize | None) -> Resize:
    """`resize` with its default filled in.

    Raises:
        ValueError: The two do not fit together.
    """
    if size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}.")
    if resize is None:
        return round(size * 8 / 7)
    if resize == "stretch" or (isinstance(resize, int) and resize >= size):
        return resize
    raise ValueError(f"`resize` must be 'stretch' or at least `size` ({size}), got {resize!r}.")


def _fit(source: PictureFile, size: int, resize: Resize, limit: int) -> np.ndarray:
    """uint8 `(size, size, 3)`."""
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
    """The picture with its header read; whatever goes wrong inside leaves as a `DataError`."""
    name = _name(source)
    _ignore_warnings()
    try:
        with as_data_errors(), _binary(source) as file, Image.open(file, formats=_FORMATS) as image:
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
        raise DataError(name, "too large for the memory that is left") from None
    except Exception as error:
        # Pillow's readers meet damage with nearly every exception there is: OSError, SyntaxError, struct.error, ...
        raise DataError(name, f"cannot be decoded ({error_text(error)})") from None


@contextlib.contextmanager
def _binary(source: PictureFile) -> Iterator[BinaryIO]:
    """A file open for reading; one that was open already is left open."""
    if not isinstance(source, str | os.PathLike):
        yield source
        return
    check_file(source)
    with open(source, "rb") as file:
        yield file


def _check_png(file: BinaryIO) -> None:
    """Compare the pixels of a PNG with their checksums, which Pillow does not verify; the file's position stays."""
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
    """Ignore what Pillow warns of: a damaged part that a picture does not need, such as its EXIF.

    Pictures are decoded in threads, which `warnings.catch_warnings` is not made for. So this is one filter for
    everything, put first again where somebody has put another before it: under `-W error` a picture must not fail.
    """
    if not warnings.filters or warnings.filters[0] != _QUIET:
        warnings.filterwarnings("ignore", module=_QUIET[3].pattern)


def _name(source: PictureFile) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "picture"


def _to_rgb(image: Image.Image, source: PictureFile) -> Image.Image:
    """The decoded picture, upright and in RGB."""
    image.load()  # here, not within `getexif`, where damage to the picture would count as damage to its EXIF
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # a picture with a damaged EXIF part is still a picture
        orientation = None
    if image.mode.startswith("I"):
        values = np.asarray(image)
        # Others than TIFFs have 16 bits, whatever Pillow makes of them.
        if values.min() < 0 or values.max() > 65535 or 32 in getattr(image, "tag_v2", {}).get(_BITS, ()):
            raise DataError(_name(source), "its pixels are beyond 16 bits")
        picture = Image.fromarray(((values.astype(np.int32) + 128) // 257).astype(np.uint8)).convert("RGB")
    elif image.mode == "F":
        raise DataError(_name(source), "its pixels are floating-point numbers of no known range")
    elif image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        picture = image.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    else:
        picture = image.convert("RGB")
    transpose = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return picture if transpose is None else picture.transpose(transpose)
