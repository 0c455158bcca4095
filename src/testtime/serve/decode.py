"""Bodies of requests to images: arrays here, pictures in processes of their own.

Whatever a picture does to its decoder, it does to a process that can be killed; see decode_worker.py.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from testtime.checks import is_integer
from testtime.serve.refusal import Refusal

PICTURES: Final = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
"""Content types of pictures, and Pillow's names of them."""

ARRAY = "application/x-npy"
_MAGIC = {"PNG": (0, b"\x89PNG\r\n\x1a\n"), "JPEG": (0, b"\xff\xd8\xff"), "WEBP": (8, b"WEBP")}
_IMAGES = 256  # of one request
_SECONDS = 10.0  # for one picture
_START = 120.0  # seconds for a worker to start
# numpy reads headers with `ast`, which up to Python 3.11.8 and 3.12.2 may fail if two threads use it (cpython 106905).
_PARSING = threading.Lock()


class Decoder:
    """Decodes bodies to images of one shape.

    Args:
        channels: Number of channels, 1 or 3.
        size: Height and width.
        max_pixels: Maximum number of pixels of a picture.
        workers: Number of processes; None: by the number of cores.
        seconds: Maximum time for one picture.
    """

    def __init__(
        self, channels: int, size: int, max_pixels: int, workers: int | None = None, seconds: float = _SECONDS
    ) -> None:
        self.shape, self._seconds = (channels, size, size), seconds
        self._command = [sys.executable, "-m", "testtime.serve.decode_worker", *map(str, (channels, size, max_pixels))]
        self.workers = workers or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        for _ in range(self.workers):
            self._idle.put(None)  # started when first needed

    def start(self) -> None:
        """Start one process, so that the first picture does not wait for it."""
        with self._borrow():
            pass

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._all):
            worker.kill()

    def decode(self, kind: str, content: bytes) -> list[Tensor]:
        """Return the images of a body, float in [0, 1], `(C, H, W)` each.

        Args:
            kind: The content type.
            content: The body.

        Raises:
            Refusal: It is not an image, not of this kind, too large or of another shape.
        """
        if kind == ARRAY:
            return self._decode_array(content)
        if kind not in PICTURES:
            listed = ", ".join([*PICTURES, ARRAY, "multipart/form-data"])
            raise Refusal(415, f"The content type must be one of {listed}.")
        name = PICTURES[kind]
        start, magic = _MAGIC[name]
        if content[start : start + len(magic)] != magic:
            raise Refusal(400, f"The body is not a {name} picture, as its content type says.")
        with self._borrow() as worker:
            pixels = worker.decode(name, content, self._seconds)
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(self.shape)
        return [image.float() / 255]

    def _decode_array(self, content: bytes) -> list[Tensor]:
        array = _parse_array(content)
        images = array[None] if array.ndim == 3 else array
        if images.shape[1:] != self.shape or len(images) > _IMAGES:
            wanted = "×".join(map(str, self.shape))
            raise Refusal(422, f"The array must be an image {wanted}, or up to {_IMAGES} of them.")
        values = images.astype(np.float32)
        if images.dtype == np.uint8:
            values /= np.float32(255)
        elif not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise Refusal(422, "Floats must be in [0, 1].")
        return list(torch.from_numpy(np.ascontiguousarray(values)).unbind())

    @contextlib.contextmanager
    def _borrow(self) -> Iterator[_Worker]:
        worker = self._idle.get()
        try:
            if worker is None or not worker.is_alive:
                if worker is not None:
                    worker.kill()
                    self._all.discard(worker)
                worker = _Worker(self._command)
                self._all.add(worker)
            yield worker
        finally:
            self._idle.put(worker)


def _parse_array(content: bytes) -> np.ndarray:
    """Return the array of a file of numpy's, whose size is checked before anything is allocated."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with _PARSING:
            shape, is_fortran, dtype = read(stream, max_header_size=1000)
    except Exception:  # whatever numpy raises for malformed headers
        raise Refusal(400, "The body is not an array as numpy.save writes it.") from None
    if dtype not in (np.uint8, np.float16, np.float32, np.float64):
        raise Refusal(422, "The array must be uint8, or floats in [0, 1].")
    if len(shape) not in (3, 4) or not all(is_integer(length, 1) for length in shape):
        raise Refusal(400, "The array must have 3 or 4 dimensions, each at least 1.")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise Refusal(400, "The array has another size than its header says.")
    array = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")


class _Worker:
    """A process that decodes pictures, one at a time."""

    def __init__(self, command: list[str]) -> None:
        # In a session of its own: Ctrl-C in a terminal is for the service, which finishes its requests first.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        with self._deadline(_START):
            if self._read(1) != b"+":
                raise Refusal(503, "The decoder of pictures does not start.", retry_after=10)

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def decode(self, name: str, content: bytes, seconds: float) -> bytes:
        """Return the pixels of a picture.

        Raises:
            Refusal: It cannot be decoded.
        """
        assert self._process.stdin is not None
        with self._deadline(seconds):
            try:
                self._write(struct.pack("<4sQ", name.encode(), len(content)) + content)
                status, length = struct.unpack("<cQ", self._read(9))
                answer = self._read(length)
            except (OSError, ValueError, struct.error):
                self.kill()
                raise Refusal(400, "The picture could not be decoded: its decoder crashed or took too long.") from None
        if status == b"-":
            raise Refusal(400, f"The picture cannot be used: {answer.decode(errors='replace')}.")
        return answer

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(content)
        while rest:
            rest = rest[self._process.stdin.write(rest) :]

    def _read(self, count: int) -> bytes:
        """Read exactly so many bytes; fewer at the end."""
        assert self._process.stdout is not None
        parts = []
        while count > 0 and (part := self._process.stdout.read(count)):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    @contextlib.contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        """Kill the process if it takes longer, which ends any waiting for it."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
