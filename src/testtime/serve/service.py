"""The parts of the service together, from start to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from testtime import __version__
from testtime.adaptation.methods import Method
from testtime.diagnosis.measure import find_reference
from testtime.networks.ynet import YNet
from testtime.precision import Precision
from testtime.serve.batcher import Batcher
from testtime.serve.decode import Decoder
from testtime.serve.engine import Engine
from testtime.serve.events import Events
from testtime.serve.lease import Leases
from testtime.serve.limits import Rates
from testtime.serve.metrics import SIZES, Metrics
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.settings import ServeSettings

log = logging.getLogger(__name__)

_COUNTERS = {
    "testtime_requests_total": "Answered requests, by route and status.",
    "testtime_images_total": "Answered images, by mode.",
    "testtime_adapted_total": "Images that a network adapted to.",
    "testtime_rolled_back_total": "Updates that the guard undid.",
    "testtime_collapses_total": "Collapsed streams, by what was done.",
    "testtime_disagreements_total": "Images that original and adapted network classify differently, in shadow mode.",
    "testtime_evictions_total": "Streams that made room for others.",
    "testtime_loads_total": "Streams that came back from the state folder.",
    "testtime_expired_total": "Streams deleted because they were not used.",
    "testtime_write_errors_total": "States that could not be written.",
    "testtime_lost_leases_total": "States not written, since their stream has another owner; with several replicas.",
}


class Service:
    """A network served to many streams.

    Args:
        net: The network, on its device.
        method: The method.
        settings: The settings.
        name: What the network is called.
        precision: See `testtime.Settings`.
        leases: The leases of streams, if several processes share the state folder.

    Raises:
        FileError: The state folder cannot be used.
        ValueError: Network, method and settings do not go together.
    """

    def __init__(
        self,
        net: YNet,
        method: Method,
        settings: ServeSettings,
        name: str,
        precision: Precision | None = None,
        leases: Leases | None = None,
    ) -> None:
        size = net.card.require_size()
        self.settings, self.metrics, self.events = settings, Metrics(), Events()
        channels = int(net.channels or net.card.architecture.get("channels", 3))
        self._declare()
        self.engine = Engine(net, method, settings, precision, self.metrics, self.events, leases)
        self.decoder = Decoder(channels, size, settings.max_pixels)
        self.batcher = Batcher(self.engine, settings, self.metrics)
        self.rates, self._creators = Rates(settings.rate), dict[str, set[str]]()
        self.phase: Literal["starting", "ready", "stopping"] = "starting"
        self.started, self.fault = time.time(), ""
        self._net, self._reference, self._needs_reference = net, None, method.needs_branch
        self.about: dict[str, Any] = {"network": name, "method": method.name, "version": __version__}
        self.about |= {"size": size, "channels": channels, "classes": list(net.card.classes)}
        self.about |= {"shadow": settings.shadow, "slots": settings.slots, "holds_images": self.engine.holds_images}
        self.about |= {"thumbnails": settings.thumbnails, "reference_loss": None, "demo": None}

    def start(self) -> None:
        """Get ready in a thread; meanwhile requests are refused."""

        def prepare() -> None:
            try:
                self.engine.warm_up(self.decoder.shape)
                reference = find_reference(self._net) if self._needs_reference else None
                self._reference = self.about["reference_loss"] = None if reference is None else reference.task_loss
                if self.phase == "starting":
                    self.phase = "ready"
            except Exception as error:
                log.exception("the service cannot start")
                self.fault = type(error).__name__

        for work in (prepare, self.decoder.start):
            threading.Thread(target=work, name="testtime-start", daemon=True).start()

    def stop(self) -> bool:
        """Finish all requests, write all states and stop; returns whether everything was written."""
        self.phase = "stopping"
        self.batcher.stop()
        self.decoder.close()
        return self.engine.residents.close()

    def check_ready(self) -> None:
        """Check that requests can be answered.

        Raises:
            Refusal: The service is starting or stopping.
        """
        if self.phase != "ready":
            raise Refusal(503, f"The service is {self.phase}.", retry_after=2)

    def check_creation(self, stream: str, client: str) -> None:
        """Check that a client may use a stream, which may be new.

        Raises:
            Refusal: The client has created too many streams.
        """
        most = self.settings.client_streams
        if most is None or stream in self.engine.residents.records:
            return
        existing = self._creators.setdefault(client, set())
        existing.intersection_update({*self.engine.residents.records, stream})
        if len(existing - {stream}) >= most:
            raise Refusal(429, f"A client may create at most {most} streams; delete some.", retry_after=60)
        existing.add(stream)

    def find_record(self, stream: str) -> StreamRecord:
        """Return the record of a stream.

        Raises:
            Refusal: There is no such stream.
        """
        record = self.engine.residents.records.get(stream)
        if record is None:
            raise Refusal(404, "There is no such stream.")
        return record

    def describe_stream(self, record: StreamRecord) -> dict[str, Any]:
        """Return what is known of a stream, JSON-serialisable."""
        table = {name: value for name, value in record.describe().items() if name not in ("answers", "stored_version")}
        base = record.first_loss if self._reference is None else self._reference
        return table | {
            "resident": record.id in self.engine.residents.slots,
            "drift": None if record.loss is None or base is None else record.loss - base,
            "drift_from": "first images" if self._reference is None else "training",
            "unsaved": record.unsaved,
            "saved_sequence": record.saved_sequence,
            "restored_version": record.restored_version,
        }

    def note(self, stream: str, **values: float) -> None:
        """Attach values to the last image of a stream, for the live page; only the demo has any to attach."""
        record = self.engine.residents.records.get(stream)
        if record is not None:
            record.notes.append({"seen": record.seen, **values})
            self.events.publish("note", stream=stream, seen=record.seen, **values)

    def describe_health(self) -> Mapping[str, Any]:
        """Return whether the service works, JSON-serialisable."""
        residents = self.engine.residents
        disk = "ok" if residents.writer.fault is None else f"states cannot be written: {residents.writer.fault}"
        return {
            "phase": self.phase,
            "ready": self.phase == "ready" and self.batcher.is_alive,
            "fault": self.fault or None,
            "disk": disk,
            "streams": len(residents.records),
            "resident": len(residents.slots),
            "damaged": residents.damaged,
            "waiting": self.batcher.waiting,
        }

    def _declare(self) -> None:
        for name, description in _COUNTERS.items():
            self.metrics.add_counter(name, description)
        stages = "Seconds by stage: read, decode, queue, load, evict, step, write, request."
        self.metrics.add_histogram("testtime_stage_seconds", stages)
        self.metrics.add_histogram("testtime_batch_images", "Images of a step.", SIZES)
        gauges = {
            "testtime_streams": ("Streams, resident or stored.", lambda: len(self.engine.residents.records)),
            "testtime_resident_streams": ("Resident streams.", lambda: len(self.engine.residents.slots)),
            "testtime_slots": ("Slots.", lambda: self.settings.slots),
            "testtime_queue_images": ("Waiting images.", lambda: self.batcher.waiting),
            "testtime_unwritten_states": ("States that wait to be written.", lambda: len(self.engine.residents.writer)),
            "testtime_disk_ok": (
                "Whether the last state could be written.",
                lambda: self.engine.residents.writer.fault is None,
            ),
            "testtime_damaged_streams": ("Streams without a readable state.", lambda: self.engine.residents.damaged),
        }
        for name, (description, read) in gauges.items():
            self.metrics.add_gauge(name, description, read)
