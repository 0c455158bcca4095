"""Files that are written whole or not at all, folders that one process holds, and whether two runs are the same."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows; there two processes can be in one folder
    fcntl = None

log = logging.getLogger(__name__)


class FolderError(ValueError):
    """A folder that cannot be worked in: it is a file, or another process is at work there."""


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, on any failure it is gone.

    A reader sees the old file or the new one, never a part of it, even when the process is killed or the disk is full.

    Raises:
        OSError: It cannot be written; the message names `path`.
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
    except SafetensorError as error:  # its way of saying that the disk is full
        raise OSError(f"{path}: cannot be written ({error})") from None
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk does not say which file it was
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a text or bytes to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def hold_folder(path: str | Path) -> Iterator[None]:
    """Make a folder and keep other processes from working in it; one that is killed lets go of it.

    Raises:
        FolderError: It is a file, or another process is at work there.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FolderError(f"{path} is a file; name a folder.") from None
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(f"{path}: another process is at work in this folder.") from None
        except OSError as error:  # some network file systems have no locks
            log.info("%s cannot be locked (%s)", path, error)
        yield
    finally:
        os.close(handle)


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
