"""Steps on their way: a GPU computes one while the next is prepared and the requests of the last are answered.

    launch    start a step with the next images of some requests
    settle    once all images of a request are computed: count them, act on a collapse, write, answer

At most two steps are launched and not computed. A stream has no next request before the last one is settled, and is
not evicted either. On a CPU a step is computed when it is launched, and its requests are settled at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from testtime.serve.engine import Both, Engine
from testtime.serve.replies import Replies
from testtime.serve.step import Step
from testtime.serve.waiting import Job, Waiting

_LAUNCHED = 2  # steps at most that are not computed
_SETTLED = 64  # images to settle before the next look for what can be launched


class Pipeline:
    """The steps that are launched, and the requests to be settled.

    Args:
        engine: The streams.
        waiting: Where the requests are.
        replies: How they end.
    """

    def __init__(self, engine: Engine, waiting: Waiting, replies: Replies) -> None:
        self._engine, self._waiting, self._replies = engine, waiting, replies
        self._running: deque[Step] = deque()  # not known to be computed
        self._launched: deque[Job] = deque()  # whole requests, to be settled
        self.last = 1
        """Number of streams in the last step."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is launched that is not settled."""
        return not self._running and not self._launched

    def list_streams(self) -> set[str]:
        """Return the streams with a request to be settled, which must stay as they are until then."""
        return {str(job.stream) for job in self._launched}

    def may_launch(self, ready: Sequence[Job]) -> bool:
        """Return whether to launch a step now, rather than later, together with more requests.

        While others are to be settled, single images wait for as many as in the last step: a step of few costs nearly
        as much of this thread's time. Requests of several images begin at once, since others can join them.

        Args:
            ready: The requests that could take part.
        """
        self._look()
        if self.is_empty:
            return True
        if self._running and self._launched and self._launched[0].outputs[-1][0] not in self._running:
            return False  # the device is busy meanwhile, and the next requests of these streams can take part
        return len(self._running) < _LAUNCHED and (len(ready) >= self.last or any(len(job.images) > 1 for job in ready))

    def launch(self, jobs: list[Job]) -> None:
        """Start a step with the next image of each request; if that fails, the requests do."""
        self.last = len(jobs)
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
                self._replies.undo(job, error)
            return
        self._running.append(step)
        for number, job in enumerate(jobs):
            job.outputs.append((step, number))
            if job.is_launched:
                self._waiting.block(str(job.stream))
                self._launched.append(job)

    def settle(self, wait: bool) -> None:
        """Answer requests whose images are all computed, some if there are many.

        Args:
            wait: Whether to wait for a step if there are none.
        """
        self._look()
        settled: list[Job] = []
        while self._launched and (step := self._launched[0].outputs[-1][0]) not in self._running:
            settled.append(self._launched.popleft())
            # On a GPU, whoever is answered may send the next images while others are still to be answered.
            if step.is_asynchronous and sum(len(job.images) for job in settled) >= _SETTLED:
                break
        if settled:
            self._answer(settled)
        elif wait and self._running:
            self._running[0].wait()

    def _look(self) -> None:
        """Find out which steps are computed."""
        while self._running and self._running[0].is_done:
            self._engine.note(self._running.popleft())

    def _answer(self, jobs: list[Job]) -> None:
        """Answer requests whose images are all computed."""
        failed = {job: step.error for job in jobs for step, _ in job.outputs if step.error is not None}
        for job, error in failed.items():
            self._replies.undo(job, error)
        sound = [job for job in jobs if job not in failed]
        try:
            answers = self._engine.read([job.outputs for job in sound])
        except Exception as error:
            for job in sound:
                self._replies.undo(job, error)
            return
        ended = [(job, *one) for job, found in zip(sound, answers, strict=True) if (one := self._end(job, found))]
        due = [str(job.stream) for job, _, first in ended if first is not None]
        try:
            writes = dict(zip(due, self._engine.residents.save(due), strict=True))
        except Exception as error:  # the requests are learned from, but would be lost by a crash
            for job, _, _ in ended:
                self._replies.fail(job, error)
            return
        for job, result, first in ended:
            self._replies.finish(job, result, writes[str(job.stream)] if first else None)

    def _end(self, job: Job, found: list[Both]) -> tuple[dict[str, Any], bool | None] | None:
        try:
            return self._engine.finish(str(job.stream), job.sequence, job.images, found)
        except Exception as error:
            self._replies.fail(job, error)
            return None
