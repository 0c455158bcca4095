"""Bodies of requests: read up to a limit, and taken apart if they have several parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from email.message import Message
from email.parser import BytesHeaderParser

from starlette.requests import ClientDisconnect, Request

from testtime.serve.refusal import Refusal

_SECONDS = 60.0  # for one body
_PARTS = 256  # of one body
_DISCARDED = 8 << 20  # bytes beyond the limit that are read before the connection is closed
_HEADER = 4096  # bytes of the header of a part


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        Refusal: It is empty, larger than `limit` bytes, or too slow.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refusal(415, "The body must not be compressed.")
    length = request.headers.get("content-length", "")
    too_large = Refusal(413, f"The body must have at most {limit:,} bytes.")
    if length.isdecimal() and int(length[:18]) > limit:
        await _discard(request)
        raise too_large
    parts: list[bytes] = []
    total = 0
    try:
        async with _deadline(_SECONDS):
            async for part in request.stream():
                total += len(part)
                if total > limit:
                    raise too_large
                parts.append(part)
    except Refusal:
        await _discard(request)
        raise
    except asyncio.TimeoutError:
        raise Refusal(408, f"The body took longer than {_SECONDS:.0f} seconds.") from None
    except ClientDisconnect:
        raise Refusal(400, "The body is incomplete.") from None
    content = b"".join(parts)
    if not content:
        raise Refusal(400, "The body is empty; it must be an image.")
    return content


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raise `TimeoutError` after some time, like `asyncio.timeout` of Python 3.11.

    Not `asyncio.wait_for`, whose task waits for all others: most bodies have already arrived.
    """
    task, expired = asyncio.current_task(), False
    assert task is not None

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if not expired:
            raise
        getattr(task, "uncancel", int)()  # Python 3.10 does not count them
        raise asyncio.TimeoutError from None
    finally:
        timer.cancel()


async def _discard(request: Request) -> None:
    """Read a little more of a body that is too large: a client that is still sending would not read the answer."""

    async def read() -> None:
        total = 0
        # Not `request.stream()`, which cannot be continued.
        while total < _DISCARDED and (message := await request.receive()).get("more_body"):
            total += len(message.get("body", b""))

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), 1.0)


def split_body(content_type: str, content: bytes) -> list[tuple[str, bytes]]:
    """Return content type and content of each part of a body; a body that is not multipart is its only part.

    Raises:
        Refusal: A multipart body is malformed.
    """
    message = Message()
    message["content-type"] = content_type.encode("ascii", "replace").decode()
    kind = message.get_content_type()
    if kind != "multipart/form-data":
        return [(kind if content_type else "", content)]
    boundary = message.get_param("boundary")
    if not isinstance(boundary, str) or not 1 <= len(boundary) <= 70:
        raise Refusal(400, "The multipart body has no valid boundary.")
    mark = b"--" + boundary.encode("ascii", "replace")
    # The first boundary need not follow a line break, the others do.
    pieces = (b"\r\n" + content).split(b"\r\n" + mark)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise Refusal(400, "The multipart body is incomplete or has no parts.")
    if len(pieces) - 2 > _PARTS:
        raise Refusal(413, f"The body must have at most {_PARTS} parts.")
    return [_split_part(piece) for piece in pieces[1:-1]]


def _split_part(piece: bytes) -> tuple[str, bytes]:
    head, found, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if not found or len(head) > _HEADER:
        raise Refusal(400, "A part of the multipart body has no valid header.")
    header = BytesHeaderParser().parsebytes(head + b"\r\n\r\n")
    return header.get_content_type() if "content-type" in header else "", content
