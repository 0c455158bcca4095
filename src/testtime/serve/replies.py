"""How requests end: with an answer, after a write if it has to be first, or with an error."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from testtime.serve.lease import LeaseLost, Leases
from testtime.serve.refusal import Refusal
from testtime.serve.waiting import Job, Waiting

log = logging.getLogger(__name__)


class Replies:
    """Ends requests of streams.

    Args:
        waiting: Where the requests are; the one to end is the first of its stream.
        leases: The leases of streams, if there are any.
    """

    def __init__(self, waiting: Waiting, leases: Leases | None) -> None:
        self._waiting, self._leases = waiting, leases

    def finish(self, job: Job, result: Any, write: Future[bool] | None) -> None:
        """Answer a request, after its write if there is one; the stream's next request waits, too."""
        assert job.stream is not None
        stream = job.stream
        self._waiting.remove(job)
        leases = self._leases
        fence = None if leases is None or not job.leased else leases.held.get(stream)

        def answer(written: bool) -> None:
            # Whoever took the lease meanwhile does not know this answer, unless it was written in time.
            if leases is None or fence is None or written or leases.is_held(stream, fence):
                resolve(job.answer, result)
            else:
                reject(job.answer, LeaseLost())

        if write is None:
            self._waiting.unblock(stream)
            answer(False)
            return
        self._waiting.block(stream)

        def go_on(done: Future[bool]) -> None:
            self._waiting.unblock(stream)
            answer(done.result())

        write.add_done_callback(go_on)

    def fail(self, job: Job, error: Exception) -> None:
        """Refuse a request, or report that it has failed."""
        self._waiting.remove(job)
        self._waiting.unblock(str(job.stream))
        reject(job.answer, error)

    def undo(self, job: Job, error: Exception) -> None:
        """Fail a request of which some images may have been learned from: it is whole or not at all."""
        try:
            if job.undo is not None:
                job.undo(str(job.stream))
        except Exception:  # the device may be lost; others wait for their answers, too
            log.exception("what a request has learned could not be undone")
        self.fail(job, error)


def resolve(answer: Future[Any], result: Any) -> None:
    """Set a result, if anybody waits for it."""
    if answer.set_running_or_notify_cancel():
        answer.set_result(result)


def reject(answer: Future[Any], error: Exception) -> None:
    """Set an error, if anybody waits; what is not a refusal is logged."""
    if not isinstance(error, Refusal):
        log.error("a request failed", exc_info=error)
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)
