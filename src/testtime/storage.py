"""Files that are written whole or not at all, read with suspicion, and folders that one process holds.

Every reader of files in this package reports a file that it cannot use as a `FileError`: the file's name, what is wrong
with it and, where something can be done, what.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows; there two processes can be in one folder
    fcntl = None

log = logging.getLogger(__name__)


PathLike = str | os.PathLike[str]


class FileError(ValueError):
    """A file or folder that cannot be used: which, what is wrong with it and what to do about it.

    Args:
        path: The file or folder.
        fault: What is wrong with it.
        remedy: What to do about it, if that can be said.
    """

    def __init__(self, path: PathLike, fault: str, remedy: str = "") -> None:
        super().__init__(os.fspath(path), fault, remedy)
        self.path, self.fault, self.remedy = os.fspath(path), fault, remedy

    def __str__(self) -> str:
        text = f"{self.path}: {self.fault}"
        return printable(f"{text}; {self.remedy}" if self.remedy else text)


class FolderError(FileError):
    """A folder that cannot be worked in: it is a file, or another process is at work there."""


def printable(text: str) -> str:
    """A text from outside on one line, without anything that could steer a terminal or reorder what is read.

    Line ends and tabs become spaces; other control and formatting characters become visible escapes such as `\\x1b`.
    """
    shown = (
        char if unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else ascii(char)[1:-1]
        for char in " ".join(text.split())
    )
    return "".join(shown)


def check_file(path: PathLike) -> None:
    """Check that a path is a file that can be read to its end: a pipe would make the reader wait for ever.

    Raises:
        FileError: It is missing, empty, a folder, or something else than a file.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        fault = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error_text(error)})"
        raise FileError(path, fault) from None
    if stat.S_ISDIR(status.st_mode):
        raise FileError(path, "a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(path, "not a regular file")
    if status.st_size == 0:
        raise FileError(path, "an empty file")


def error_text(error: BaseException) -> str:
    """What went wrong in a few words: an `OSError` without its number and file name, others as they are."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds, NaN and infinities not among it.

    Raises:
        ValueError: It is not JSON.
    """

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"holds {number}, which is not a finite number")
        return value

    try:
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: PathLike, limit: int = 1 << 30) -> Any:
    """What a JSON file holds.

    Args:
        path: The file.
        limit: The most bytes to accept.

    Raises:
        FileError: It is missing, too large or not JSON.
    """
    check_file(path)
    if os.stat(path).st_size > limit:
        raise FileError(path, f"larger than {limit:,} bytes")
    try:
        return parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise FileError(path, f"not a JSON file ({error_text(error)})") from None


def clear_parts(folder: PathLike) -> None:
    """Remove what a killed process was writing with `whole_file`, anywhere below a folder."""
    for part in Path(folder).rglob(".*.part"):
        if not part.is_dir():
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: PathLike) -> Iterator[Path]:
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


def write_whole(path: PathLike, content: str | bytes) -> None:
    """Write a text or bytes to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def hold_folder(path: PathLike) -> Iterator[None]:
    """Make a folder and keep other processes from working in it; one that is killed lets go of it.

    Raises:
        FolderError: It is a file, or another process is at work there.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FolderError(path, "a file, not a folder") from None
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(path, "another process is at work in this folder") from None
        except OSError as error:  # some network file systems have no locks
            log.info("%s cannot be locked (%s)", path, error)
        yield
    finally:
        os.close(handle)
