"""The process of the service: listens, and on SIGTERM or Ctrl-C finishes, saves and ends."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from testtime.serve.app import make_app
from testtime.serve.service import Service
from testtime.storage import error_text

_GRACE = 30  # seconds for requests in progress
_SWITCH = 0.0005  # seconds that another thread may keep that of the steps waiting


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Not uvicorn's, which raises the signal again at the end: the exit code would not be 0.
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit and number == signal.SIGINT:  # the second one
            self.force_exit = True
        self.should_exit = True
        self._stop()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, since asyncio sends without delay only then: otherwise the body of an answer waits 40 ms for its head.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {host}:{port} ({error_text(error)})") from None
    return listening


def run(service: Service, listening: socket.socket) -> bool:
    """Serve until a signal comes; returns whether all states were written."""
    app = make_app(service)
    sys.setswitchinterval(_SWITCH)

    def stop() -> None:
        service.phase = "stopping"
        service.events.close()

    config = uvicorn.Config(
        app,
        http="h11",  # httptools, if installed, answers malformed headers itself, and not with JSON
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
        lifespan="on",
    )
    with listening:
        _Server(config, stop).run(sockets=[listening])
    return app.state.whole
