"""Requests become steps: those of different streams are gathered, those of one stream keep their order.

A GPU computes a step while this thread prepares the next one and makes the answers of the last one:

    launch    gather the next image of each stream that is ready, and start the step
    settle    once all images of a request are computed: count them, act on a collapse, write, answer

At most two steps are launched and not computed. A stream has no next request before the last one is settled, and is
not evicted either. On a CPU a step is computed when it is launched, and its requests are settled at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from testtime.serve.engine import Both, Engine
from testtime.serve.lease import LeaseLost
from testtime.serve.metrics import Metrics
from testtime.serve.refusal import Refusal
from testtime.serve.settings import ServeSettings
from testtime.serve.step import Step
from testtime.serve.waiting import Job, Waiting

log = logging.getLogger(__name__)

_EPISODES = 16  # images of one step
_IDLE = 1.0  # seconds between looks for expired streams
_LAUNCHED = 2  # steps at most that are not computed
_SETTLED = 64  # images to settle before the next look for what can be launched


class Batcher:
    """Works on requests, in a thread.

    Args:
        engine: The streams.
        settings: The settings of the service.
        metrics: Where everything is counted.
    """

    def __init__(self, engine: Engine, settings: ServeSettings, metrics: Metrics) -> None:
        self._engine, self._settings, self._metrics = engine, settings, metrics
        self._waiting = Waiting(settings.max_queue)
        self._running: deque[Step] = deque()  # not known to be computed
        self._launched: deque[Job] = deque()  # whole requests, to be settled
        self._last = 1  # streams in the last step
        self._thread = threading.Thread(target=self._run, name="testtime-batcher", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are worked on."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Number of waiting images."""
        return self._waiting.images

    def submit(self, job: Job) -> Future[Any]:
        """Add a request to the queue; returns a future of its answer.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        self._waiting.add(job)
        return job.answer

    def stop(self) -> None:
        """Finish all requests and stop; new ones are refused."""
        self._waiting.stop()
        self._thread.join()

    def _run(self) -> None:
        swept = time.monotonic()
        while self._running or self._launched or self._wait():
            try:
                self._work()
            except Exception:  # must not end the thread
                log.exception("an error in the batcher")
            if self._settings.ttl is not None and time.monotonic() - swept > min(_IDLE, self._settings.ttl):
                swept = time.monotonic()
                self._expire(self._settings.ttl)

    def _wait(self) -> bool:
        """Wait for requests, and a little longer for others to share their step; returns False to stop."""
        if not self._waiting.wait(_IDLE):
            return False
        heads = self._waiting.list_ready()
        if heads and not self._waiting.episodes and not any(job.outputs or job.action for job in heads):
            # As many as in the last step are likely to come again.
            wanted = min(self._last, self._settings.slots)
            self._waiting.wait_for_more(wanted, min(job.arrived for job in heads) + self._settings.max_wait_ms / 1000)
        return True

    def _work(self) -> None:
        """Do what can be done now: actions, one step, one step of episodes, answers; if there is nothing, wait."""
        self._look()
        jobs = self._gather() if self._may_launch() else []
        if jobs:
            self._launch(jobs)
        if self._waiting.episodes:
            self._step_episodes()
        self._look()
        settled: list[Job] = []
        while self._launched and (step := self._launched[0].outputs[-1][0]) not in self._running:
            settled.append(self._launched.popleft())
            # On a GPU, whoever is answered may send the next images while others are still to be answered.
            if step.is_asynchronous and sum(len(job.images) for job in settled) >= _SETTLED:
                break
        if settled:
            self._settle(settled)
        elif not jobs and self._running:
            self._running[0].wait()

    def _may_launch(self) -> bool:
        """Return whether to launch a step now, rather than when others are computed, together with more requests."""
        if not self._running:
            return True
        heads = self._waiting.list_ready() if len(self._running) < _LAUNCHED else []
        return len(heads) >= self._last or any(job.outputs for job in heads)

    def _look(self) -> None:
        """Find out which steps are computed."""
        while self._running and self._running[0].is_done:
            self._engine.note(self._running.popleft())

    def _gather(self) -> list[Job]:
        """Return the requests of the next step; actions are done, and what cannot be served is refused."""
        existing = [job for job in self._waiting.list_ready() if self._exists(job)]
        # Requests that have begun go on first: a stream is never evicted in the middle of a request.
        resident = {str(job.stream): job for job in sorted(existing, key=lambda job: not job.outputs) if job.resident}
        busy = {str(job.stream) for job in self._launched}
        chosen = self._engine.residents.slots.fit(list(resident), busy)
        refused: Mapping[str, Exception]
        try:
            refused = self._engine.residents.admit(chosen, busy)
        except Exception as error:
            refused = dict.fromkeys(chosen, error)
        for stream, error in refused.items():
            self._fail(resident[stream], error)
        ready = [resident[stream] for stream in chosen if stream not in refused]
        return [job for job in (*ready, *(job for job in existing if not job.resident)) if self._begin(job)]

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
        if job.outputs:
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

    def _launch(self, jobs: list[Job]) -> None:
        """Start a step with the next image of each request."""
        self._last = len(jobs)
        try:
            begun = [job for job in jobs if not job.outputs and len(job.images) > 1]
            if begun:
                undo = self._engine.make_undo([str(job.stream) for job in begun])
                for job in begun:
                    job.undo = undo
            step = self._engine.launch(
                [str(job.stream) for job in jobs], [job.images[len(job.outputs)] for job in jobs]
            )
        except Exception as error:
            for job in jobs:
                self._undo(job, error)
            return
        self._running.append(step)
        for number, job in enumerate(jobs):
            job.outputs.append((step, number))
            if job.is_launched:
                self._waiting.block(str(job.stream))
                self._launched.append(job)

    def _settle(self, jobs: list[Job]) -> None:
        """Answer requests whose images are all computed."""
        failed = {job: step.error for job in jobs for step, _ in job.outputs if step.error is not None}
        for job, error in failed.items():
            self._undo(job, error)
        sound = [job for job in jobs if job not in failed]
        try:
            answers = self._engine.read([job.outputs for job in sound])
        except Exception as error:
            for job in sound:
                self._undo(job, error)
            return
        ended = [(job, *one) for job, found in zip(sound, answers, strict=True) if (one := self._end(job, found))]
        due = [str(job.stream) for job, _, first in ended if first is not None]
        try:
            writes = dict(zip(due, self._engine.residents.save(due), strict=True))
        except Exception as error:  # the requests are learned from, but would be lost by a crash
            for job, _, _ in ended:
                self._fail(job, error)
            return
        for job, result, first in ended:
            self._finish(job, result, writes[str(job.stream)] if first else None)

    def _end(self, job: Job, found: list[Both]) -> tuple[dict[str, Any], bool | None] | None:
        try:
            return self._engine.finish(str(job.stream), job.sequence, job.images, found)
        except Exception as error:
            self._fail(job, error)
            return None

    def _undo(self, job: Job, error: Exception) -> None:
        """Fail a request of which some images may have been learned from: it is whole or not at all."""
        try:
            if job.undo is not None:
                job.undo(str(job.stream))
        finally:
            self._fail(job, error)

    def _step_episodes(self) -> None:
        jobs = self._waiting.take_episodes(_EPISODES)
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
        self._waiting.remove(job)
        leases = self._engine.residents.leases
        fence = None if leases is None or not job.leased else leases.held.get(stream)

        def answer(written: bool) -> None:
            # Whoever took the lease meanwhile does not know this answer, unless it was written in time.
            if leases is None or fence is None or written or leases.is_held(stream, fence):
                _resolve(job.answer, result)
            else:
                _reject(job.answer, LeaseLost())

        if write is None:
            self._waiting.unblock(stream)
            answer(False)
            return
        self._waiting.block(stream)

        def go_on(done: Future[bool]) -> None:
            self._waiting.unblock(stream)
            answer(done.result())

        write.add_done_callback(go_on)

    def _fail(self, job: Job, error: Exception) -> None:
        self._waiting.remove(job)
        self._waiting.unblock(str(job.stream))
        _reject(job.answer, error)

    def _expire(self, ttl: float) -> None:
        """Delete streams that were not used for `ttl` seconds."""
        residents, now = self._engine.residents, time.time()
        for record in list(residents.records.values()):
            if not self._waiting.is_busy(record.id) and not record.pinned and now - record.last_seen > ttl:
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
