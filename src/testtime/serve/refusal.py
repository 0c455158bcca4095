"""What a client is told when its request is refused."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request that is refused.

    Args:
        status: The HTTP status.
        message: One sentence for the client; nothing about files or code.
        retry_after: Seconds after which to try again, if that may help.
        **details: Further fields of the answer.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None, **details: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after, self.details = status, message, retry_after, details
