"""Leases: one owner of a stream at a time, whatever processes and clocks do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from testtime.serve.folder import StateFolder
from testtime.serve.lease import Beats, Lease, LeaseLost, Leases
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal

IDENTITY = {"network": "a", "method": "b"}


def open_leases(path: Path, owner: str, *alive: str, patience: float = 2.0) -> Leases:
    return Leases(path, owner, lambda name: name in alive, patience)


def start(code: str, *given: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pause(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_lease_is_taken_only_from_those_who_do_not_live(tmp_path: Path) -> None:
    first = open_leases(tmp_path, "first", "second")
    second = open_leases(tmp_path, "second", "first", "third")
    assert first.find("a") is None
    lease = first.acquire("a")
    first.held["a"] = lease.fence
    assert lease == first.acquire("a") == second.acquire("a") == second.find("a") == Lease("first", 1)
    third = open_leases(tmp_path, "third")  # to whom the first does not live
    assert third.acquire("a") == second.acquire("a") == Lease("third", 2)
    assert (first.is_held("a", 1), third.is_held("a", 2), third.is_held("a", 1)) == (False, True, False)
    with pytest.raises(LeaseLost), first.guard("a", 1):
        raise AssertionError("not reached")


def test_fencing_numbers_grow_over_all_streams_also_after_a_release(tmp_path: Path) -> None:
    leases, numbers = open_leases(tmp_path, "me"), []
    for stream in ("a", "b", "a", "a"):
        numbers.append(leases.acquire(stream).fence)
        leases.release(stream, numbers[-1])
        assert leases.find(stream) is None
        assert not leases.is_held(stream, numbers[-1])
    assert numbers == [1, 2, 3, 4]


def test_a_release_by_a_former_owner_changes_nothing(tmp_path: Path) -> None:
    first, second = open_leases(tmp_path, "first"), open_leases(tmp_path, "second")
    lease = first.acquire("a")
    second.acquire("a")
    first.release("a", lease.fence)
    assert second.find("a") == Lease("second", 2)


def test_a_lease_not_held_any_more_is_replaced(tmp_path: Path) -> None:
    # What was done under the former number may still be on its way to the disk.
    leases = open_leases(tmp_path, "me")
    assert [leases.acquire("a").fence for _ in range(2)] == [1, 2]


def test_a_damaged_lease_is_none_and_its_successor_is_larger(tmp_path: Path) -> None:
    leases = open_leases(tmp_path, "me")
    leases.acquire("a")
    (file,) = (tmp_path / "leases").glob("*.json")
    for content in ("", "{", "[]", '{"owner": 3, "fence": 1}', '{"owner": "x"}'):
        file.write_text(content)
        assert leases.find("a") is None
    assert leases.acquire("a").fence == 2


CONTENDER = """
    import sys
    from pathlib import Path
    from testtime.serve.lease import Leases
    leases = Leases(Path(sys.argv[1]), sys.argv[2], lambda name: True)
    print("ready", flush=True)
    while not Path(sys.argv[1], "go").exists():
        pass
    for number in range(150):
        lease = leases.acquire(str(number))
        leases.held[str(number)] = lease.fence
        print(lease.owner, lease.fence, flush=True)
"""


def test_two_processes_agree_on_one_owner_of_each_of_many_streams(tmp_path: Path) -> None:
    both = [start(CONTENDER, tmp_path, name) for name in ("first", "second")]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    said = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert said[0] == said[1]
    assert len(said[0]) == 150
    assert sorted(int(line.split()[1]) for line in said[0]) == list(range(1, 151))


WRITER = """
    import sys, time
    from pathlib import Path
    from testtime.serve.lease import LeaseLost, Leases
    folder = Path(sys.argv[1])
    leases, file = Leases(folder, "paused", lambda name: True), folder / "file"
    fence = leases.acquire("a").fence
    inside = sys.argv[2] == "inside"
    print("ready", flush=True)
    while True:
        try:
            with leases.guard("a", fence):
                file.write_text("paused")
                if inside:
                    print("inside", flush=True)
                    time.sleep(60)
        except LeaseLost:
            print("refused", flush=True)
            break
        time.sleep(0.05)  # outside of the lock, most of the time
"""


def test_a_paused_owner_that_wakes_after_its_lease_was_taken_is_refused(tmp_path: Path) -> None:
    process = start(WRITER, tmp_path, "outside")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        leases, file = open_leases(tmp_path, "me", patience=0.2), tmp_path / "file"
        wait_for(file.exists)
        while True:  # until it is paused outside of the lock
            pause(process)
            try:
                fence = leases.acquire("a").fence
                break
            except Refusal:
                process.send_signal(signal.SIGCONT)
        with leases.guard("a", fence):
            file.write_text("mine")
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "refused\n"
        assert file.read_text() == "mine"
    finally:
        process.kill()
        process.communicate()


def test_an_owner_paused_while_it_writes_keeps_its_lease_until_it_is_killed(tmp_path: Path) -> None:
    process = start(WRITER, tmp_path, "inside")
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "inside\n"]
        pause(process)
        leases = open_leases(tmp_path, "me", patience=0.1)
        with pytest.raises(Refusal) as caught:
            leases.acquire("a")
        assert (caught.value.status, leases.find("a")) == (503, Lease("paused", 1))
    finally:
        process.kill()
        process.communicate()
    assert leases.acquire("a") == Lease("me", 2)


def make_folder(path: Path, owner: str, *alive: str) -> StateFolder:
    return StateFolder(path, IDENTITY, 2, open_leases(path, owner, *alive))


def test_files_are_changed_by_the_current_owner_only(tmp_path: Path) -> None:
    old, new = make_folder(tmp_path, "old"), make_folder(tmp_path, "new")
    assert old.leases is not None
    assert new.leases is not None
    record, state = StreamRecord("a"), {"x": torch.zeros(3)}
    first = old.leases.acquire("a").fence
    old.write("a", record.describe() | {"version": 1}, state, True, first)
    second = new.leases.acquire("a").fence
    new.write("a", record.describe() | {"version": 2}, state, True, second)
    before = {file: file.read_bytes() for file in sorted((tmp_path / "streams").rglob("*")) if file.is_file()}
    assert len(before) == 3
    with pytest.raises(LeaseLost):
        old.write("a", record.describe() | {"version": 3}, state, True, first)
    with pytest.raises(LeaseLost):
        old.delete("a", first)
    old.leases.held["a"] = first
    with pytest.raises(LeaseLost):
        old.drop_version("a", 2)
    assert {file: file.read_bytes() for file in sorted((tmp_path / "streams").rglob("*")) if file.is_file()} == before
    found = new.find_record("a")
    assert found is not None
    assert found.version == 2
    new.delete("a", second)
    new.leases.release("a", second)
    with pytest.raises(LeaseLost):  # also when there is nothing to be protected any more
        old.write("a", record.describe(), state, False, first)
    assert old.find_record("a") is None
    old.close(), new.close()


def test_a_race_of_writers_ends_with_the_last_lease(tmp_path: Path) -> None:
    """Owners take a lease from each other and write as fast as they can: files never go back."""
    seen: list[int] = []
    lock = threading.Lock()

    def work(name: str) -> None:
        leases = open_leases(tmp_path, name)
        for _ in range(20):
            fence = leases.acquire("a").fence
            with contextlib.suppress(LeaseLost):
                for _ in range(3):
                    with leases.guard("a", fence), lock:
                        seen.append(fence)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_who_lives_is_seen_with_the_clock_of_the_one_who_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    owner = Beats(tmp_path, "owner", "127.0.0.1:1", ttl=5, clock=lambda: -1e9)
    observer = Beats(tmp_path, ttl=5, clock=lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 4e9)  # the time of day plays no part
    assert observer.is_alive("owner")
    now[0] += 4.9
    assert observer.list_alive() == {"owner": "127.0.0.1:1"}
    now[0] += 0.2
    assert not observer.is_alive("owner")
    assert observer.list_alive() == {}
    owner.beat()
    assert observer.is_alive("owner")  # it was only paused
    now[0] += 4.9
    assert observer.is_alive("owner")
    owner.stop()
    assert not observer.is_alive("owner")
    assert not observer.is_alive("unknown")


def test_beats_go_on_by_themselves(tmp_path: Path) -> None:
    owner, observer = Beats(tmp_path, "owner", ttl=0.5), Beats(tmp_path, ttl=0.5)
    owner.start()
    for _ in range(10):
        assert observer.is_alive("owner")
        time.sleep(0.15)
    owner.stop()
    assert not list((tmp_path / "replicas").iterdir())
