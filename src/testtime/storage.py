"""Files that are written whole or not at all, texts in them, and whether what they say of a run is the same."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, on any failure it is gone.

    A reader sees the old file or the new one, never a part of it, even when the process is killed or the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a text or bytes to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def pack_text(text: str) -> Tensor:
    """A text as a tensor of bytes, which a safetensors file can hold."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def unpack_text(tensor: Tensor) -> str:
    """The text that `pack_text` packed."""
    return bytes(tensor.tolist()).decode(errors="replace")


def find_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Where a configuration read from a file and one of now differ, a phrase for each entry, sorted by name.

    Args:
        there: What the file says.
        here: What is asked for now; compared as JSON would hold it.
    """
    old, new = flatten(there), flatten(json.loads(json.dumps(here)))
    return [
        f"{key}: {old.get(key, 'none')} there, {new.get(key, 'none')} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with names such as `recipe.lr`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
