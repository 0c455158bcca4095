"""Brings every request of a stream to the replica that owns the stream."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import threading
import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from testtime.serve.bodies import read_body
from testtime.serve.lease import Lease, LeaseLost
from testtime.serve.limits import STREAM_ID
from testtime.serve.middleware import is_forwarded, name_client
from testtime.serve.peers import MOVED, Call, Peers, Reply
from testtime.serve.refusal import Refusal
from testtime.serve.service import Service
from testtime.serve.waiting import Job

_STREAM = re.compile(f"/v1/streams/({STREAM_ID})(/[a-z]+)?")
_LONGER = 5.0  # seconds to wait for a stream, beyond those after which its owner is taken to be lost
_PAUSE = 0.05  # seconds between attempts
_LOOK = 0.5  # seconds between looks at whether the owner lives
_LOCKS = 64


class Router:
    """Middleware that answers requests of streams which this replica owns or can own, and sends others to the owner.

    Args:
        app: The application.
        service: The service of this replica.
        peers: The replicas.
    """

    def __init__(self, app: ASGIApp, service: Service, peers: Peers) -> None:
        leases = service.engine.residents.leases
        assert leases is not None
        self._app, self._service, self._peers, self._leases = app, service, peers, leases
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _STREAM.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            return await self._app(scope, receive, send)
        if is_forwarded(scope) and self._service.phase != "ready":
            raise LeaseLost  # soon
        self._service.check_ready()
        predicts, body = (scope["method"], match[2]) == ("POST", "/predict"), b""
        if predicts:
            body = await read_body(Request(scope, receive), self._service.settings.max_upload)
        try:
            await self._route(scope, receive, send, match[1], body, predicts)
        finally:
            if predicts and match[1] not in self._service.engine.residents.records and match[1] in self._leases.held:
                with contextlib.suppress(Refusal):
                    self._submit(match[1], self._give_up)

    async def _route(self, scope: Scope, receive: Receive, send: Send, stream: str, body: bytes, creates: bool) -> None:
        deadline = time.monotonic() + self._peers.beats.ttl + _LONGER
        while True:
            lease = await self._peers.run(self._find_lease, stream, creates)
            if is_forwarded(scope) and (lease is None or lease.owner != self._leases.owner):
                raise LeaseLost
            if lease is None or lease.owner == self._leases.owner:
                if await self._answer(scope, receive, send, body):
                    return
                with contextlib.suppress(Refusal):
                    self._submit(stream, self._forget_lost)
            else:
                reply = await self._forward(lease.owner, scope, body)
                if reply is not None:
                    return await _send_reply(reply, send)
            if time.monotonic() > deadline or is_forwarded(scope):
                raise LeaseLost
            await asyncio.sleep(_PAUSE)

    def _find_lease(self, stream: str, creates: bool) -> Lease | None:
        """Return the lease of a stream, after taking it if nobody has it; None if there is no such stream."""
        try:
            lease = self._leases.find(stream)
        except OSError:
            raise LeaseLost from None
        if lease is not None and self._is_current(stream, lease):
            return lease
        if not creates and self._service.engine.residents.writer.folder.find_record(stream) is None:
            return None
        with self._locks[hash(stream) % _LOCKS]:
            self._service.check_ready()
            lease = self._leases.acquire(stream)
            if not self._is_current(stream, lease):
                try:
                    self._submit(stream, lambda name: self._service.engine.residents.adopt(name, lease.fence)).result()
                except BaseException:
                    self._leases.release(stream, lease.fence)
                    raise
        return lease

    def _is_current(self, stream: str, lease: Lease) -> bool:
        """Return whether the owner of a stream can be asked."""
        if lease.owner == self._leases.owner:
            return self._leases.held.get(stream) == lease.fence
        return self._peers.beats.is_alive(lease.owner)

    def _submit(self, stream: str, act: Any) -> Any:
        """Let the batcher's thread do something, after all that it has to do for a stream."""
        return self._service.batcher.submit(
            Job(stream, action=lambda engine: (act(stream), None), resident=False, leased=False)
        )

    def _forget_lost(self, stream: str) -> None:
        fence = self._leases.held.get(stream)
        if fence is not None and not self._leases.is_held(stream, fence):
            self._service.engine.residents.forget(stream)

    def _give_up(self, stream: str) -> None:
        """Release the lease of a stream that was not created after all."""
        fence = self._leases.held.get(stream)
        if fence is not None and stream not in self._service.engine.residents.records:
            self._service.engine.residents.forget(stream)
            self._leases.release(stream, fence)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> bool:
        """Answer a request here; returns False, with nothing sent, if the stream has another owner now."""
        moved, replayed, inner = False, False, dict(scope)

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def watch(message: Message) -> None:
            nonlocal moved
            if message["type"] == "http.response.start":
                moved = any(name == MOVED.encode() for name, _ in message["headers"])
            if not moved:
                await send(message)

        await self._app(inner, replay, watch)
        scope["route"] = inner.get("route")
        return not moved

    async def _forward(self, owner: str, scope: Scope, body: bytes) -> Reply | None:
        """Return the answer of a stream's owner; None if it did not get the request, or the request may be repeated."""
        query = scope["query_string"].decode("latin-1")
        target = scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode("latin-1")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        given = scope["method"], f"{target}?{query}" if query else target, headers, body, name_client(scope)
        repeatable = scope["method"] == "GET" or re.search(r"(^|&)sequence=", query) is not None
        try:
            call = self._peers.call(owner)
            await self._peers.run_call(call.connect)
        except OSError:
            return None
        try:
            reply = await self._wait(owner, call, given)
        except (OSError, http.client.HTTPException):
            if repeatable:
                return None
            message = "The replica of this stream was lost; whether it has learned from this request is unknown."
            raise Refusal(503, message, retry_after=1) from None
        return None if reply.moved else reply

    async def _wait(self, owner: str, call: Call, given: tuple[Any, ...]) -> Reply:
        """Wait for an answer as long as the owner lives; raises like `Call.send`."""
        task = asyncio.ensure_future(self._peers.run_call(call.send, *given))
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK))[0]:
                if not await self._peers.run(self._peers.beats.is_alive, owner):
                    raise ConnectionError("no sign of life")
            return task.result()
        finally:
            if not task.done():
                call.abort()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _send_reply(reply: Reply, send: Send) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers]
    headers.append((b"content-length", str(len(reply.body)).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
