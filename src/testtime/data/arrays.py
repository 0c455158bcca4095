"""Memory-mapped `.npy` arrays of integers.

numpy accepts far more in the header than these data sets need; here it must be exactly what numpy writes for a plain
array, and the file must have the size that it implies.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from testtime.data.paths import regular
from testtime.data.sets import DataError
from testtime.storage import error_text

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[iuf][1248])', 'fortran_order': (True|False), 'shape': \(((?:\d{1,15}L?,? ?)*)\), ?\} *\n?"
)


def map_array(path: Path, tree: Path, shape: Sequence[int | None], integers: bool = False) -> np.ndarray:
    """Map an array file into memory and check it.

    Args:
        path: The `.npy` file.
        tree: The folder that must contain it, links resolved.
        shape: The expected shape; None: any length.
        integers: Accept any integer dtype, not only uint8.

    Raises:
        DataError: It is missing, damaged, or another kind of array.
    """
    try:
        found, kind, order, offset = _read_header(regular(path, tree))
    except OSError as error:
        raise DataError(path, f"cannot be read ({error_text(error)})") from None
    fits = len(found) == len(shape) and all(b is None or a == b for a, b in zip(found, shape, strict=True))
    if not fits:
        wanted = "(" + ", ".join("N" if length is None else str(length) for length in shape) + ")"
        raise DataError(path, f"has shape {found} instead of {wanted}")
    if not (kind == np.uint8 or (integers and kind.kind in "iu")):
        raise DataError(path, f"has dtype {kind} instead of {'integers' if integers else 'uint8'}")
    length = offset + math.prod(found) * kind.itemsize
    if path.stat().st_size != length:
        raise DataError(path, f"not a plain .npy array ({path.stat().st_size:,} bytes; its header says {length:,})")
    if 0 in found:
        return np.zeros(found, kind)
    return np.asarray(np.memmap(path, kind, "r", offset, found, order=order))


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype, Literal["C", "F"], int]:
    """Return shape, dtype, "C" or "F" order, and the offset of the data."""
    with open(path, "rb") as file:
        start = file.read(8)
        if start[:6] != _MAGIC or start[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
            raise DataError(path, "not a plain .npy array (wrong magic number)")
        form = "<H" if start[6] == 1 else "<I"
        field = file.read(struct.calcsize(form))
        length = struct.unpack(form, field)[0] if len(field) == struct.calcsize(form) else 0
        text = file.read(min(length, _LONGEST_HEADER))
        match = _HEADER.fullmatch(text)
        if match is None or len(text) != length:
            raise DataError(path, "not a plain .npy array (its header is cut short or describes something else)")
        kind, fortran, numbers = (part.decode() for part in match.groups())
        shape = tuple(int(number) for number in re.findall(r"\d+", numbers))
        return shape, np.dtype(kind), "F" if fortran == "True" else "C", file.tell()
