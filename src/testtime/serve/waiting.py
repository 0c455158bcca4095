"""Requests that wait or are worked on: those of one stream in their order, streams in turn."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from testtime.serve.refusal import Refusal
from testtime.serve.step import Output

if TYPE_CHECKING:
    from testtime.serve.engine import Engine

_PER_STREAM = 64  # waiting requests of one stream

Action = Callable[["Engine"], tuple[Any, "Future[bool] | None"]]


@dataclass(eq=False)
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
        outputs: Of the first images, those of the steps that were launched.
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
    outputs: list[Output] = field(default_factory=list)
    undo: Callable[[str], None] | None = None
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def is_launched(self) -> bool:
        """Whether steps were launched for all images."""
        return len(self.outputs) == len(self.images)


class Waiting:
    """The requests, for any thread to add to and one thread to take from.

    Args:
        max_images: Maximum number of waiting images.
    """

    def __init__(self, max_images: int) -> None:
        self._max_images = max_images
        self.changed = threading.Condition()
        """Notified of new requests, of streams that can go on, and of the end."""
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()  # of streams, those to serve next first
        self._blocked: set[str] = set()  # streams whose last request is not settled yet, or waits for a write
        self.episodes: deque[Job] = deque()
        """Requests without a stream."""
        self.images = 0
        """Number of waiting images."""
        self.is_stopping = False
        self._wanted = 1  # streams with a request that somebody waits for; waking for each takes time from others

    def add(self, job: Job) -> None:
        """Add a request.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        with self.changed:
            if self.is_stopping:
                raise Refusal(503, "The service is stopping.", retry_after=10)
            size = max(1, len(job.images))
            if self.images and self.images + size > self._max_images:
                raise Refusal(429, f"{self.images} images are already waiting.", retry_after=1)
            if job.stream is None:
                self.episodes.append(job)
            else:
                queue = self._queues.setdefault(job.stream, deque())
                if len(queue) >= _PER_STREAM:
                    raise Refusal(409, f"This stream is busy: {len(queue)} of its requests are waiting.", retry_after=1)
                queue.append(job)
            self.images += size
            if job.stream is None or len(self._queues) >= self._wanted:
                self.changed.notify_all()

    def stop(self) -> None:
        """Refuse new requests from now on."""
        with self.changed:
            self.is_stopping = True
            self.changed.notify_all()

    def list_ready(self) -> list[Job]:
        """Return the first request of each stream that is not blocked, those to serve next first."""
        with self.changed:
            return [queue[0] for stream, queue in self._queues.items() if stream not in self._blocked]

    def wait(self, seconds: float) -> bool:
        """Wait for a request that can be worked on; returns False if none will come."""
        with self.changed:
            if not self.list_ready() and not self.episodes:
                if self.is_stopping and not self._queues:
                    return False
                self.changed.wait(seconds)
            return True

    def wait_for_more(self, wanted: int, deadline: float) -> None:
        """Wait until so many streams have a request, or until a time."""
        with self.changed:
            self._wanted = wanted
            while len(self.list_ready()) < wanted and not self.is_stopping:
                left = deadline - time.perf_counter()
                if left <= 0 or not self.changed.wait(left):
                    break
            self._wanted = 1

    def is_busy(self, stream: str) -> bool:
        """Return whether a stream has a request."""
        with self.changed:
            return stream in self._queues or stream in self._blocked

    def block(self, stream: str) -> None:
        """Let the requests of a stream wait."""
        with self.changed:
            self._blocked.add(stream)

    def unblock(self, stream: str) -> None:
        """Let the requests of a stream go on."""
        with self.changed:
            self._blocked.discard(stream)
            self.changed.notify_all()

    def remove(self, job: Job) -> None:
        """Remove the first request of a stream; the stream is served last from now on."""
        assert job.stream is not None
        with self.changed:
            queue = self._queues[job.stream]
            assert queue[0] is job
            queue.popleft()
            self.images -= max(1, len(job.images))
            if queue:
                self._queues.move_to_end(job.stream)
            else:
                del self._queues[job.stream]

    def take_episodes(self, most: int) -> list[Job]:
        """Remove and return requests without a stream, of about so many images."""
        jobs: list[Job] = []
        with self.changed:
            while self.episodes and sum(len(job.images) for job in jobs) < most:
                jobs.append(self.episodes.popleft())
            self.images -= sum(len(job.images) for job in jobs)
        return jobs
