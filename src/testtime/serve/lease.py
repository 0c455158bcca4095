"""Leases: which process may work on a stream, when several share a state folder.

    leases/DIGEST.json    the owner of a stream and its fencing number
    leases/fence          the last fencing number
    leases/locks/         files to lock
    replicas/NAME.json    the address and the number of a process
    replicas/NAME.beat    a number that grows while the process lives

A lease is taken from an owner that does not live. Whether it lives is a guess: it may only be paused, or slow. Safety
depends neither on the guess nor on any clock: every new lease has a larger fencing number, and a process changes files
of a stream only under a lock, under which it checks that its number is the current one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from testtime.checks import is_integer, is_text
from testtime.serve.refusal import Refusal
from testtime.storage import FileError, error_text, parse_json, write_atomic

fcntl: ModuleType | None
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

TTL = 5.0
"""Seconds without a beat after which a process is taken to be lost."""

_PATIENCE = 2.0  # seconds to wait for a lock, which is held for moments unless its process is paused
_BEATS = 5  # in the time after which a process is taken to be lost


class LeaseLost(Refusal):
    """The lease of a stream is not, or no longer, this process's: nothing was written."""

    def __init__(self) -> None:
        super().__init__(503, "This stream is moving to another replica.", retry_after=1, moved=True)


@dataclass(frozen=True)
class Lease:
    """The lease of a stream.

    Attributes:
        owner: The name of the process that works on the stream.
        fence: The fencing number; every lease has a larger one than all leases before it, of any stream.
    """

    owner: str
    fence: int


def hash_stream(stream: str) -> str:
    """Return what files of a stream are called by, since file systems differ in the names they tell apart."""
    return hashlib.sha256(stream.encode()).hexdigest()[:32]


class Leases:
    """The leases of the streams in a state folder.

    Args:
        path: The state folder.
        owner: The name of this process.
        is_alive: Returns whether the process of a name lives.
        patience: Seconds to wait for a lock.

    Raises:
        FileError: The file system has no locks.
    """

    def __init__(self, path: Path, owner: str, is_alive: Callable[[str], bool], patience: float = _PATIENCE) -> None:
        self.owner, self._is_alive, self._patience = owner, is_alive, patience
        self._path, self._locks = path / "leases", path / "leases" / "locks"
        self.held: dict[str, int] = {}
        """The streams that this process works on, and their fencing numbers; changed by the batcher's thread."""
        self._locks.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            raise FileError(path, "this system has no file locks, which several replicas need")
        try:
            with self._lock("fence"):
                pass
        except TimeoutError:
            pass
        except OSError as error:
            raise FileError(path, f"its file system has no locks ({error_text(error)})") from None

    def find(self, stream: str) -> Lease | None:
        """Return the current lease of a stream, if there is one.

        Raises:
            OSError: It cannot be read.
        """
        try:
            table = parse_json(self._file(stream).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        valid = isinstance(table, dict) and is_text(table.get("owner")) and is_integer(table.get("fence"), 1)
        return Lease(table["owner"], table["fence"]) if valid else None

    def is_held(self, stream: str, fence: int) -> bool:
        """Return whether the lease with a fencing number is the current one of a stream, and this process's."""
        try:
            return self.find(stream) == Lease(self.owner, fence)
        except OSError as error:
            log.error("the lease of a stream cannot be read: %s", error)
            return False

    def acquire(self, stream: str) -> Lease:
        """Take the lease of a stream, unless another process that lives has it; returns the current lease.

        A lease that this process has but does not hold any more is replaced: what it did under it may still be on its
        way to the disk.

        Raises:
            Refusal: Another process does something with the lease.
        """
        try:
            with self._lock(hash_stream(stream)):
                found = self.find(stream)
                if found is not None and self._is_in_use(stream, found):
                    return found
                lease = Lease(self.owner, self._count(0 if found is None else found.fence))
                write_atomic(self._file(stream), json.dumps(asdict(lease)))
                return lease
        except OSError as error:
            log.error("the lease of a stream cannot be taken: %s", error)
            raise Refusal(503, "This stream cannot be moved to this replica now.", retry_after=1) from None

    @contextlib.contextmanager
    def guard(self, stream: str, fence: int) -> Iterator[None]:
        """Hold the lock of a stream, under which no other process can take its lease.

        Raises:
            LeaseLost: The fencing number is not the current one, or not this process's.
            TimeoutError: Another process holds the lock.
        """
        with self._lock(hash_stream(stream)):
            if not self.is_held(stream, fence):
                raise LeaseLost
            yield

    def release(self, stream: str, fence: int) -> None:
        """Give a lease back, if it is still this process's."""
        with contextlib.suppress(LeaseLost, OSError), self.guard(stream, fence):
            self._file(stream).unlink(missing_ok=True)

    def list_digests(self) -> set[str]:
        """Return the hashes of all streams that have a lease."""
        return {name[:-5] for name in os.listdir(self._path) if name.endswith(".json")}

    def _is_in_use(self, stream: str, lease: Lease) -> bool:
        if lease.owner == self.owner:
            return self.held.get(stream) == lease.fence
        return self._is_alive(lease.owner)

    def _file(self, stream: str) -> Path:
        return self._path / f"{hash_stream(stream)}.json"

    def _count(self, least: int) -> int:
        """Return the next fencing number, larger than `least`."""
        file = self._path / "fence"
        with self._lock("fence"):
            last = int(file.read_text()) if file.exists() else 0
            write_atomic(file, str(max(last, least) + 1))
        return max(last, least) + 1

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        # A file for all streams whose hash begins alike: files to lock must never be removed, and should be few.
        handle = os.open(self._locks / (name if name == "fence" else name[:2]), os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self._patience
        try:
            assert fcntl is not None
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError("another process holds the lock of a stream") from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(handle)


class Beats:
    """Signs of life of the processes that share a state folder.

    A process is taken to be lost if its number has not changed for `ttl` seconds by the clock of the one who asks, so
    that clocks need not agree.

    Args:
        path: The state folder.
        name: The name of this process; None to watch only.
        address: Where it can be reached.
        ttl: Seconds without a beat after which a process is taken to be lost.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        path: Path,
        name: str | None = None,
        address: str = "",
        ttl: float = TTL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl, self._path, self._name, self._clock = ttl, path / "replicas", name, clock
        self._number, self._stopping = 0, threading.Event()
        self._seen: dict[str, tuple[bytes, float]] = {}  # name → its number, and when it was first seen
        self._path.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="testtime-beat", daemon=True)
        if name is not None:
            self.beat()
            write_atomic(self._path / f"{name}.json", json.dumps({"address": address, "pid": os.getpid()}))

    def start(self) -> None:
        """Beat and watch the others, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and let the others know."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._name is not None:
            for end in ("json", "beat"):
                (self._path / f"{self._name}.{end}").unlink(missing_ok=True)

    def beat(self) -> None:
        """Give a sign of life. It overwrites a file in place, which a full disk does not prevent."""
        self._number += 1
        handle = os.open(self._path / f"{self._name}.beat", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(handle, b"%020d" % self._number, 0)
        finally:
            os.close(handle)

    def is_alive(self, name: str) -> bool:
        """Return whether a process gives signs of life; one that is seen for the first time is given time."""
        if name == self._name:
            return True
        try:
            number, now = (self._path / f"{name}.beat").read_bytes(), self._clock()
        except FileNotFoundError:
            self._seen.pop(name, None)
            return False
        before = self._seen.get(name)
        if before is None or before[0] != number:
            self._seen[name] = number, now
            return True
        return now - before[1] < self.ttl

    def list_alive(self) -> dict[str, str]:
        """Return the names and the addresses of the processes that live, this one included."""
        found: dict[str, str] = {}
        for file in sorted(self._path.glob("*.json")):
            if self.is_alive(file.stem) and (address := self.find_address(file.stem)) is not None:
                found[file.stem] = address
        return found

    def find_address(self, name: str) -> str | None:
        """Return where a process can be reached, if it is there."""
        try:
            return str(parse_json((self._path / f"{name}.json").read_bytes())["address"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _run(self) -> None:
        while not self._stopping.wait(self.ttl / _BEATS):
            try:
                if self._name is not None:
                    self.beat()
                self.list_alive()
            except OSError as error:  # noqa: PERF203 (the next beat may succeed)
                log.error("no sign of life can be given: %s", error_text(error))
