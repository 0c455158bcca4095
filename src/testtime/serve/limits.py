"""Who may ask for what: tokens, names of streams, rates."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections import OrderedDict
from collections.abc import Callable

from testtime.serve.refusal import Refusal

STREAM_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""A pattern of the names of streams."""

_CLIENTS = 10_000  # remembered at once


def check_stream_id(name: str) -> str:
    """Return the name of a stream if it is valid.

    Raises:
        Refusal: It is not.
    """
    if not re.fullmatch(STREAM_ID, name):
        allowed = "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        raise Refusal(422, f"A stream's name must be {allowed}.")
    return name


def check_token(given: str | None, token: str | None) -> None:
    """Check the `Authorization` header of a request, in time that does not depend on the header.

    Raises:
        Refusal: A token is needed and another or none is given.
    """
    if token is None:
        return
    expected = hashlib.sha256(f"Bearer {token}".encode()).digest()
    if not hmac.compare_digest(hashlib.sha256((given or "").encode(errors="replace")).digest(), expected):
        raise Refusal(401, "This service needs a valid token: Authorization: Bearer TOKEN.")


class Rates:
    """How often each client asks: a bucket of tokens each, filled at a rate.

    Args:
        rate: Requests per second; None: any.
        clock: Returns the time in seconds.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client → tokens, when counted

    def count(self, client: str) -> None:
        """Count a request of a client.

        Raises:
            Refusal: There were too many.
        """
        if self._rate is None:
            return
        now, most = self._clock(), max(1.0, self._rate)
        tokens, then = self._buckets.pop(client, (most, now))
        tokens = min(most, tokens + (now - then) * self._rate)
        taken = tokens >= 1
        self._buckets[client] = (tokens - taken, now)
        while len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        if not taken:
            wait = max(1, round((1 - tokens) / self._rate + 0.5))
            raise Refusal(429, f"More than {self._rate:g} requests per second.", retry_after=wait)
