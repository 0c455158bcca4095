"""Requests become steps: those of different streams are gathered, those of one stream keep their order."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from testtime.serve.engine import Both, Engine
from testtime.serve.lease import LeaseLost
from testtime.serve.metrics import Metrics
from testtime.serve.refusal import Refusal
from testtime.serve.settings import ServeSettings

log = logging.getLogger(__name__)

_PER_STREAM = 64  # waiting requests of one stream
_EPISODES = 16  # images of one step
_IDLE = 1.0  # seconds between looks for expired streams

Action = Callable[[Engine], tuple[Any, Future[bool] | None]]


@dataclass
class Job:
    """A request that waits or is worked on.

    Attributes:
        stream: Its stream; None for images without one.
        images: Float in [0, 1], `(C, H, W)` each.
        sequence: Its number within the stream, if it has one.
        action: What to do instead of answering images; returns the result and a write to wait for.
        create: Whether the stream may be new.
        resident: Whether the stream has to be resident.
        leased: Whether the stream's lease has to be held, if there are leases.
        answer: Set to the result.
        answers: Those of the first images.
        undo: Undoes what a stream has learned since the first one, if there are several.
        arrived: When it came.
    """

    stream: str | None
    images: list[Tensor] = field(default_factory=list)
    sequence: int | None = None
    action: Action | None = None
    create: bool = False
    resident: bool = True
    leased: bool = True
    answer: Future[Any] = field(default_factory=Future)
    answers: list[Both] = field(default_factory=list)
    undo: Callable[[str], None] | None = None
    arrived: float = field(default_factory=time.perf_counter)


class Batcher:
    """Works on requests, in a thread.

    Args:
        engine: The streams.
        settings: The settings of the service.
        metrics: Where everything is counted.
    """

    def __init__(self, engine: Engine, settings: ServeSettings, metrics: Metrics) -> None:
        self._engine, self._settings, self._metrics = engine, settings, metrics
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()  # of streams, those to serve next first
        self._blocked: set[str] = set()  # streams whose last answer waits for a write
        self._episodes: deque[Job] = deque()
        self.waiting = 0
        """Number of waiting images."""
        self._last = 1  # streams in the last step
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="testtime-batcher", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are worked on."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> Future[Any]:
        """Add a request to the queue; returns a future of its answer.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        with self._changed:
            if self._stopping:
                raise Refusal(503, "The service is stopping.", retry_after=10)
            size = max(1, len(job.images))
            if self.waiting and self.waiting + size > self._settings.max_queue:
                raise Refusal(429, f"{self.waiting} images are already waiting.", retry_after=1)
            if job.stream is None:
                self._episodes.append(job)
            else:
                queue = self._queues.setdefault(job.stream, deque())
                if len(queue) >= _PER_STREAM:
                    raise Refusal(409, f"This stream is busy: {len(queue)} of its requests are waiting.", retry_after=1)
                queue.append(job)
            self.waiting += size
            self._changed.notify_all()
        return job.answer

    def stop(self) -> None:
        """Finish all requests and stop; new ones are refused."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        swept = time.monotonic()
        while self._wait():
            try:
                self._work()
            except Exception:  # must not end the thread
                log.exception("an error in the batcher")
            if self._settings.ttl is not None and time.monotonic() - swept > min(_IDLE, self._settings.ttl):
                swept = time.monotonic()
                self._expire(self._settings.ttl)

    def _wait(self) -> bool:
        """Wait for requests, and a little longer for others to share their step; returns False to stop."""
        with self._changed:
            if not self._list_ready() and not self._episodes:
                if self._stopping and not self._queues:
                    return False
                self._changed.wait(_IDLE)
            ready = self._list_ready()
            heads = [self._queues[stream][0] for stream in ready]
            if not heads or self._episodes or any(job.answers or job.action for job in heads):
                return True
            # As many as in the last step are likely to come again.
            wanted = min(self._last, self._settings.slots)
            deadline = min(job.arrived for job in heads) + self._settings.max_wait_ms / 1000
            while len(self._list_ready()) < wanted and not self._stopping:
                left = deadline - time.perf_counter()
                if left <= 0 or not self._changed.wait(left):
                    break
            return True

    def _list_ready(self) -> list[str]:
        return [stream for stream in self._queues if stream not in self._blocked]

    def _work(self) -> None:
        """Do what can be done now: actions, one step, one step of episodes."""
        with self._changed:
            heads = [self._queues[stream][0] for stream in self._list_ready()]
        existing = [job for job in heads if self._exists(job)]
        # Requests that have begun go on first: a stream is never evicted in the middle of a request.
        resident = {str(job.stream): job for job in sorted(existing, key=lambda job: not job.answers) if job.resident}
        chosen = self._engine.residents.slots.fit(list(resident))
        refused: Mapping[str, Exception]
        try:
            refused = self._engine.residents.admit(chosen)
        except Exception as error:
            refused = dict.fromkeys(chosen, error)
        for stream, error in refused.items():
            self._fail(resident[stream], error)
        ready = [resident[stream] for stream in chosen if stream not in refused]
        jobs = [job for job in (*ready, *(job for job in existing if not job.resident)) if self._begin(job)]
        if jobs:
            self._step(jobs)
        if self._episodes:
            self._step_episodes()

    def _exists(self, job: Job) -> bool:
        """Return whether the stream of a request exists or may be created now; otherwise the request is refused."""
        assert job.stream is not None
        if not job.leased:
            return True
        leases = self._engine.residents.leases
        try:
            if leases is not None and job.stream not in leases.held:
                raise LeaseLost
            if job.stream not in self._engine.residents.records:
                if not job.create:
                    raise Refusal(404, "There is no such stream.")
                if job.sequence not in (None, 1):
                    raise Refusal(409, f"Request {job.sequence} is out of order: the next one is 1.", expected=1)
                self._engine.residents.check_new(job.stream)
        except Refusal as refusal:
            self._fail(job, refusal)
            return False
        return True

    def _begin(self, job: Job) -> bool:
        """Do what needs no step; returns whether a request needs one."""
        assert job.stream is not None
        if job.answers:
            return True
        self._metrics.observe("testtime_stage_seconds", time.perf_counter() - job.arrived, stage="queue")
        try:
            if job.action is not None:
                self._finish(job, *job.action(self._engine))
                return False
            found = self._engine.find_answer(job.stream, job.sequence)
        except Exception as error:
            self._fail(job, error)
            return False
        if found is not None:
            self._finish(job, found, None)
            return False
        return True

    def _step(self, jobs: list[Job]) -> None:
        self._last = len(jobs)
        streams = [job.stream for job in jobs if job.stream is not None]
        try:
            begun = [job for job in jobs if not job.answers and len(job.images) > 1]
            if begun:
                undo = self._engine.make_undo([str(job.stream) for job in begun])
                for job in begun:
                    job.undo = undo
            answers = self._engine.step(streams, [job.images[len(job.answers)] for job in jobs])
        except Exception as error:
            for job in jobs:
                if job.undo is not None:  # a request is learned from whole or not at all
                    job.undo(str(job.stream))
                self._fail(job, error)
            return
        ended: list[tuple[Job, dict[str, Any], bool | None]] = []
        for job, answer in zip(jobs, answers, strict=True):
            job.answers.append(answer)
            if len(job.answers) == len(job.images):
                ended.append((job, *self._engine.finish(str(job.stream), job.sequence, job.images, job.answers)))
        due = [str(job.stream) for job, _, first in ended if first is not None]
        writes = dict(zip(due, self._engine.residents.save(due), strict=True))
        for job, result, first in ended:
            self._finish(job, result, writes[str(job.stream)] if first else None)

    def _step_episodes(self) -> None:
        jobs: list[Job] = []
        with self._changed:
            while self._episodes and sum(len(job.images) for job in jobs) < _EPISODES:
                jobs.append(self._episodes.popleft())
            self.waiting -= sum(len(job.images) for job in jobs)
        try:
            answers = iter(self._engine.predict_episodes([image for job in jobs for image in job.images]))
            for job in jobs:
                _resolve(job.answer, [next(answers) for _ in job.images])
        except Exception as error:
            for job in jobs:
                _reject(job.answer, error)

    def _finish(self, job: Job, result: Any, write: Future[bool] | None) -> None:
        """Answer a request, after its write if there is one; the stream's next request waits, too."""
        assert job.stream is not None
        stream = job.stream
        self._remove(job, block=write is not None)
        leases = self._engine.residents.leases
        fence = None if leases is None or not job.leased else leases.held.get(stream)

        def answer(written: bool) -> None:
            # Whoever took the lease meanwhile does not know this answer, unless it was written in time.
            if leases is None or fence is None or written or leases.is_held(stream, fence):
                _resolve(job.answer, result)
            else:
                _reject(job.answer, LeaseLost())

        if write is None:
            answer(False)
            return

        def go_on(done: Future[bool]) -> None:
            with self._changed:
                self._blocked.discard(stream)
                self._changed.notify_all()
            answer(done.result())

        write.add_done_callback(go_on)

    def _fail(self, job: Job, error: Exception) -> None:
        self._remove(job)
        _reject(job.answer, error)

    def _remove(self, job: Job, block: bool = False) -> None:
        """Remove the first request of a stream; the stream is served last from now on."""
        assert job.stream is not None
        with self._changed:
            queue = self._queues[job.stream]
            assert queue[0] is job
            queue.popleft()
            self.waiting -= max(1, len(job.images))
            if block:
                self._blocked.add(job.stream)
            if queue:
                self._queues.move_to_end(job.stream)
            else:
                del self._queues[job.stream]

    def _expire(self, ttl: float) -> None:
        """Delete streams that were not used for `ttl` seconds."""
        residents, now = self._engine.residents, time.time()
        for record in list(residents.records.values()):
            with self._changed:
                busy = record.id in self._queues or record.id in self._blocked
            if not busy and not record.pinned and now - record.last_seen > ttl:
                try:
                    residents.delete(record.id, "expired")
                    self._metrics.count("testtime_expired_total")
                except LeaseLost:
                    residents.forget(record.id)


def _resolve(answer: Future[Any], result: Any) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_result(result)


def _reject(answer: Future[Any], error: Exception) -> None:
    if not isinstance(error, Refusal):
        log.error("a request failed", exc_info=error)
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)
