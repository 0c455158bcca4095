"""The process that decodes pictures for the service: python -m testtime.serve.decode_worker CHANNELS SIZE PIXELS.

Reads from standard input the format (4 bytes), the length (8 bytes) and the content of a picture; writes to standard
output "+" or "-", the length (8 bytes), and the pixels `(C, size, size)` or what is wrong.
"""

from __future__ import annotations

import io
import os
import struct
import sys
from typing import BinaryIO

from PIL import Image
from torch import Tensor

from testtime.data.pictures import fit_picture, to_gray
from testtime.data.sets import DataError

_HEAD = struct.Struct("<4sQ")


def decode(name: str, content: bytes, channels: int, size: int, pixels: int) -> Tensor:
    """Return a picture as the network takes it, uint8 `(C, size, size)`.

    Raises:
        DataError: It is animated, damaged or too large.
    """
    try:
        with Image.open(io.BytesIO(content), formats=[name]) as image:
            if image.width * image.height > pixels:
                raise DataError("picture", f"{image.width}×{image.height} pixels are above the limit of {pixels:,}")
            if getattr(image, "n_frames", 1) > 1:
                raise DataError("picture", "it has several frames")
    except DataError:
        raise
    except Exception:  # Pillow raises almost any exception for damaged files
        raise DataError("picture", f"it is not a readable {name} file") from None
    fitted = fit_picture(io.BytesIO(content), size, resize=size, limit=pixels)
    return to_gray(fitted) if channels == 1 else fitted


def main(channels: int, size: int, pixels: int, given: BinaryIO, made: BinaryIO) -> None:
    """Decode pictures until the input ends."""
    made.write(b"+")
    made.flush()
    while len(head := given.read(_HEAD.size)) == _HEAD.size:
        name, length = _HEAD.unpack(head)
        content = given.read(length)
        try:
            picture = decode(name.rstrip(b"\0").decode(), content, channels, size, pixels)
            status, answer = b"+", picture.contiguous().numpy().tobytes()
        except DataError as error:
            status, answer = b"-", error.fault.encode()
        made.write(struct.pack("<cQ", status, len(answer)) + answer)
        made.flush()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the service was killed
        os._exit(0)  # without flushing
