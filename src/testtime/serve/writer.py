"""States on their way to the state folder.

One thread writes them in order. Until a state is written, it is held here and read from here; a disk that is full loses
nothing, but what it cannot take stays in memory and would be lost by a crash.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from testtime.serve.folder import StateFolder
from testtime.serve.lease import LeaseLost
from testtime.serve.metrics import Metrics

log = logging.getLogger(__name__)

_RETRY = 1.0  # seconds between attempts after a failure
_WAITING = 256  # states; more make the caller wait


@dataclass
class Entry:
    """A state to be written.

    Attributes:
        stream: The stream's name.
        record: See `StreamRecord.describe`.
        tensors: The state.
        revision: See `StreamRecord`.
        store: Whether it is stored as a version, too.
        fence: The fencing number of the lease under which the stream was changed, if there are leases.
        done: Set to whether it was written.
    """

    stream: str
    record: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    revision: int = 0
    store: bool = False
    fence: int = 0
    done: Future[bool] = field(default_factory=Future)


class Writer:
    """Writes states to a folder, in a thread.

    Args:
        folder: The folder.
        metrics: Where times and failures are counted.
    """

    def __init__(self, folder: StateFolder, metrics: Metrics) -> None:
        self.folder, self._metrics = folder, metrics
        self.fault: str | None = None
        """Why the last write failed; None if it did not."""
        self._queue: deque[Entry] = deque()
        self._newest: dict[str, Entry] = {}  # of streams that are not written yet
        self._failed: OrderedDict[str, Entry] = OrderedDict()
        self._changed = threading.Condition()
        self._disk = threading.Lock()  # held while files of streams are written or removed
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="testtime-writer", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._newest)

    def put(self, entry: Entry) -> Future[bool]:
        """Write a state soon; returns a future of whether it was written."""
        with self._changed:
            while len(self._queue) >= _WAITING and self._thread.is_alive():
                self._changed.wait(0.1)
            self._newest[entry.stream] = entry
            self._failed.pop(entry.stream, None)
            self._queue.append(entry)
            self._changed.notify_all()
        return entry.done

    def find(self, stream: str) -> Entry | None:
        """Return the newest state of a stream if it is not written yet."""
        with self._changed:
            return self._newest.get(stream)

    def delete(self, stream: str, fence: int = 0) -> None:
        """Remove everything of a stream, written or not; `fence` as in `StateFolder.write`.

        Raises:
            LeaseLost: The stream has another owner now, and only what is not written is removed.
            OSError: Its files cannot be removed; what is not written will be.
        """
        with self._disk:
            try:
                self.folder.delete(stream, fence)
            except LeaseLost:
                self.drop(stream)
                raise
            self.drop(stream)

    def drop(self, stream: str) -> None:
        """Do not write what is not written yet of a stream."""
        with self._changed:
            dropped = [entry for entry in self._queue if entry.stream == stream]
            self._queue = deque(entry for entry in self._queue if entry.stream != stream)
            self._newest.pop(stream, None)
            self._failed.pop(stream, None)
        for entry in dropped:
            if not entry.done.done():  # as of one that failed before and waits to be written again
                entry.done.set_result(False)

    def close(self) -> bool:
        """Write what is waiting, once more what failed, and stop; returns whether everything was written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        return not self._newest

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._closing:
                    self._changed.wait(_RETRY if self._failed else None)
                if not self._queue and self._failed:
                    self._queue.extend(self._failed.values())
                    self._failed.clear()
                    last = self._closing
                elif not self._queue and self._closing:
                    return
                else:
                    last = False
            while self._write_next():
                pass
            if last:
                return

    def _write_next(self) -> bool:
        """Write the first state of the queue, if there is one."""
        with self._disk:
            with self._changed:
                if not self._queue:
                    return False
                entry = self._queue.popleft()
                self._changed.notify_all()
            begin, lost = time.perf_counter(), False
            try:
                self.folder.write(entry.stream, entry.record, entry.tensors, entry.store, entry.fence)
                fault = None
            except LeaseLost:  # its new owner has gone on from the last state that was written
                self._metrics.count("testtime_lost_leases_total")
                log.warning("the stream %s has another owner; a state of it was not written", entry.stream)
                fault, lost = None, True
            except Exception as error:  # must not end the thread, and with it all writing
                fault = (isinstance(error, OSError) and error.strerror) or type(error).__name__  # never a path
                if self.fault is None:
                    log.error("states cannot be written: %s", fault, exc_info=not isinstance(error, OSError))
            self._metrics.observe("testtime_stage_seconds", time.perf_counter() - begin, stage="write")
            with self._changed:
                self._note(entry, fault)
        if not entry.done.done():
            entry.done.set_result(fault is None and not lost)
        return True

    def _note(self, entry: Entry, fault: str | None) -> None:
        self.fault = fault
        is_newest = self._newest.get(entry.stream) is entry
        if fault is not None:
            self._metrics.count("testtime_write_errors_total")
            if is_newest:
                self._failed[entry.stream] = entry
        elif is_newest:
            del self._newest[entry.stream]
