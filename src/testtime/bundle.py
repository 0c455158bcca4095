"""Carry a folder as a few files of limited size.

`pack_folder` writes numbered parts, which hold the contents of all files one after another, and `index.json` with the
sizes and SHA-256 of files and parts. Empty folders, lock files and temporary files are left out.

A folder can be packed while a run works in it, in any order: a run writes every file atomically, and what depends on
other files (record, summary) is derived from them again when it resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testtime.checks import check_format, fold_name, format_value, is_integer, is_list_of, is_table, is_text
from testtime.progress import Progress
from testtime.storage import FileError, PathLike, atomic_file, check_file, hold_folder, read_json, write_atomic

MIB = 1 << 20
_FORMAT, _INDEX, _LARGEST_INDEX = 1, "index.json", 64 * MIB
_LONGEST_NAME, _LONGEST_STEP = 1000, 255
_NAMES = r"(part-[0-9]{4,}\.bin|index\.json)"
_OUTPUTS = re.compile(rf"{_NAMES}|\.{_NAMES}\.[a-z0-9_]+\.part")  # temporary files are named as by `atomic_file`
_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{name}{number}" for name in ("COM", "LPT") for number in range(1, 10))}

Entry = dict[str, Any]
"""The size and SHA-256 of a part, or the name, size and SHA-256 of a file."""


def pack_folder(source: PathLike, out: PathLike, limit: int = 15 * MIB, progress: Progress | None = None) -> int:
    """Write the files of a folder as parts of limited size, and their index last.

    Args:
        source: The folder, e.g. of a run, which may be at work in it.
        out: The folder to write, new or empty.
        limit: Maximum size of a part in bytes.
        progress: Called with the files done, their number, and the name of the next.

    Returns:
        The number of parts.

    Raises:
        FileError: `source` is not a folder, or has symbolic links, devices or names that not every system can store;
            `out` is not empty or lies in `source`.
        OSError: A file cannot be read or written; no part remains.
        ValueError: `limit` is less than 1.
    """
    source, out = Path(source), Path(out)
    if limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    names = _list_files(source)
    _check_names(source, names)
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise FileError(out, "lies in the folder to pack", "choose another folder")
    with hold_folder(out):
        if any(path.name == _INDEX or not _is_output(path) for path in out.iterdir()):
            raise FileError(out, "not empty", "choose another folder")
        _clear(out)  # left behind by a process that was killed before it wrote the index
        files: list[Entry] = []
        try:
            parts = _write_parts(out, _read_files(source, names, files, progress), limit)
            write_atomic(out / _INDEX, json.dumps({"format": _FORMAT, "files": files, "parts": parts}, indent=1) + "\n")
        except BaseException:
            _clear(out)
            raise
    return len(parts)


def _list_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, relative to it and with forward slashes, sorted.

    Raises:
        FileError: It is not a folder, or has entries that are neither files nor folders.
    """
    if not folder.is_dir():
        raise FileError(folder, "not a folder" if folder.exists() else "no such folder")
    names, folders = [], [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except FileNotFoundError:  # removed since by a run
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise FileError(entry.path, "a symbolic link or a device, not a file")
            elif not entry.name.endswith(".lock") and not (entry.name[0] == "." and entry.name.endswith(".part")):
                names.append(Path(entry.path).relative_to(folder).as_posix())
    return sorted(names)


def _read_pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(MIB):
            yield piece


def _read_files(folder: Path, names: list[str], files: list[Entry], progress: Progress | None) -> Iterator[bytes]:
    """Yield the contents of files piece by piece; appends the entry of each finished file to `files`."""
    for number, name in enumerate(names):
        if progress is not None:
            progress(number, len(names), name)
        digest, size = hashlib.sha256(), 0
        try:
            for piece in _read_pieces(folder / name):
                digest.update(piece)
                size += len(piece)
                yield piece
        except FileNotFoundError:  # removed since, as the checkpoint of a stream that is finished
            continue
        files.append({"name": name, "size": size, "sha256": digest.hexdigest()})
    if progress is not None:
        progress(len(names), len(names), "")


def _write_parts(out: Path, pieces: Iterator[bytes], limit: int) -> list[Entry]:
    parts: list[Entry] = []
    rest = next(pieces, b"")
    while rest:
        digest, size = hashlib.sha256(), 0
        with atomic_file(_name_part(out, len(parts))) as path, open(path, "wb") as file:
            while rest and size < limit:
                piece, rest = rest[: limit - size], rest[limit - size :]
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                rest = rest or next(pieces, b"")
        parts.append({"size": size, "sha256": digest.hexdigest()})
    return parts


def _name_part(folder: Path, number: int) -> Path:
    return folder / f"part-{number + 1:04}.bin"


def _is_output(path: Path) -> bool:
    """Whether a path is a file that `pack_folder` writes, judging by its name."""
    return _OUTPUTS.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _clear(folder: Path) -> None:
    for path in filter(_is_output, list(folder.iterdir())):
        path.unlink()


def unpack_folder(source: PathLike, folder: PathLike, progress: Progress | None = None) -> int:
    """Recreate a packed folder, whole or not at all, after checking every part.

    Args:
        source: The folder written by `pack_folder`.
        folder: The folder to create; if it exists and is not empty, it must have the same files.
        progress: Called with the parts checked and files written, their number, and the name of the next.

    Returns:
        The number of files.

    Raises:
        FileError: The index is not valid, a part is missing or damaged, or `folder` has other files.
        OSError: A file cannot be read or written.
    """
    source, folder = Path(source), Path(folder)
    report = progress or (lambda done, total, name: None)
    files, parts = _read_index(source / _INDEX)
    paths = [_name_part(source, number) for number in range(len(parts))]
    total = len(parts) + len(files)
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        report(number, total, path.name)
        _check_part(path, part)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileError(folder, "not a folder")
    if folder.exists() and any(folder.iterdir()):
        wanted = {file["name"]: file["sha256"] for file in files}
        if {name: _hash(folder / name) for name in _list_files(folder)} != wanted:
            raise FileError(folder, "has other files than the packed folder", "choose another folder")
        report(total, total, "")
        return len(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        pieces = (piece for path in paths for piece in _read_pieces(path))
        rest = b""
        for number, file in enumerate(files):
            report(len(parts) + number, total, file["name"])
            rest = _write_file(staging / file["name"], file, rest, pieces)
        staging.chmod(0o755)  # mkdtemp creates folders that only their owner can read
        if folder.exists():
            folder.rmdir()  # raises an error if it is no longer empty
        staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    report(total, total, "")
    return len(files)


def _read_index(path: Path) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of the files and of the parts.

    Raises:
        FileError: The index is missing or not valid.
    """
    index = read_json(path, _LARGEST_INDEX)
    if not is_table(index):
        raise FileError(path, "not the index of a packed folder")
    check_format(path, index.get("format"), _FORMAT)
    files, parts = index.get("files"), index.get("parts")
    sound = is_list_of(_is_entry)(files) and is_list_of(_is_entry)(parts)
    if not sound or not all(is_text(file.get("name")) for file in files):
        raise FileError(path, "not the index of a packed folder: `files` or `parts` is not valid")
    _check_names(path, [file["name"] for file in files])
    if sum(file["size"] for file in files) != sum(part["size"] for part in parts):
        raise FileError(path, "damaged: the sizes of its files and of its parts differ")
    return files, parts


def _is_entry(entry: Any) -> bool:
    return is_table(entry) and is_integer(entry.get("size"), 0) and is_text(entry.get("sha256"))


def _check_names(path: Path, names: list[str]) -> None:
    """Check that names stay inside a folder and denote different files on every system.

    Raises:
        FileError: They do not; the message names `path`.
    """
    known: dict[str, str] = {}  # folded name → file, or folder with a slash
    for name in names:
        steps = name.split("/")
        if len(name) > _LONGEST_NAME or not all(map(_is_portable, steps)):
            raise FileError(path, f"has a file name that not every system can store: {format_value(name)}")
        for depth in range(1, len(steps) + 1):
            here = "/".join(steps[:depth])
            spelled = f"{here}/" if depth < len(steps) else here
            other = known.setdefault(fold_name(here), spelled)
            if other != spelled:
                raise FileError(path, f"has names that collide on some systems: {format_value([other, spelled])}")
    if len(set(names)) < len(names):
        raise FileError(path, "has a file name twice")


def _is_portable(step: str) -> bool:
    """Whether a step of a path is a valid file name on every system."""
    return (
        step.isprintable()
        and not set(step) & {"\\", ":"}
        and step.rstrip(" .") == step != ""
        and step.partition(".")[0].upper() not in _DEVICES
        and len(step.encode()) <= _LONGEST_STEP
    )


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _read_pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _check_part(path: Path, part: Entry) -> None:
    """Raise a `FileError` unless a part is a regular file with the size and checksum of its entry."""
    if path.is_symlink():
        raise FileError(path, "a symbolic link, not a file")
    check_file(path)
    if path.stat().st_size != part["size"] or _hash(path) != part["sha256"]:
        raise FileError(path, "damaged: it does not match its size and checksum", "copy it again")


def _write_file(path: Path, file: Entry, rest: bytes, pieces: Iterator[bytes]) -> bytes:
    """Write a file from `rest` and the pieces that follow; returns the rest of the last piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), file["size"]
    with open(path, "xb") as target:
        while left and (rest := rest or next(pieces, b"")):
            piece, rest = rest[:left], rest[left:]
            target.write(piece)
            digest.update(piece)
            left -= len(piece)
    if digest.hexdigest() != file["sha256"]:
        raise FileError(file["name"], "damaged: it does not match its checksum", "pack it again")
    return rest
