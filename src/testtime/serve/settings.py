"""The settings of the service."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from testtime.checks import is_integer, is_number

OnCollapse = Literal["guard", "report", "reset", "rollback", "freeze"]


@dataclass(frozen=True)
class ServeSettings:
    """The settings of the service.

    Attributes:
        state: The state folder.
        slots: Maximum number of resident streams.
        group: Compute any number of streams as if there were so many, see `Streams(padded=…)`; None: as few as fit.
        max_streams: Maximum number of streams, resident or stored.
        ttl: Seconds after which an unused stream is deleted; None: never.
        checkpoint_every: How many acknowledged images of a stream a crash may lose; 0 writes before it answers.
        max_wait_ms: How long a request waits for others to share its step, in milliseconds.
        max_queue: Maximum number of waiting images.
        max_upload: Maximum size of a request's body, in bytes.
        max_pixels: Maximum number of pixels of an image.
        rate: Maximum number of requests per second of a client; None: any.
        client_streams: Maximum number of streams that one client may create; None: any.
        shadow: Answer with the original network; the adapted ones run along.
        on_collapse: What to do when a stream has collapsed, see collapse.py.
        image_memory: Whether methods whose state contains images are allowed.
        thumbnails: Whether the live page shows the last images of resident streams.
        versions: Number of former versions stored of each stream.
        version_every: Number of versions between two that are stored.
        host: The address to listen on.
        port: The port to listen on; 0 lets the system choose.
        token: What clients have to present; None: nothing.
    """

    state: Path
    slots: int = 64
    group: int | None = None
    max_streams: int = 10_000
    ttl: float | None = None
    checkpoint_every: int = 16
    max_wait_ms: float = 2.0
    max_queue: int = 1024
    max_upload: int = 16 << 20
    max_pixels: int = 50_000_000
    rate: float | None = None
    client_streams: int | None = None
    shadow: bool = False
    on_collapse: OnCollapse = "guard"
    image_memory: bool = True
    thumbnails: bool = False
    versions: int = 4
    version_every: int = 100
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        least = {"slots": 1, "group": 1, "max_streams": 1, "checkpoint_every": 0, "max_queue": 1, "max_upload": 1}
        for name, low in {**least, "max_pixels": 1, "client_streams": 1, "versions": 0, "version_every": 1}.items():
            value = getattr(self, name)
            if value is None and name in ("group", "client_streams"):
                continue
            if not is_integer(value, low):
                raise ValueError(f"`{name}` must be an integer of at least {low}, got {value!r}.")
        for name, optional in (("ttl", True), ("rate", True), ("max_wait_ms", False)):
            value = getattr(self, name)
            if not (optional and value is None) and not (is_number(value) and value >= 0 and (value or not optional)):
                raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
        if self.on_collapse not in get_args(OnCollapse):
            raise ValueError(f"`on_collapse` must be one of {', '.join(get_args(OnCollapse))}, got {self.on_collapse}.")
        if not is_integer(self.port, 0, 65535):
            raise ValueError(f"`port` must be from 0 to 65535, got {self.port!r}.")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and len(self.token) >= 16):
            raise ValueError("`token` must be at least 16 printable ASCII characters.")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(f"`host` {self.host} can be reached from other machines, which needs a token.")


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
