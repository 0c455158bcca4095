"""The other replicas of a service: requests to them, and what all of them know together."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from testtime.serve.lease import Beats
from testtime.serve.service import Service
from testtime.serve.stored import Stored

SECRET, CLIENT, MOVED = "x-testtime-secret", "x-testtime-client", "x-testtime-moved"
"""Headers between replicas: who may ask, for whom; and that a stream has another owner."""

_CALLS, _WORK = 256, 16  # threads at most
_SECONDS = 60.0  # for one request
_SHORT = 3.0  # seconds for what all replicas are asked
_ROWS = 10_000  # streams of one answer
_BACKLOG = 1000  # events of a watcher who reads too slowly
_LOOK = 2.0  # seconds between looks for new replicas
_OWN_HEADERS = ("connection", "transfer-encoding", "content-length", "date", "server", "host", SECRET, CLIENT)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reply:
    """The answer of another replica.

    Attributes:
        status: The HTTP status.
        headers: The headers that belong to the content.
        body: The content.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def moved(self) -> bool:
        """Whether the replica is not the stream's owner."""
        return any(name == MOVED for name, _ in self.headers)


class Call:
    """A request to another replica, which can be given up.

    Args:
        address: Where the replica listens.
        secret: What replicas know each other by.
        seconds: How long to wait for the answer.
    """

    def __init__(self, address: str, secret: str, seconds: float = _SECONDS) -> None:
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
        self._secret = secret

    def connect(self) -> None:
        """Connect; a replica to which this fails has not got the request.

        Raises:
            OSError: It does not listen.
        """
        self._connection.connect()

    def send(
        self, method: str, target: str, headers: Iterable[tuple[str, str]] = (), body: bytes = b"", client: str = "?"
    ) -> Reply:
        """Send a request and return the answer.

        Raises:
            OSError: The connection was lost.
            http.client.HTTPException: The same, or there is no valid answer.
        """
        with contextlib.closing(self._connection):
            response = self._open(method, target, headers, body, client)
            content = response.read()
        pairs = ((name.lower(), value) for name, value in response.getheaders())
        return Reply(response.status, tuple(pair for pair in pairs if pair[0] not in _OWN_HEADERS), content)

    def read_lines(self, target: str) -> Iterable[str]:
        """Yield the lines of an answer that does not end; raises like `send`."""
        with contextlib.closing(self._connection):
            response = self._open("GET", target, (), b"", "?")
            while line := response.readline():
                yield line.decode()

    def abort(self) -> None:
        """Give the request up, from another thread."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _open(
        self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes, client: str
    ) -> http.client.HTTPResponse:
        sent = {name: value for name, value in headers if name.lower() not in _OWN_HEADERS}
        self._connection.request(method, target, body or None, {**sent, SECRET: self._secret, CLIENT: client})
        return self._connection.getresponse()


class Peers:
    """All replicas of a service, as one of them sees them.

    Args:
        beats: Their signs of life.
        secret: What they know each other by.
    """

    def __init__(self, beats: Beats, secret: str) -> None:
        self.beats, self._secret = beats, secret
        # Apart, or all replicas could wait for each other: to answer a request of another one takes a thread, too.
        self._calls = ThreadPoolExecutor(_CALLS, thread_name_prefix="testtime-calls")
        self._work = ThreadPoolExecutor(_WORK, thread_name_prefix="testtime-peers")

    async def run(self, work: Callable[..., Result], *given: Any) -> Result:
        """Do something in a thread that waits for this process or the disk only."""
        return await asyncio.get_running_loop().run_in_executor(self._work, work, *given)

    async def run_call(self, work: Callable[..., Result], *given: Any) -> Result:
        """Do something in a thread that waits for another replica."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, work, *given)

    def call(self, name: str, seconds: float = _SECONDS) -> Call:
        """Return a request to be sent to a replica.

        Raises:
            ConnectionError: It is not there any more.
        """
        address = self.beats.find_address(name)
        if address is None:
            raise ConnectionError(f"no replica {name}")
        return Call(address, self._secret, seconds)

    async def ask_all(self, target: str) -> dict[str, bytes]:
        """Return the answers of all replicas, by name; of those that answer in time."""

        def ask(name: str) -> bytes | None:
            try:
                reply = self.call(name, _SHORT).send("GET", target)
            except (OSError, http.client.HTTPException):
                return None
            return reply.body if reply.status == 200 else None

        names = list(await self.run(self.beats.list_alive))
        bodies = await asyncio.gather(*(self.run_call(ask, name) for name in names))
        return {name: body for name, body in zip(names, bodies, strict=True) if body is not None}

    async def list_streams(self, service: Service, stored: Stored, limit: int, offset: int) -> dict[str, Any]:
        """Return the streams of all replicas, and those that are only stored, the ones used last first."""
        rows: dict[str, dict[str, Any]] = {}
        for record in await self.run(stored.list_records):
            rows[record.id] = service.describe_stream(record) | {"resident": False}
        replies = await self.ask_all(f"/v1/streams?limit={_ROWS}")
        live = [row for body in replies.values() for row in json.loads(body)["streams"]]
        for row in sorted(live, key=lambda row: row["version"]):
            rows[row["id"]] = row
        ordered = sorted(rows.values(), key=lambda row: -row["last_seen"])
        return {"service": service.about, "total": len(rows), "streams": ordered[offset : offset + limit]}

    async def watch(self, service: Service) -> AsyncIterator[str]:
        """Yield the events of all replicas as server-sent events, until the service stops."""
        loop, waiting = asyncio.get_running_loop(), asyncio.Queue[str](_BACKLOG)
        calls: dict[str, Call] = {}

        def put(block: str) -> None:
            with contextlib.suppress(asyncio.QueueFull):
                waiting.put_nowait(block)

        def read(name: str, call: Call) -> None:
            lines: list[str] = []
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, RuntimeError):
                for line in call.read_lines("/v1/events"):
                    lines.append(line)
                    if line == "\n":
                        loop.call_soon_threadsafe(put, "".join(lines))
                        lines.clear()
            calls.pop(name, None)

        try:
            while service.phase == "ready":
                for name in await self.run(self.beats.list_alive):
                    if name not in calls:
                        with contextlib.suppress(ConnectionError):
                            calls[name] = self.call(name)
                            threading.Thread(target=read, args=(name, calls[name]), daemon=True).start()
                with contextlib.suppress(asyncio.TimeoutError):
                    yield await asyncio.wait_for(waiting.get(), _LOOK)
                    while not waiting.empty():
                        yield waiting.get_nowait()
        finally:
            for call in list(calls.values()):
                call.abort()

    async def merge_metrics(self) -> str:
        """Return the metrics of all replicas, with the name of the replica as a label."""
        return merge_metrics({name: body.decode() for name, body in (await self.ask_all("/metrics")).items()})


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Join metrics in the text format of Prometheus.

    Args:
        texts: The metrics, by the value of the label `replica` that they get.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        metric = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, metric, *_ = line.split(" ", 3)
                known = heads.setdefault(metric, [])
                if not any(one.startswith(f"# {kind} ") for one in known):
                    known.append(line)
                continue
            name, value = line.rsplit(" ", 1)
            name, _, labels = name.partition("{")
            rest = f",{labels}" if labels else "}"
            samples.setdefault(metric, []).append(f'{name}{{replica="{replica}"{rest} {value}')
    return "\n".join([line for metric in heads for line in (*heads[metric], *samples.get(metric, ()))] + [""])
