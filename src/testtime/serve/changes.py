"""Changes of streams, asked for or after a collapse. All methods are called by one thread, the batcher's."""

from __future__ import annotations

import logging
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from testtime.adaptation.streams import Streams
from testtime.serve.events import Events
from testtime.serve.metrics import Metrics
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.residents import Residents
from testtime.serve.settings import ServeSettings

log = logging.getLogger(__name__)


class Changes:
    """Changes resident streams; whoever answers their images is not answering any of theirs meanwhile.

    Args:
        streams: The adapter.
        residents: Which of its streams is whose.
        settings: The settings of the service.
        metrics: Where everything is counted.
        events: Where everything is reported.
    """

    def __init__(
        self, streams: Streams, residents: Residents, settings: ServeSettings, metrics: Metrics, events: Events
    ) -> None:
        self._streams, self._residents, self._settings = streams, residents, settings
        self._metrics, self._events = metrics, events

    def reset(self, stream: str) -> Future[bool]:
        """Return a resident stream to the original network; its state remains as a version."""
        self._residents.save([stream], store=True)
        self._streams.reset(self._residents.find_slots([stream]))
        return self._change(stream, "reset", sample=0)

    def roll_back(self, stream: str, version: int | None = None) -> tuple[int, Future[bool]]:
        """Return a resident stream to a former version, by default the newest that is stored.

        Returns:
            The version, and the write.

        Raises:
            Refusal: It is not stored.
        """
        record, writer = self._residents.records[stream], self._residents.writer
        waiting = writer.find(stream)
        if waiting is not None and not waiting.done.done():
            waiting.done.result(timeout=60)
        versions = [number for number in writer.folder.list_versions(stream) if number < record.version]
        target = (versions or [-1])[-1] if version is None else version
        if target not in versions:
            listed = f"these are stored: {', '.join(map(str, versions))}" if versions else "none is stored"
            raise Refusal(404, f"There is no such former version of this stream; {listed}.")
        try:
            former, state = writer.folder.read(stream, target)
            self._streams.import_streams(self._residents.find_slots([stream]), state)
        except ValueError as error:
            log.warning("%s", error)
            raise Refusal(409, f"Version {target} of this stream is damaged.") from None
        return target, self._change(stream, "rollback", sample=former.sample, to=target)

    def freeze(self, stream: str, frozen: bool) -> Future[bool]:
        """Let a resident stream answer without learning, or learn again."""
        self._residents.records[stream].frozen = frozen
        return self._change(stream, "freeze" if frozen else "unfreeze")

    def pin(self, stream: str, pinned: bool) -> Future[bool]:
        """Pin a resident stream, so that it stays resident, or release it.

        Raises:
            Refusal: Only one slot is left for all others.
        """
        slots = self._residents.slots
        if pinned and stream not in slots.pinned and len(slots.pinned) >= slots.count - 1:
            raise Refusal(409, f"Of {slots.count} slots, one must not be pinned.")
        self._residents.records[stream].pinned = pinned
        (slots.pinned.add if pinned else slots.pinned.discard)(stream)
        return self._change(stream, "pin" if pinned else "unpin")

    def export(self, stream: str) -> bytes:
        """Return the adapted network of a resident stream as the content of a file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "network.safetensors")
            self._streams.network(self._residents.slots[stream]).save(path)
            return path.read_bytes()

    def act(self, record: StreamRecord, alarmed: bool) -> None:
        """Act on an alarm of the guard in a request, once until a request without."""
        before, record.collapsed = record.collapsed, alarmed
        if not alarmed or before:
            return
        action, record.collapses = self._settings.on_collapse, record.collapses + 1
        self._metrics.count("testtime_collapses_total", action=action)
        self._events.publish("collapse", stream=record.id, action=action)
        log.warning("stream %s has collapsed: %s", record.id, action)
        if action == "freeze":
            self.freeze(record.id, True)
        elif action == "reset":
            self.reset(record.id)
        elif action == "rollback":
            try:
                version, _ = self.roll_back(record.id)
                self._residents.writer.folder.drop_version(record.id, version)  # the next collapse goes further back
            except Refusal:  # there is no former version
                self.reset(record.id)

    def _change(self, stream: str, event: str, sample: int | None = None, **about: Any) -> Future[bool]:
        """Note a change of a resident stream, and of its network if a sample number is given; write it."""
        record = self._residents.records[stream]
        record.revision += 1
        record.last_seen, record.collapsed = time.time(), False
        if sample is not None:
            record.version, record.sample = record.version + 1, sample
        self._events.publish(event, stream=stream, version=record.version, **about)
        return self._residents.save([stream])[0]
