"""Requests become steps: those of different streams are gathered, those of one stream keep their order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from testtime.serve.engine import Engine
from testtime.serve.lease import LeaseLost
from testtime.serve.metrics import Metrics
from testtime.serve.pipeline import Pipeline
from testtime.serve.refusal import Refusal
from testtime.serve.replies import Replies, reject, resolve
from testtime.serve.settings import ServeSettings
from testtime.serve.waiting import Job, Waiting

log = logging.getLogger(__name__)

_EPISODES = 16  # images of one step
_IDLE = 1.0  # seconds between looks for expired streams


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
        self._replies = Replies(self._waiting, engine.residents.leases)
        self._pipeline = Pipeline(engine, self._waiting, self._replies)
        self._undeleted: set[str] = set()  # expired streams that could not be deleted
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
        while not self._pipeline.is_empty or self._wait():
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
            wanted = min(self._pipeline.last, self._settings.slots)
            self._waiting.wait_for_more(wanted, min(job.arrived for job in heads) + self._settings.max_wait_ms / 1000)
        return True

    def _work(self) -> None:
        """Do what can be done now: actions, one step, one step of episodes, answers; if there is nothing, wait."""
        jobs = self._gather() if self._pipeline.may_launch(self._waiting.list_ready()) else []
        if jobs:
            self._pipeline.launch(jobs)
        if self._waiting.episodes:
            self._step_episodes()
        self._pipeline.settle(wait=not jobs)

    def _gather(self) -> list[Job]:
        """Return the requests of the next step; actions are done, and what cannot be served is refused."""
        existing = [job for job in self._waiting.list_ready() if self._exists(job)]
        # Requests that have begun go on first: a stream is never evicted in the middle of a request.
        resident = {str(job.stream): job for job in sorted(existing, key=lambda job: not job.outputs) if job.resident}
        busy = self._pipeline.list_streams()
        chosen = self._engine.residents.slots.fit(list(resident), busy)
        refused: Mapping[str, Exception]
        try:
            refused = self._engine.residents.admit(chosen, busy)
        except Exception as error:
            refused = dict.fromkeys(chosen, error)
        for stream, error in refused.items():
            self._replies.fail(resident[stream], error)
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
            self._replies.fail(job, refusal)
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
                self._replies.finish(job, *job.action(self._engine))
                return False
            found = self._engine.find_answer(job.stream, job.sequence)
        except Exception as error:
            self._replies.fail(job, error)
            return False
        if found is not None:
            self._replies.finish(job, found, None)
            return False
        return True

    def _step_episodes(self) -> None:
        jobs = self._waiting.take_episodes(_EPISODES)
        try:
            answers = iter(self._engine.predict_episodes([image for job in jobs for image in job.images]))
            for job in jobs:
                resolve(job.answer, [next(answers) for _ in job.images])
        except Exception as error:
            for job in jobs:
                reject(job.answer, error)

    def _expire(self, ttl: float) -> None:
        """Delete streams that were not used for `ttl` seconds; what fails is tried again next time."""
        residents, now = self._engine.residents, time.time()
        failed: set[str] = set()
        for record in list(residents.records.values()):
            if not self._waiting.is_busy(record.id) and not record.pinned and now - record.last_seen > ttl:
                try:
                    residents.delete(record.id, "expired")
                    self._metrics.count("testtime_expired_total")
                except LeaseLost:
                    residents.forget(record.id)
                except Refusal as refusal:
                    failed.add(record.id)
                    if record.id not in self._undeleted:
                        log.error("the stream %s has expired: %s", record.id, refusal)
        self._undeleted = failed
