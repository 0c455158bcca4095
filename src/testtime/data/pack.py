"""Pack a test set into one memory-mapped file, so that decoding or corrupting it is paid for once.

A packed set is a folder with `images.u8`, all images one after the other as bytes `(N, C, H, W)`, and `index.json`:
shape, labels, classes, the source's fingerprint and a SHA-256 for each block of images. The index is written last and
whole, so a folder with an index is a complete set. Packing that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testtime.data.places import read_json, within
from testtime.data.sets import ArraySet, DataError, TestSet
from testtime.storage import write_whole

log = logging.getLogger(__name__)

_FORMAT = 1


def pack(
    source: TestSet,
    folder: str | os.PathLike[str],
    block: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> ArraySet:
    """Write a set's images into one file, or open the file where that has been done.

    Args:
        source: The set; one with several right labels a sample cannot be packed.
        folder: Where to put it. What is packed there of another source, or of an older state of this one, is replaced.
        block: Images read and written at a time.
        progress: Told how many of how many images are done.

    Returns:
        The packed set, memory-mapped.

    Raises:
        DataError: A picture of the source cannot be read.
    """
    if source.right is not None:
        raise ValueError(f"{source.name} has several right labels a sample and cannot be packed.")
    if block < 1:
        raise ValueError(f"`block` must be at least 1, got {block}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = source.fingerprint()
    with _alone(folder):
        if (folder / "index.json").exists():
            try:
                if _read_index(folder)["fingerprint"] == fingerprint:
                    return open_packed(folder)
                log.info("%s holds another set and is packed anew", folder)
            except DataError as error:
                log.warning("%s; packed anew", error)
        header = {"format": _FORMAT, "fingerprint": fingerprint, "block": block}
        _write(source, folder, header, progress)
    return open_packed(folder)


def open_packed(folder: str | os.PathLike[str]) -> ArraySet:
    """Open a packed set; its source need not be there any more.

    Raises:
        DataError: It is incomplete or damaged, as far as lengths show; `find_damage` reads everything.
    """
    folder = Path(folder)
    index = _read_index(folder)
    path = within(folder / "images.u8", folder)
    shape = (index["count"], *index["shape"])
    length = int(np.prod(shape, dtype=np.int64))
    if not path.is_file() or path.stat().st_size != length:
        have = path.stat().st_size if path.is_file() else 0
        raise DataError(path, f"has {have:,} bytes, its index says {length:,}")
    images = np.memmap(path, dtype=np.uint8, mode="r", shape=shape) if length else np.zeros(shape, np.uint8)
    labels = None if index["labels"] is None else torch.tensor(index["labels"], dtype=torch.int64)
    return ArraySet(index["name"], [images], labels, index["classes"], f"{index['origin']}, packed")


def find_damage(folder: str | os.PathLike[str]) -> list[str]:
    """Read a packed set through and compare it with its checksums.

    Returns:
        One line for each damaged block; empty when all is well.
    """
    folder = Path(folder)
    try:
        images = open_packed(folder).parts[0]
        index = _read_index(folder)
    except DataError as error:
        return [str(error)]
    faults = []
    for number, expected in enumerate(index["blocks"]):
        first = number * index["block"]
        images_here = images[first : first + index["block"]]
        if hashlib.sha256(np.ascontiguousarray(images_here).data).hexdigest() != expected:
            faults.append(f"{folder / 'images.u8'}: images {first} to {first + len(images_here) - 1} are damaged")
    return faults


def _write(source: TestSet, folder: Path, header: dict[str, Any], progress: Callable[[int, int], None] | None) -> None:
    size, block = int(np.prod(source.shape)), header["block"]
    data, journal = folder / "images.part", folder / "blocks.part"
    blocks = _resumable(data, journal, header, block * size)
    # Images go to disk before the journal line that vouches for them.
    with open(data, "r+b" if blocks else "wb") as images, open(journal, "r+" if blocks else "w") as lines:
        images.seek(len(blocks) * block * size)
        images.truncate()
        if blocks:
            lines.seek(0, os.SEEK_END)
            log.info("%s: packing goes on after %d images", folder, len(blocks) * block)
        else:
            lines.write(json.dumps(header) + "\n")
        for numbers, chunk, _ in source.chunks(block, slice(len(blocks) * block, None)):
            content = chunk.numpy().tobytes()
            images.write(content)
            images.flush()
            blocks.append(hashlib.sha256(content).hexdigest())
            lines.write(blocks[-1] + "\n")
            lines.flush()
            if progress is not None:
                progress(int(numbers[-1]) + 1, len(source))
        os.fsync(images.fileno())
    index = {
        **header,
        "name": source.name,
        "origin": source.origin,
        "count": len(source),
        "shape": list(source.shape),
        "classes": list(source.classes),
        "labels": None if source.labels is None else source.labels.tolist(),
        "blocks": blocks,
    }
    (folder / "index.json").unlink(missing_ok=True)  # between the two renames there must be no index of old images
    os.replace(data, folder / "images.u8")
    write_whole(folder / "index.json", json.dumps(index))
    journal.unlink()


def _resumable(data: Path, journal: Path, header: dict[str, Any], block_bytes: int) -> list[str]:
    """The checksums of the blocks that an interrupted packing of the same source has written whole."""
    try:
        first, *blocks = journal.read_text().splitlines()
        if json.loads(first) != header:
            return []
        blocks = [line for line in blocks if len(line) == 64][: data.stat().st_size // block_bytes]
        # Only full blocks are taken up again, so a short last one is simply redone.
        with open(data, "rb") as images:
            images.seek(max(len(blocks) - 1, 0) * block_bytes)
            last = hashlib.sha256(images.read(block_bytes)).hexdigest()
    except (OSError, ValueError):
        return []
    if not blocks or blocks[-1] != last:
        return []
    _keep_lines(journal, 1 + len(blocks))
    return blocks


def _keep_lines(path: Path, count: int) -> None:
    """Cut a text file after its first `count` lines."""
    write_whole(path, "".join(line + "\n" for line in path.read_text().splitlines()[:count]))


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    index = read_json(path, folder)
    try:
        sound = (
            index["format"] == _FORMAT
            and isinstance(index["fingerprint"], str)
            and isinstance(index["name"], str)
            and isinstance(index["origin"], str)
            and all(type(number) is int and number > 0 for number in (*index["shape"], index["block"]))
            and len(index["shape"]) == 3
            and type(index["count"]) is int
            and len(index["blocks"]) == -(-index["count"] // index["block"])
            and all(isinstance(name, str) for name in index["classes"])
            and (
                index["labels"] is None
                or (
                    len(index["labels"]) == index["count"]
                    and all(type(label) is int and 0 <= label < len(index["classes"]) for label in index["labels"])
                )
            )
        )
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise DataError(path, "not the index of a packed set")
    return index


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time pack into a folder; the others wait, then find it done."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock; there two packers would only waste work
        yield
        return
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
