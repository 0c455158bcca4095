"""Services for the tests: a small network, a method of a few copies, images as floats."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from PIL import Image
from torch import Tensor

import adapters
from testtime import Method, Online, YNet
from testtime.serve.app import make_app
from testtime.serve.batcher import Batcher
from testtime.serve.decode import Decoder
from testtime.serve.engine import Engine
from testtime.serve.server import listen
from testtime.serve.service import Service
from testtime.serve.settings import ServeSettings
from testtime.serve.waiting import Job

METHOD = Method("ttt", "", "", settings={"copies": 2, "lr": 0.01}, needs=("branch",))
TOKEN = "a-token-of-some-length"


@functools.cache
def network() -> YNet:
    return adapters.network("group")


def image(seed: int) -> Tensor:
    """A picture, float `(3, 16, 16)`."""
    return adapters.pictures(1, seed=seed)[0]


def as_array(*images: Any) -> bytes:
    """A body of the content type application/x-npy."""
    file = io.BytesIO()
    np.save(file, np.stack([np.asarray(one) for one in images]) if len(images) > 1 else np.asarray(images[0]))
    return file.getvalue()


def as_picture(form: str = "PNG", size: tuple[int, int] = (20, 18), **more: Any) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, form, **more)
    return file.getvalue()


def make_online() -> Online:
    return Online(network(), method=METHOD)


@contextlib.contextmanager
def open_engine(folder: Path, **given: Any) -> Iterator[tuple[Engine, Batcher]]:
    """An engine and its batcher, without HTTP."""
    service = make_service(folder, **given)
    try:
        yield service.engine, service.batcher
    finally:
        assert service.stop()


def wait_for_expiry(engine: Engine, folder: Path) -> None:
    """Wait until nothing of any stream is left, in memory or in the folder."""
    for _ in range(300):
        if not engine.residents.records:
            break
        threading.Event().wait(0.02)
    assert not engine.residents.records
    assert not list((folder / "streams").iterdir())


def make_service(folder: Path, method: Method = METHOD, **given: Any) -> Service:
    settings = ServeSettings(folder, **{"slots": 4, "group": 1, "max_wait_ms": 0.0, "port": 0} | given)
    return Service(network(), method, settings, "small")


@contextlib.contextmanager
def open_client(folder: Path, **given: Any) -> Iterator[tuple[httpx.Client, Service]]:
    """A service in a thread, and a client of it."""
    service = make_service(folder, **given)
    listening = listen("127.0.0.1", service.settings.port)
    listening.listen()  # the first request waits for the server
    headers = {} if service.settings.token is None else {"Authorization": f"Bearer {service.settings.token}"}
    options: dict[str, Any] = {"http": "h11", "log_level": "error", "timeout_graceful_shutdown": 5}
    config = uvicorn.Config(make_app(service), lifespan="on", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    with pytest.MonkeyPatch.context() as patch, listening:
        patch.setattr(Decoder, "start", lambda self: None)  # when first needed
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
                while client.get("/readyz").status_code == 503:
                    assert not service.fault
                yield client, service
        finally:
            service.events.close()
            server.should_exit = True
            thread.join()


def send(client: httpx.Client, stream: str, *images: Any, **query: Any) -> Any:
    headers = {"Content-Type": "application/x-npy"}
    return client.post(f"/v1/streams/{stream}/predict", content=as_array(*images), params=query, headers=headers)


def submit(batcher: Batcher, stream: str, *images: Tensor, sequence: int | None = None) -> Any:
    return batcher.submit(Job(stream, list(images), sequence, create=True))
