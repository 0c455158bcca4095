"""What every request passes first: origin, token, rate; and what is counted of every answer."""

from __future__ import annotations

import json
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from testtime.serve.limits import check_token
from testtime.serve.refusal import Refusal
from testtime.serve.service import Service
from testtime.serve.settings import is_loopback

_OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")  # no token needed: nothing in them is of a stream

FORWARDED = "testtime.forwarded"
"""In the scope of a request that another replica has checked and sent on."""

_UNREAD = (401, 403, 408, 413, 415)  # the body may not have been read, and be endless


class Middleware:
    """Middleware that refuses requests which may not be answered, and counts all.

    Args:
        app: The application.
        service: The service.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not is_forwarded(scope):
                self._check(scope)
            await self._app(scope, receive, note)
        except Refusal as refusal:
            await format_refusal(refusal)(scope, receive, note)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            metrics = self._service.metrics
            metrics.count("testtime_requests_total", route=path, status=str(status))
            if path.endswith("/predict"):
                metrics.observe("testtime_stage_seconds", time.perf_counter() - begin, stage="request")

    def _check(self, scope: Scope) -> None:
        headers, token = Headers(scope=scope), self._service.settings.token
        check_origin(headers.get("host", ""), headers.get("origin"), token)
        if scope["path"] not in _OPEN:
            check_token(headers.get("authorization"), token)
            self._service.rates.count(name_client(scope))


def check_origin(host: str, origin: str | None, token: str | None) -> None:
    """Refuse requests that a web page of another site makes a browser send.

    Args:
        host: The `Host` header.
        origin: The `Origin` header, if there is one.
        token: The token of the service, if it has one.

    Raises:
        Refusal: The request is refused.
    """
    if origin is not None and origin.split("://")[-1] != host:
        raise Refusal(403, "Requests from pages of other sites are refused.")
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    if token is None and not is_loopback(name):
        raise Refusal(403, "Without a token, the service answers to the name of this machine only.")


def name_client(scope: Scope) -> str:
    """Return what a client is known by: its address."""
    client = scope.get("client")
    return client[0] if client else "?"


def is_forwarded(scope: Scope) -> bool:
    """Return whether a request comes from another replica."""
    return bool(scope.get(FORWARDED))


def format_refusal(refusal: Refusal) -> Response:
    """Return the answer to a refused request."""
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.details.get("moved"):
        headers["X-Testtime-Moved"] = "1"
    if refusal.status in _UNREAD:
        headers["Connection"] = "close"
    return format_json({"error": refusal.message} | refusal.details, headers, refusal.status)


def format_json(content: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """Return JSON as an answer."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, status, headers, media_type="application/json")
