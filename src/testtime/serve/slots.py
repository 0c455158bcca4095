"""Which streams are resident: slots, the least recently used first to go, pins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class Slots:
    """Assigns slots to streams.

    Args:
        count: Number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._free = list(range(count))[::-1]
        self.pinned: set[str] = set()
        """Resident or not, these are not evicted."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, stream: str) -> bool:
        return stream in self._slots

    def __getitem__(self, stream: str) -> int:
        return self._slots[stream]

    def list_resident(self) -> list[str]:
        """Return the resident streams, the least recently used first."""
        return list(self._slots)

    def touch(self, stream: str) -> None:
        """Note that a resident stream is used."""
        self._slots.move_to_end(stream)

    def fit(self, streams: Collection[str], busy: Collection[str] = ()) -> list[str]:
        """Return the first of the given streams, as many as can be resident at once beside pinned and busy ones."""
        held, chosen = {stream for stream in (*self.pinned, *busy) if stream in self._slots}, []
        for stream in streams:
            if stream in held or len(held) < self.count:
                held.add(stream)
                chosen.append(stream)
        return chosen

    def find_evicted(self, needed: Collection[str], busy: Collection[str] = ()) -> list[str]:
        """Return which streams have to go so that all `needed` ones can be resident; they fit, see `fit`."""
        missing = sum(stream not in self._slots for stream in needed) - len(self._free)
        if missing <= 0:
            return []
        staying = {*self.pinned, *needed, *busy}
        return [stream for stream in self._slots if stream not in staying][:missing]

    def take(self, stream: str) -> int:
        """Give a free slot to a stream; returns the slot."""
        slot = self._slots[stream] = self._free.pop()
        return slot

    def release(self, stream: str) -> None:
        """Free the slot of a stream, if it has one."""
        slot = self._slots.pop(stream, None)
        if slot is not None:
            self._free.append(slot)
