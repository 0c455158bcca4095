"""Which streams are resident, and how their states go to the state folder and come back.

All methods are called by one thread, the batcher's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from testtime.adaptation.streams import Streams
from testtime.serve.events import Events
from testtime.serve.folder import StateFolder
from testtime.serve.lease import LeaseLost, Leases
from testtime.serve.metrics import Metrics
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.settings import ServeSettings
from testtime.serve.slots import Slots
from testtime.serve.writer import Entry, Writer
from testtime.storage import error_text

log = logging.getLogger(__name__)


class Residents:
    """Streams by name, at most `slots` of them resident.

    Args:
        streams: The adapter, with a stream for each slot.
        settings: The settings of the service.
        metrics: Where everything is counted.
        events: Where everything is reported.
        leases: The leases of streams, if other processes share the state folder; then only adopted streams are known.

    Raises:
        FileError: The state folder cannot be used.
    """

    def __init__(
        self,
        streams: Streams,
        settings: ServeSettings,
        metrics: Metrics,
        events: Events,
        leases: Leases | None = None,
    ) -> None:
        self._streams, self._settings, self._metrics, self._events = streams, settings, metrics, events
        folder = StateFolder(settings.state, streams.identify(), settings.versions, leases)
        self.leases = leases
        self.slots, self.writer = Slots(settings.slots), Writer(folder, metrics)
        self.records: dict[str, StreamRecord] = {}
        """All streams, resident or stored."""
        self.damaged = 0
        """Number of streams found without a readable state."""
        for found in folder.list_streams() if leases is None else ():
            if isinstance(found, Path):
                self.damaged += 1
                log.error("%s: no readable state", found)
                continue
            found.restored_version, found.answers = found.version, {}
            self.records[found.id] = found
            if found.pinned and len(self.slots.pinned) < self.slots.count - 1:
                self.slots.pinned.add(found.id)

    def check_new(self, stream: str) -> None:
        """Check that a stream exists or may be created.

        Raises:
            Refusal: There are too many streams, or the disk is full.
        """
        if stream in self.records:
            return
        count = len(self.records) if self.leases is None else self.writer.folder.count() - 1  # the lease is counted
        if count >= self._settings.max_streams:
            raise Refusal(429, f"There are already {count} streams; delete some.", retry_after=60)
        if self.writer.fault is not None:
            raise Refusal(503, f"No new streams: states cannot be written ({self.writer.fault}).", retry_after=10)

    def admit(self, streams: Collection[str], busy: Collection[str] = ()) -> dict[str, Refusal]:
        """Make streams resident, new ones too; at most as many as `Slots.fit` returns.

        Args:
            streams: The streams.
            busy: Others that must not be evicted.

        Returns:
            Those that could not be loaded, and why.
        """
        evicted = self.slots.find_evicted(streams, busy)
        if evicted:
            self._evict(evicted)
        refused: dict[str, Refusal] = {}
        for stream in streams:
            if stream in self.slots:
                self.slots.touch(stream)
                continue
            try:
                self._load(stream)
            except Refusal as refusal:
                refused[stream] = refusal
        return refused

    def find_slots(self, streams: Sequence[str]) -> Tensor:
        """Return the slots of resident streams, `(M,)`."""
        return torch.tensor([self.slots[stream] for stream in streams], dtype=torch.int64, device="cpu")

    def save(self, streams: Sequence[str], store: bool = False) -> list[Future[bool]]:
        """Write the states of resident streams.

        Args:
            streams: The streams.
            store: Whether to store them as versions even if none is due.

        Returns:
            For each a future of whether it was written.
        """
        if not streams:
            return []
        state, written = self._streams.export_streams(self.find_slots(streams)), []
        for row, stream in enumerate(streams):
            own = {name: tensor[row : row + 1].clone() for name, tensor in state.items()}
            written.append(self._put(self.records[stream], own, store))
        return written

    def adopt(self, stream: str, fence: int) -> None:
        """Go on with a stream from what is stored of it, after getting its lease; it may be new.

        Raises:
            Refusal: It is new, and may not be created.
        """
        self.forget(stream)
        found = self.writer.folder.find_record(stream)
        if found is None:
            self.check_new(stream)
        else:
            found.restored_version, found.answers = found.version, {}
            self.records[stream] = found
            if found.pinned and len(self.slots.pinned) < self.slots.count - 1:
                self.slots.pinned.add(stream)
        assert self.leases is not None
        self.leases.held[stream] = fence

    def forget(self, stream: str) -> None:
        """Forget a stream that has another owner, or of which the stored state counts."""
        self.slots.release(stream)
        self.slots.pinned.discard(stream)
        self.writer.drop(stream)
        self.records.pop(stream, None)
        if self.leases is not None:
            self.leases.held.pop(stream, None)

    def delete(self, stream: str, reason: str) -> None:
        """Delete a stream, resident or stored.

        Raises:
            Refusal: Its files cannot be removed; the stream goes on.
        """
        fence = self._find_fence(stream)
        try:
            self.writer.delete(stream, fence)
        except OSError as error:
            if self.leases is not None and isinstance(error, TimeoutError):  # another process holds its lock
                self.writer.drop(stream)
                raise LeaseLost from None
            raise Refusal(503, f"The stream cannot be deleted ({error_text(error)}).", retry_after=10) from None
        self.forget(stream)
        if self.leases is not None:
            self.leases.release(stream, fence)
        self._events.publish("deleted", stream=stream, reason=reason)

    def close(self) -> bool:
        """Write everything that has changed and release the folder; returns whether everything was written."""
        self.save([stream for stream in self.slots.list_resident() if self._has_changed(stream)])
        whole = self.writer.close()
        if self.leases is not None:
            for stream, fence in self.leases.held.items():
                self.leases.release(stream, fence)
        self.writer.folder.close()
        return whole

    def _find_fence(self, stream: str) -> int:
        return 0 if self.leases is None else self.leases.held.get(stream, 0)

    def _has_changed(self, stream: str) -> bool:
        """Return whether a resident stream differs from what is written or about to be."""
        record, waiting = self.records[stream], self.writer.find(stream)
        return record.unsaved > 0 and (waiting is None or waiting.revision != record.revision)

    def _load(self, stream: str) -> None:
        begin, record = time.perf_counter(), self.records.get(stream)
        if record is None:
            self.check_new(stream)
            self.slots.take(stream)
            self._streams.reset(self.find_slots([stream]))
            # Changed from the start, so that it is written when it is evicted.
            self.records[stream] = StreamRecord(stream, revision=1)
            self._events.publish("created", stream=stream)
            return
        waiting = self.writer.find(stream)
        try:
            if waiting is not None:
                found, state = StreamRecord.parse(waiting.record), dict(waiting.tensors)
            else:
                found, state = self.writer.folder.read(stream)
            self.slots.take(stream)
            self._streams.import_streams(self.find_slots([stream]), state)
        except ValueError as error:
            log.error("%s", error)
            self.slots.release(stream)
            raise Refusal(409, "The state of this stream is damaged; delete the stream to start again.") from None
        if found.version != record.version:  # an older version in place of a damaged state
            found.restored_version, found.pinned = found.version, record.pinned
            self.records[stream] = found
        record.answers = found.answers
        self._metrics.count("testtime_loads_total")
        self._metrics.observe("testtime_stage_seconds", time.perf_counter() - begin, stage="load")

    def _evict(self, streams: Sequence[str]) -> None:
        begin = time.perf_counter()
        self.save([stream for stream in streams if self._has_changed(stream)])
        for stream in streams:
            self.slots.release(stream)
            self.records[stream].shrink()
            self._events.publish("evicted", stream=stream)
        self._metrics.count("testtime_evictions_total", len(streams))
        self._metrics.observe("testtime_stage_seconds", time.perf_counter() - begin, stage="evict")

    def _put(self, record: StreamRecord, state: dict[str, Tensor], store: bool) -> Future[bool]:
        store = store or record.version - record.stored_version >= self._settings.version_every
        if store:
            record.stored_version = record.version
        sequence, revision = record.sequence, record.revision
        fence = self._find_fence(record.id)
        written = self.writer.put(Entry(record.id, record.describe(), state, revision, store, fence))

        def note(done: Future[bool]) -> None:
            if done.result():
                record.saved_sequence = max(record.saved_sequence, sequence)
                record.saved_revision = max(record.saved_revision, revision)

        written.add_done_callback(note)
        return written
