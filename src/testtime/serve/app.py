"""The routes of the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from torch import Tensor

from testtime.serve import schemas
from testtime.serve.bodies import read_body, split_body
from testtime.serve.decode import ARRAY
from testtime.serve.limits import check_stream_id
from testtime.serve.middleware import Middleware, format_json, format_refusal, is_forwarded, name_client
from testtime.serve.page import load_page
from testtime.serve.peers import Peers
from testtime.serve.refusal import Refusal
from testtime.serve.router import Router
from testtime.serve.service import Service
from testtime.serve.stored import Stored
from testtime.serve.thumbnails import describe_thumbnails
from testtime.serve.waiting import Action, Job

log = logging.getLogger(__name__)

_LARGEST = 2**53 - 1  # integers that every JSON reader reads exactly
_SMALL = 1 << 16  # bytes of an array

Sequence = Annotated[
    int | None,
    Query(ge=1, le=_LARGEST, description="Number of the request within its stream, from 1; makes it safe to repeat."),
]
Version = Annotated[int | None, Query(ge=0, le=_LARGEST, description="The version; by default the newest stored one.")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="Maximum number of streams.")]
After = Annotated[int, Query(ge=0, le=_LARGEST, description="Only images after this one.")]
Offset = Annotated[int, Query(ge=0, le=_LARGEST, description="Number of streams to skip.")]


def make_app(service: Service, peers: Peers | None = None) -> FastAPI:
    """Return the application of a service, which it starts and stops.

    Args:
        service: The service.
        peers: The replicas of the service, if there are several; then somebody else starts and stops them.
    """

    @contextlib.asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.events.close()
        app.state.whole = await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="testtime",
        version=service.about["version"],
        description="Networks that adapt to streams of images, one network a stream.",
        lifespan=live,
        docs_url=None,
        redoc_url=None,
    )
    app.state.whole = True
    app.include_router(_make_stream_routes(service, peers))
    app.include_router(_make_service_routes(service, peers))
    _add_errors(app)
    if peers is not None:
        app.add_middleware(Router, service=service, peers=peers)
    app.add_middleware(Middleware, service=service)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(schemas.format_page(app.openapi()))

    return app


def _make_stream_routes(service: Service, peers: Peers | None) -> APIRouter:
    routes = APIRouter(prefix="/v1", responses=schemas.ERRORS)
    stored = Stored(service.engine.residents.writer.folder)
    requests = _Requests(service)

    @routes.post("/streams/{stream}/predict", tags=["streams"], **schemas.PREDICT)
    async def predict(request: Request, stream: str, sequence: Sequence = None) -> Response:
        """Classify one or several images, and learn from each before it is classified."""
        service.check_ready()
        check_stream_id(stream)
        service.check_creation(stream, name_client(request.scope))
        images = await requests.read_images(request)
        payload = await requests.submit(Job(stream, images, sequence, create=True))
        record = service.engine.residents.records.get(stream)
        saved = record.saved_sequence if record is not None else 0
        headers = {"X-Testtime-Version": str(payload["version"]), "X-Testtime-Sample": str(payload["sample"])}
        return format_json({"repeated": False} | payload | {"saved_sequence": saved}, headers)

    @routes.post("/predict", tags=["images"], **schemas.PREDICT_EPISODIC)
    async def predict_episodic(request: Request) -> Response:
        """Classify one or several images, each adapted to by itself; nothing is remembered."""
        service.check_ready()
        images = await requests.read_images(request)
        answers = await requests.submit(Job(None, images))
        return format_json({"answers": answers}, {"X-Testtime-Version": "0", "X-Testtime-Sample": "0"})

    @routes.get("/streams", tags=["streams"])
    async def list_streams(request: Request, limit: Limit = 1000, offset: Offset = 0) -> Response:
        """List the streams, resident or stored, those used last first."""
        if peers is not None and not is_forwarded(request.scope):
            return format_json(await peers.list_streams(service, stored, limit, offset))
        records = sorted(service.engine.residents.records.values(), key=lambda record: -record.last_seen)
        shown = [service.describe_stream(record) for record in records[offset : offset + limit]]
        return format_json({"service": service.about, "total": len(records), "streams": shown})

    @routes.get("/streams/{stream}", tags=["streams"])
    async def show_stream(stream: str) -> Response:
        """Show one stream, with its former versions and the last images as points of curves."""
        record = service.find_record(check_stream_id(stream))
        versions = await asyncio.to_thread(service.engine.residents.writer.folder.list_versions, stream)
        more = {"versions": versions, "history": list(record.history), "notes": list(record.notes)}
        return format_json(service.describe_stream(record) | more, {"X-Testtime-Version": str(record.version)})

    @routes.get("/streams/{stream}/thumbnails", tags=["streams"])
    async def show_thumbnails(stream: str, after: After = 0) -> Response:
        """Show the last images of a resident stream as small pictures, if the service makes them."""
        record = service.find_record(check_stream_id(stream))
        if not service.settings.thumbnails:
            raise Refusal(404, "This service makes no thumbnails; it was started without --thumbnails.")
        wanted = [one for one in list(record.thumbnails) if one.seen > after]
        return format_json({"thumbnails": await asyncio.to_thread(describe_thumbnails, wanted)})

    @routes.get("/events", tags=["service"])
    async def watch(request: Request) -> Response:
        """Watch answers and what happens to streams, as server-sent events."""
        service.check_ready()
        if service.events.is_full:
            raise Refusal(429, "Too many watchers.", retry_after=10)
        own = peers is None or is_forwarded(request.scope)
        events = service.events.watch() if peers is None or own else peers.watch(service)
        return StreamingResponse(events, media_type="text/event-stream")

    _add_changes(routes, service, requests)
    return routes


def _add_changes(routes: APIRouter, service: Service, requests: _Requests) -> None:
    def add(name: str, summary: str, act: Callable[[str], Action]) -> None:
        @routes.post(f"/streams/{{stream}}/{name}", tags=["streams"], summary=summary, operation_id=name)
        async def change(stream: str) -> Response:
            return await requests.change(stream, act(stream))

    add("reset", "Return a stream to the original network.", lambda stream: lambda e: (None, e.changes.reset(stream)))
    add("freeze", "Answer without learning.", lambda stream: lambda e: (None, e.changes.freeze(stream, True)))
    add("unfreeze", "Learn again.", lambda stream: lambda e: (None, e.changes.freeze(stream, False)))
    add("pin", "Let a stream stay resident.", lambda stream: lambda e: (None, e.changes.pin(stream, True)))
    add("unpin", "Let a stream be evicted again.", lambda stream: lambda e: (None, e.changes.pin(stream, False)))

    @routes.post("/streams/{stream}/rollback", tags=["streams"])
    async def rollback(stream: str, version: Version = None) -> Response:
        """Return a stream to a former version."""
        return await requests.change(stream, lambda engine: engine.changes.roll_back(stream, version))

    @routes.get("/streams/{stream}/export", tags=["streams"], **schemas.EXPORT)
    async def export(stream: str) -> Response:
        """Download the adapted network of a stream, a file for `testtime.load`."""
        service.check_ready()
        service.find_record(check_stream_id(stream))
        content = await requests.submit(Job(stream, action=lambda engine: (engine.changes.export(stream), None)))
        headers = {"Content-Disposition": f'attachment; filename="{stream}.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    @routes.delete("/streams/{stream}", tags=["streams"])
    async def delete(stream: str) -> Response:
        """Delete a stream and everything stored of it."""
        service.check_ready()
        service.find_record(check_stream_id(stream))
        forget: Action = lambda engine: (engine.residents.delete(stream, "deleted"), None)  # noqa: E731
        await requests.submit(Job(stream, action=forget, resident=False))
        return format_json({"stream": stream, "deleted": True})


def _make_service_routes(service: Service, peers: Peers | None) -> APIRouter:
    routes = APIRouter(tags=["service"])

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        text, headers = load_page()
        return HTMLResponse(text, headers=dict(headers))

    @routes.get("/healthz")
    async def healthz() -> Response:
        """Whether the process works."""
        return format_json({"alive": service.batcher.is_alive}, status=200 if service.batcher.is_alive else 503)

    @routes.get("/readyz")
    async def readyz() -> Response:
        """Whether requests are answered, and whether states can be written."""
        health = dict(service.describe_health())
        if peers is not None:
            health["replicas"] = len(await peers.run(peers.beats.list_alive))
        return format_json(health, status=200 if health["ready"] else 503)

    @routes.get("/metrics", responses={401: schemas.ERRORS[401]})
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        own = peers is None or is_forwarded(request.scope)
        text = service.metrics.format() if peers is None or own else await peers.merge_metrics()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return routes


class _Requests:
    """What the routes have in common: images come in, jobs go out."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._done: deque[asyncio.Future[None]] = deque()
        self._woken = False
        self._pool = ThreadPoolExecutor(service.decoder.workers + 1, thread_name_prefix="testtime-decode")

    async def read_images(self, request: Request) -> list[Tensor]:
        """Return the images in a request's body."""
        service, begin = self._service, time.perf_counter()
        content = await read_body(request, service.settings.max_upload)
        read = time.perf_counter()
        service.metrics.observe("testtime_stage_seconds", read - begin, stage="read")
        kinds = request.headers.get("content-type", "")

        def decode() -> list[Tensor]:
            parts = split_body(kinds, content)
            return [image for kind, part in parts for image in service.decoder.decode(kind, part)]

        if kinds.startswith(ARRAY) and len(content) <= _SMALL:  # quicker than another thread
            images = decode()
        else:
            images = await asyncio.get_running_loop().run_in_executor(self._pool, decode)
        if len(images) > service.settings.max_queue:
            raise Refusal(413, f"A request may have at most {service.settings.max_queue} images.")
        service.metrics.observe("testtime_stage_seconds", time.perf_counter() - read, stage="decode")
        return images

    async def submit(self, job: Job) -> Any:
        """Return the result of a job, which goes on even if nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        if len(job.images) == 1:
            # After all other requests that have arrived were read: they come at once, and share a step.
            await asyncio.sleep(0)
        waiting: asyncio.Future[None] = loop.create_future()
        future: Future[Any] = self._service.batcher.submit(job)
        future.add_done_callback(lambda _: self._wake(loop, waiting))
        await waiting
        return future.result()

    def _wake(self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None]) -> None:
        """Let a request go on, from another thread; the loop is woken once for all that are done meanwhile."""
        self._done.append(waiting)
        if self._woken or loop.is_closed():
            return
        self._woken = True
        loop.call_soon_threadsafe(self._go_on)

    def _go_on(self) -> None:
        self._woken = False  # first: whoever is done from now on wakes the loop again
        while self._done:
            waiting = self._done.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def change(self, stream: str, action: Action) -> Response:
        """Change a stream and show it."""
        service = self._service
        service.check_ready()
        record = service.find_record(check_stream_id(stream))
        await self.submit(Job(stream, action=action))
        return format_json(service.describe_stream(record), {"X-Testtime-Version": str(record.version)})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return format_refusal(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "request"
        return format_refusal(Refusal(422, f"`{where}`: {first['msg']}."))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        messages = {404: "There is no such path.", 405: "This path does not take this method."}
        return format_refusal(Refusal(error.status_code, messages.get(error.status_code, "The request is malformed.")))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return format_refusal(Refusal(500, "The service failed at this request; its log says why."))
