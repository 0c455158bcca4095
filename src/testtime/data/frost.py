"""Read the photographs of the published frost corruption from a folder."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from testtime.data.pictures import read_picture
from testtime.storage import FileError, PathLike

# The published code lists six names but draws from the first five.
_NAMES = ("frost1", "frost2", "frost3", "frost4", "frost5")
_SUFFIXES = (".png", ".jpg", ".jpeg")  # in order of preference


def read_frost(folder: PathLike | None) -> tuple[Tensor, ...] | None:
    """Read the five photographs of a folder for `testtime.corruptions`.

    Args:
        folder: Folder with `frost1` to `frost5` (.png or .jpg); None returns None, for procedural textures.

    Returns:
        uint8 `(3, h, w)` each.

    Raises:
        FileError: One is missing or cannot be read.
    """
    return None if folder is None else _read(os.fspath(folder))


@functools.lru_cache(maxsize=1)
def _read(folder: str) -> tuple[Tensor, ...]:
    photographs = []
    for name in _NAMES:
        path = next((p for suffix in _SUFFIXES if os.path.lexists(p := Path(folder, name + suffix))), None)
        if path is None:
            remedy = f"frost needs the five photographs {_NAMES[0]} to {_NAMES[-1]}"
            raise FileError(folder, f"holds no {name}.png or {name}.jpg", remedy)
        with torch.inference_mode(False):  # the cached tensors are used outside of it too
            photographs.append(read_picture(path))
    return tuple(photographs)
