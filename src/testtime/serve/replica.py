"""One of several processes that serve the same streams: a service, and a port on which the others reach it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
import uuid

import uvicorn
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from testtime.adaptation.methods import Method
from testtime.networks.ynet import YNet
from testtime.precision import Precision
from testtime.serve.app import make_app
from testtime.serve.lease import TTL, Beats, Leases
from testtime.serve.middleware import FORWARDED, format_json, format_refusal
from testtime.serve.peers import CLIENT, SECRET, Call, Peers
from testtime.serve.refusal import Refusal
from testtime.serve.server import listen
from testtime.serve.service import Service
from testtime.serve.settings import ServeSettings
from testtime.serve.stored import Stored

log = logging.getLogger(__name__)

STOP = "/stop"
_SWEEP = 60.0  # seconds between looks for streams that nobody uses, at most


class Replica:
    """A service that shares its state folder with others.

    Args:
        net: The network, on its device.
        method: The method.
        settings: The settings; host and port are those of the whole service.
        source: What the network is called.
        precision: See `testtime.Settings`.
        host: The address at which the other replicas reach this one.
        secret: What replicas know each other by.
        ttl: Seconds after which a replica that gives no sign of life is taken to be lost.

    Raises:
        FileError: The state folder cannot be used.
        ValueError: Network, method and settings do not go together.
    """

    def __init__(
        self,
        net: YNet,
        method: Method,
        settings: ServeSettings,
        source: str,
        precision: Precision | None,
        host: str,
        secret: str,
        ttl: float = TTL,
    ) -> None:
        self.name, self._secret = uuid.uuid4().hex[:12], secret
        self._listening = listen(host, 0)
        self._beats = Beats(settings.state, self.name, f"{host}:{self._listening.getsockname()[1]}", ttl)
        try:
            leases = Leases(settings.state, self.name, self._beats.is_alive)
            self.service = Service(net, method, settings, source, precision, leases)
        except BaseException:
            self._beats.stop()
            self._listening.close()
            raise
        self.service.about["replica"] = self.name
        self.app = make_app(self.service, Peers(self._beats, secret))
        config = uvicorn.Config(
            self._receive, interface="asgi3", log_level="warning", access_log=False, lifespan="off", ws="none"
        )
        self._server, self._stopping = uvicorn.Server(config), threading.Lock()
        self._whole: bool | None = None

    def start(self) -> None:
        """Serve the other replicas, and get ready.

        Raises:
            RuntimeError: The service cannot start.
        """
        run = threading.Thread(target=self._server.run, args=([self._listening],), name="testtime-replica", daemon=True)
        run.start()
        self._beats.start()
        self.service.start()
        while self.service.phase == "starting":
            if self.service.fault:
                raise RuntimeError(f"The service cannot start: {self.service.fault}.")
            time.sleep(0.02)
        if self.service.settings.ttl is not None:
            threading.Thread(target=self._sweep, name="testtime-sweep", daemon=True).start()

    def stop(self) -> bool:
        """Finish all requests, write all states, release all leases and stop; returns whether all were written."""
        with self._stopping:
            if self._whole is None:
                self.service.phase = "stopping"
                self.service.events.close()
                self._whole = self.service.stop()
                self._beats.stop()
                self._server.should_exit = True
            return self._whole

    async def _receive(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer another replica, or who started the replicas."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        if not hmac.compare_digest(headers.get(SECRET, "").encode(), self._secret.encode()):
            return await format_refusal(Refusal(403, "This address is for other replicas."))(scope, receive, send)
        if scope["path"] == STOP:
            whole = await asyncio.to_thread(self.stop)
            return await format_json({"whole": whole})(scope, receive, send)
        await self.app({**scope, FORWARDED: True, "client": (headers.get(CLIENT, "?"), 0)}, receive, send)

    def _sweep(self) -> None:
        """Ask for stored streams that nobody used for long, so that whoever gets them deletes them."""
        ttl, stored = self.service.settings.ttl, Stored(self.service.engine.residents.writer.folder)
        assert ttl is not None
        address = self._beats.find_address(self.name)
        while self.service.phase == "ready" and address is not None:
            time.sleep(min(_SWEEP, ttl))
            for record in stored.list_records():
                if time.time() - record.last_seen > ttl and not record.pinned:
                    try:
                        Call(address, self._secret).send("GET", f"/v1/streams/{record.id}")
                    except Exception as error:  # the next time
                        log.info("a stream cannot be looked at: %s", error)
