"""Atomic file writes, validated reads, and folders locked by one process.

Every reader in this package reports an unusable file as a `FileError`: the file's name, the fault and, where there is
one, the remedy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import stat
import tempfile
import unicodedata
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where folders are not locked
    fcntl = None

log = logging.getLogger(__name__)


PathLike = str | os.PathLike[str]

_SHOWN = 20  # folders that an error lists


class FileError(ValueError):
    """A file or folder that cannot be used.

    Args:
        path: The file or folder.
        fault: What is wrong with it.
        remedy: What to do about it, if anything.
    """

    def __init__(self, path: PathLike, fault: str, remedy: str = "") -> None:
        super().__init__(os.fspath(path), fault, remedy)
        self.path, self.fault, self.remedy = os.fspath(path), fault, remedy

    def __str__(self) -> str:
        text = f"{self.path}: {self.fault}"
        return printable(f"{text}; {self.remedy}" if self.remedy else text)


class FolderError(FileError):
    """A folder that cannot be used: it is a file, or another process holds it."""


def printable(text: str) -> str:
    """Return external text on one line, with control characters escaped.

    Line breaks and tabs become spaces; other control and formatting characters become visible escapes like `\\x1b`.
    """
    escaped = (
        char if unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else ascii(char)[1:-1]
        for char in " ".join(text.split())
    )
    return "".join(escaped)


def check_file(path: PathLike) -> None:
    """Check that a path is a regular file; reading a pipe, for example, could block forever.

    Raises:
        FileError: It is missing, empty, a folder, or not a regular file.
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


def find_files(paths: Iterable[PathLike], suffixes: Container[str], kind: str) -> list[Path]:
    """Return the given files, and those with certain endings directly inside given folders.

    Args:
        paths: Files, which need not exist, and folders, whose files are sorted by name; hidden ones are left out.
        suffixes: The endings, in lower case.
        kind: What the files are, for the error.

    Raises:
        FileError: A folder cannot be read, or has no such file.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        try:
            entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
            inside = [file for file in entries if file.suffix.lower() in suffixes and file.is_file()]
            folders = [entry.name for entry in entries if entry.is_dir()]
        except OSError as error:
            raise FileError(path, f"cannot be read ({error_text(error)})") from None
        if not inside:
            more = ", …" if len(folders) > _SHOWN else ""
            names = f", only folders ({', '.join(folders[:_SHOWN])}{more}): name them" if folders else ""
            raise FileError(path, f"contains no {kind}{names}")
        found += inside
    return found


def error_text(error: BaseException) -> str:
    """Return the message of an error; for an `OSError`, without its number and file name."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; NaN and infinities are not accepted.

    Raises:
        ValueError: It is not valid JSON.
    """

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is not a finite number")
        return value

    try:
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: PathLike, limit: int = 1 << 30) -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        limit: Maximum size in bytes.

    Raises:
        FileError: It is missing, too large or not valid JSON.
    """
    check_file(path)
    if os.stat(path).st_size > limit:
        raise FileError(path, f"larger than {limit:,} bytes")
    try:
        return parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise FileError(path, f"not a JSON file ({error_text(error)})") from None


def clear_parts(folder: PathLike) -> None:
    """Remove the temporary files that killed processes left behind in `atomic_file`, recursively."""
    for part in Path(folder).rglob(".*.part"):
        if not part.is_dir():
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: PathLike) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces `path`, on failure it is removed.

    A reader sees the old file or the new one, never a partial one, even if the process is killed or the disk is full.

    Raises:
        OSError: The file cannot be written; the message names `path`.
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
        temporary.chmod(0o644)  # mkstemp creates files that only their owner can read
        os.replace(temporary, path)
    except SafetensorError as error:  # raised instead of OSError when the disk is full
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: cannot be written ({error})") from None
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: PathLike, content: str | bytes) -> None:
    """Write text or bytes to `path` atomically."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def hold_folder(path: PathLike, shared: bool = False) -> Iterator[None]:
    """Create a folder and lock it against other processes; the lock ends with the process.

    Args:
        path: The folder.
        shared: Lock it only against processes that do not share it.

    Raises:
        FolderError: It is a file, or another process holds it.
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
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(path, "another process is at work in this folder") from None
        except OSError as error:  # some network file systems have no locks
            log.info("%s cannot be locked (%s)", path, error)
        yield
    finally:
        os.close(handle)
