"""Read untrusted tar archives piece by piece: regular files with safe names, within limits."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from testtime.data.sets import DataError, convert_file_errors
from testtime.storage import check_file, error_text

_PIECE = 1 << 18
_HEADERS = 1 << 20  # maximum bytes of the headers of one member
_LONGEST_NAME = 200


def read_archive(path: Path, files: int, size: int) -> Iterator[tuple[str, int, bytes]]:
    """Read the files of a tar archive, with or without gzip compression.

    Args:
        path: The archive.
        files: Maximum number of members.
        size: Maximum total size of the members in bytes.

    Yields:
        A file's name, the offset of a piece in the file, and the piece; an empty file has one empty piece.

    Raises:
        DataError: The archive is damaged, exceeds the limits, or holds anything but files and folders, a name that
            leads out of it, or a name twice.
    """
    with convert_file_errors():
        check_file(path)
    try:
        with open(path, "rb") as raw, _plain(raw) as plain:
            metered = _Metered(plain, size + files * _PIECE)
            with tarfile.open(fileobj=cast(BinaryIO, metered), mode="r:") as tar:
                for member in _members(tar, path, metered, files, size):
                    yield from _pieces(tar, member, metered)
                metered.allowance = _HEADERS
                metered.seek(tar.offset)
                if metered.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise DataError(path, "damaged or cut short")
            while metered.read(_PIECE):  # gzip's checksum is at the end
                metered.allowance = _HEADERS
    except DataError:
        raise
    except Exception as error:  # tarfile, gzip and zlib raise various errors on damage
        raise DataError(path, f"not a readable archive ({error_text(error)})") from None


class _Metered:
    """A file with limits on reading: headers may lie, and a few bytes may decompress to gigabytes.

    Attributes:
        allowance: Bytes that may be read before it is reset.
    """

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit = file, limit
        self.allowance = _HEADERS

    def read(self, size: int) -> bytes:
        self.allowance -= size
        if size < 0 or self.allowance < 0:
            raise ValueError("its headers are too long")
        if self._file.tell() + size > self._limit:
            raise ValueError(f"more than {self._limit:,} bytes")
        return self._file.read(size)

    def seek(self, position: int) -> int:
        if not 0 <= position <= self._limit:
            raise ValueError(f"more than {self._limit:,} bytes")
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


@contextlib.contextmanager
def _plain(raw: BinaryIO) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed."""
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    if not packed:
        yield raw
        return
    with gzip.GzipFile(fileobj=raw) as plain:
        yield cast(BinaryIO, plain)


def _members(tar: tarfile.TarFile, path: Path, metered: _Metered, files: int, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members that are files, after checking every member."""
    found: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    count = total = 0
    while True:
        metered.allowance = _HEADERS
        member = tar.next()
        if member is None:
            return
        count, total = count + 1, total + member.size
        name = PurePosixPath(member.name)
        if count > files:
            raise DataError(path, f"holds more than {files:,} files")
        if member.size < 0 or total > size:
            raise DataError(path, f"holds more than {size:,} bytes")
        if name.is_absolute() or ".." in name.parts or "\\" in member.name:
            raise DataError(path, f"holds {member.name!r}, which leads out of it")
        if len(member.name) > _LONGEST_NAME:
            raise DataError(path, f"holds a name of {len(member.name):,} characters")
        if not (member.isdir() or member.isreg()) or member.issparse():
            raise DataError(path, f"holds {member.name!r}, which is neither a file nor a folder")
        if member.isdir():
            continue
        if name in found or name in folders or not found.isdisjoint(name.parents):
            raise DataError(path, f"holds {member.name!r} twice")
        found.add(name)
        folders.update(name.parents)
        yield member


def _pieces(tar: tarfile.TarFile, member: tarfile.TarInfo, metered: _Metered) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, offsets and pieces of a member."""
    file = tar.extractfile(member)
    assert file is not None  # a regular file
    start, name = 0, str(PurePosixPath(member.name))
    while True:
        metered.allowance = _HEADERS
        content = file.read(_PIECE)
        if content or not start:
            yield name, start, content
        if not content:
            break
        start += len(content)
