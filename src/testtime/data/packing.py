"""Pack a test set into one memory-mapped file, so that it is decoded or generated only once.

A packed set is a folder with `images.u8`, all images as bytes `(N, C, H, W)`, and `index.json`: shape, labels, classes,
the source's fingerprint, a SHA-256 per block of images, and the unreadable pictures, which are black in the file and
left out when the set is opened. The index is written last and atomically, so a folder with an index is complete.
Interrupted packing can be resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime.data.folder import PictureSet
from testtime.data.paths import read_json, within
from testtime.data.sets import ArraySet, DataError, OnBad, TestSet, check_on_bad, leave_out
from testtime.progress import Progress, read_ahead
from testtime.storage import check_file, error_text, parse_json, write_atomic

log = logging.getLogger(__name__)

_FORMAT = 1
_THREADS = 8
_ALONE = 1 << 21  # bytes up to which one thread is faster than several


class PackedSet(ArraySet):
    """A memory-mapped packed set, with the name and fingerprint of its source.

    Args:
        folder: Its folder.
        index: Its index.
        images: uint8 `(N, C, H, W)`, including the unreadable ones.

    Attributes:
        unreadable: One line per picture that was unreadable when the set was packed.
    """

    def __init__(self, folder: Path, index: dict[str, Any], images: np.ndarray) -> None:
        bad = {number for number, _ in index["skipped"]}
        self._rows = torch.from_numpy(np.setdiff1d(np.arange(index["count"]), list(bad)).astype(np.int64))
        labels = None
        if index["labels"] is not None:
            labels = torch.tensor(index["labels"], dtype=torch.int64, device="cpu")[self._rows]
        super().__init__(index["name"], [images], labels, index["classes"], f"{index['origin']}, packed")
        self.folder = folder
        self._fingerprint = leave_out(index["fingerprint"], list(bad))
        self.unreadable = tuple(line for _, line in index["skipped"])
        self._skipped = (*index["notes"], *self.unreadable)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._skipped

    def fingerprint(self) -> str:
        """Return the source's fingerprint: the images are the same, so a run can be resumed with either."""
        return self._fingerprint

    def _read(self, numbers: Tensor) -> Tensor:
        rows, source = self._rows[numbers].tolist(), self.parts[0]
        out = np.empty((len(rows), *self.shape), dtype=np.uint8)

        def copy(first: int, last: int) -> None:
            for number in range(first, last):
                out[number] = source[rows[number]]

        # Several threads, because each image may wait for the disk.
        count = 1 if out.nbytes <= _ALONE else min(_THREADS, len(rows))
        bounds = [len(rows) * piece // count for piece in range(count + 1)]
        if count == 1:
            copy(0, len(rows))
        else:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(copy, bounds[:-1], bounds[1:]))
        return torch.from_numpy(out)


def pack(
    source: TestSet,
    folder: str | os.PathLike[str],
    block: int = 256,
    progress: Progress | None = None,
    on_bad: OnBad = "fail",
) -> PackedSet:
    """Write a set's images to one file, or open the file if it exists.

    Args:
        source: The set; sets with several right labels per sample cannot be packed.
        folder: The output folder. A packed set of another source, or of an older state of this one, is replaced.
        block: Images read and written at a time; the next block is decoded while one is written.
        progress: Called with the number of images done and their total; also while another process packs the same set.
        on_bad: What to do with unreadable pictures. After "fail" has stopped at one, packing can be resumed with
            "skip", or once the file is repaired.

    Returns:
        The packed set, memory-mapped.

    Raises:
        DataError: A picture of the source cannot be read, or the folder cannot be written.
    """
    if source.right is not None:
        raise ValueError(f"{source.name} has several right labels per sample and cannot be packed.")
    if block < 1:
        raise ValueError(f"`block` must be at least 1, got {block}.")
    check_on_bad(on_bad)
    folder = Path(folder)
    packed = find_packed(source, folder)  # before locking, which writes: a finished set may be in a read-only folder
    if packed is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(folder, f"cannot be created ({error_text(error)})") from None
        with _alone(folder, lambda: _report(folder, block, len(source), progress)):
            if find_packed(source, folder) is None:
                if (folder / "index.json").exists():
                    log.info("packing %s again", folder)
                header = {"format": _FORMAT, "fingerprint": source.fingerprint(), "block": block}
                try:
                    _write(source, folder, header, progress, on_bad)
                except OSError as error:
                    raise DataError(folder, f"cannot be written ({error_text(error)})") from None
        packed = open_packed(folder)
    if packed.unreadable and (on_bad == "fail" or not len(packed)):
        raise DataError(
            folder, f"was packed without {len(packed.unreadable)} files that cannot be read; {packed.unreadable[0]}"
        )
    return packed


def find_packed(source: TestSet, folder: str | os.PathLike[str]) -> PackedSet | None:
    """Return the packed form of a set, or None if the folder has no complete and current one."""
    folder = Path(folder)
    if not (folder / "index.json").is_file():
        return None
    try:
        return open_packed(folder) if _read_index(folder)["fingerprint"] == source.fingerprint() else None
    except DataError as error:
        log.warning("%s; not used", error)
        return None


def open_packed(folder: str | os.PathLike[str]) -> PackedSet:
    """Open a packed set; its source is not needed.

    Raises:
        DataError: It is incomplete or damaged, judging by file sizes; `find_damage` verifies the content.
    """
    folder = Path(folder)
    index = _read_index(folder)
    path = within(folder / "images.u8", folder)
    shape = (index["count"], *index["shape"])
    length = math.prod(shape)
    if not path.is_file() or path.stat().st_size != length:
        have = path.stat().st_size if path.is_file() else 0
        raise DataError(path, f"has {have:,} bytes, its index says {length:,}")
    try:
        images = np.memmap(path, dtype=np.uint8, mode="r", shape=shape) if length else np.zeros(shape, np.uint8)
        return PackedSet(folder, index, images)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(path, f"cannot be read ({error_text(error)})") from None


def find_damage(folder: str | os.PathLike[str]) -> list[str]:
    """Verify the checksums of a packed set.

    Returns:
        One line per damaged block; empty if there are none.
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


def _write(source: TestSet, folder: Path, header: dict[str, Any], progress: Progress | None, on_bad: OnBad) -> None:
    size, block = int(np.prod(source.shape)), header["block"]
    data, journal = folder / "images.part", folder / "blocks.part"
    lines = _resumable(data, journal, header, block * size)
    if on_bad == "fail":  # skipped pictures are tried again
        lines = lines[: next((number for number, line in enumerate(lines) if line[1]), len(lines))]
    start = len(lines) * block
    if lines:
        log.info("%s: resuming after %d images", folder, start)
    heading = [json.dumps(header), *(json.dumps(line) for line in lines)]
    write_atomic(journal, "".join(f"{line}\n" for line in heading))
    # Images are written before their line in the journal.
    with open(data, "r+b" if lines else "wb") as images, open(journal, "a") as notes:
        images.seek(start * size)
        images.truncate()
        for number, content, faults in read_ahead(_read_blocks(source, start, block, on_bad)):
            images.write(content)
            images.flush()
            lines.append([hashlib.sha256(content).hexdigest(), faults])
            notes.write(json.dumps(lines[-1]) + "\n")
            notes.flush()
            if progress is not None:
                progress(number, len(source), "")
        os.fsync(images.fileno())
    index = {
        **header,
        "name": source.name,
        "origin": source.origin,
        "count": len(source),
        "shape": list(source.shape),
        "classes": list(source.classes),
        "labels": None if source.labels is None else source.labels.tolist(),
        "blocks": [checksum for checksum, _ in lines],
        "skipped": [fault for _, faults in lines for fault in faults],
        "notes": list(source.skipped),
    }
    (folder / "index.json").unlink(missing_ok=True)  # so that an old index never describes new images
    os.replace(data, folder / "images.u8")
    write_atomic(folder / "index.json", json.dumps(index))
    journal.unlink()


def _read_blocks(
    source: TestSet, start: int, block: int, on_bad: OnBad
) -> Iterator[tuple[int, memoryview, list[tuple[int, str]]]]:
    """Yield the number of images done, the bytes of a block, and the faults of its unreadable pictures."""
    for first in range(start, len(source), block):
        numbers = torch.arange(first, min(first + block, len(source)), device="cpu")
        faults: list[tuple[int, str]] = []
        if on_bad == "skip" and isinstance(source, PictureSet):
            images, found = source.try_images(numbers)
            faults = [(number, source.format_fault(fault)) for number, fault in found.items()]
        else:
            images = source.images(numbers)
        yield first + len(numbers), images.contiguous().numpy().reshape(-1).data, faults


def _resumable(data: Path, journal: Path, header: dict[str, Any], block_bytes: int) -> list[list[Any]]:
    """Return the checksum and faults of each block that an interrupted packing of the same source completed."""
    try:
        check_file(journal)
        first, *found = journal.read_text().splitlines()
        if parse_json(first) != header:
            return []
        # Only full blocks are reused; a short last block or a partial line is redone.
        lines = [line for line in map(_read_line, found) if line is not None][: data.stat().st_size // block_bytes]
        with open(data, "rb") as images:
            images.seek(max(len(lines) - 1, 0) * block_bytes)
            last = hashlib.sha256(images.read(block_bytes)).hexdigest()
    except (OSError, ValueError):
        return []
    return lines if lines and lines[-1][0] == last else []


def _read_line(text: str) -> list[Any] | None:
    try:
        checksum, faults = parse_json(text)
    except (ValueError, TypeError):
        return None
    sound = isinstance(checksum, str) and isinstance(faults, list) and all(_is_fault(fault) for fault in faults)
    return [checksum, faults] if sound else None


def _is_fault(fault: Any) -> bool:
    """Whether a value is the index of an image with a description of its fault."""
    return isinstance(fault, list) and len(fault) == 2 and type(fault[0]) is int and isinstance(fault[1], str)


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
            and index["shape"][0] in (1, 3)
            and type(index["count"]) is int
            and index["count"] >= 0
            and len(index["blocks"]) == -(-index["count"] // index["block"])
            and all(isinstance(index[key], list) for key in ("classes", "notes", "blocks", "skipped"))
            and all(isinstance(name, str) for name in (*index["classes"], *index["notes"]))
            and all(_is_fault(fault) and 0 <= fault[0] < index["count"] for fault in index["skipped"])
            and (
                index["labels"] is None
                or (
                    len(index["labels"]) == index["count"]
                    and all(type(label) is int and 0 <= label < len(index["classes"]) for label in index["labels"])
                )
            )
        )
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise DataError(path, "not the index of a packed set")
    return index


@contextlib.contextmanager
def _alone(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Lock a folder for packing; while another process holds the lock, call `waiting` repeatedly."""
    try:
        import fcntl
    except ImportError:  # Windows, where concurrent packing only duplicates work
        yield
        return
    try:
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise DataError(folder, f"cannot be written ({error_text(error)})") from None
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(0.2)
            except OSError as error:  # some network file systems have no locks
                log.info("%s cannot be locked (%s)", folder, error)
                break
        yield


def _report(folder: Path, block: int, total: int, progress: Progress | None) -> None:
    """Report the progress of another process."""
    if progress is not None:
        with contextlib.suppress(OSError):
            done = (folder / "blocks.part").read_bytes().count(b"\n") - 1
            progress(min(max(done, 0) * block, total), total, "")
