"""Events for those who watch: every answer, and whatever happens to streams."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

_WATCHERS = 16  # at once
_BACKLOG = 1000  # events of a watcher who reads too slowly; older ones are dropped
_BEAT = 15.0  # seconds between signs of life


class Events:
    """Distributes events to watchers as server-sent events."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._closed = False

    @property
    def is_watched(self) -> bool:
        """Whether there is a watcher."""
        return bool(self._watchers)

    @property
    def is_full(self) -> bool:
        """Whether there are as many watchers as are allowed."""
        return len(self._watchers) >= _WATCHERS

    def publish(self, kind: str, **data: Any) -> None:
        """Send an event to all watchers, from any thread."""
        for watcher in list(self._watchers):
            watcher.put(kind, data)

    def close(self) -> None:
        """End all streams of events; to be called from the event loop."""
        self._closed = True
        for watcher in list(self._watchers):
            watcher.ready.set()

    async def watch(self) -> AsyncIterator[str]:
        """Yield events in the format of server-sent events, until closed."""
        watcher = _Watcher(asyncio.get_running_loop())
        self._watchers.add(watcher)
        try:
            yield "retry: 2000\n\n"
            while not self._closed:
                try:
                    await asyncio.wait_for(watcher.ready.wait(), _BEAT)
                except asyncio.TimeoutError:
                    yield ": \n\n"
                watcher.ready.clear()
                while watcher.waiting:
                    kind, data = watcher.waiting.popleft()
                    yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready = asyncio.Event()
        self.waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_BACKLOG)
        self._loop = loop

    def put(self, kind: str, data: dict[str, Any]) -> None:
        self.waiting.append((kind, data))
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.ready.set)
