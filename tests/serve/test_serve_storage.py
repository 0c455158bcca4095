"""The state folder and the writer: files are whole, damage is survived, a full disk loses nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_serve_engine import ask, expect, found, run

from serving import METHOD, image, make_service, open_client, open_engine, send, wait_for_expiry
from testtime import Method
from testtime.serve import folder as folders
from testtime.serve.folder import StateFolder
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.writer import Entry
from testtime.storage import FileError, FolderError

IDENTITY = {"network": "a", "settings": "b"}


def fill(folder: StateFolder, stream: str, version: int, store: bool = False) -> None:
    record = StreamRecord(stream, version=version).describe()
    folder.write(stream, record, {"x": torch.full((2,), float(version))}, store)


def test_states_and_versions_come_back(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, IDENTITY, versions=2)
    for version in range(5):
        fill(folder, "a", version, store=version < 4)
    assert folder.list_versions("a") == [2, 3]
    for version, expected in ((None, 4), (2, 2), (3, 3)):
        record, tensors = folder.read("a", version)
        assert (record.version, tensors["x"].tolist()) == (expected, [float(expected)] * 2)
    assert [record.id for record in folder.list_streams() if isinstance(record, StreamRecord)] == ["a"]
    for call in (lambda: folder.read("a", 1), lambda: folder.read("b")):
        with pytest.raises(FileError, match=r"no such"):
            call()
    folder.delete("a")
    assert list(folder.list_streams()) == []


def test_a_file_that_vanishes_meanwhile_does_not_end_a_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, unlink, calls = StateFolder(tmp_path, IDENTITY, versions=2), os.unlink, []
    for version in range(2):
        fill(folder, "a", version, store=True)

    def unlink_twice(path: Any, **given: Any) -> None:
        unlink(path, **given)
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "unlink", unlink_twice)
    folder.delete("a")
    assert len(calls) == 3
    assert not list((tmp_path / "streams").iterdir())


def test_names_that_file_systems_confuse_are_told_apart(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, IDENTITY, versions=2)
    names = ["a", "A", "con", "a.", "a..", "state.safetensors"]
    for version, name in enumerate(names):
        fill(folder, name, version)
    assert [folder.read(name)[0].version for name in names] == list(range(len(names)))
    assert all(path.name.isalnum() and path.name.islower() for path in (tmp_path / "streams").iterdir())


def test_a_folder_belongs_to_one_service_and_one_network(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, IDENTITY, versions=2)
    with pytest.raises(FolderError, match="another process"):
        StateFolder(tmp_path, IDENTITY, versions=2)
    folder.close()
    with pytest.raises(FileError, match="another network"):
        StateFolder(tmp_path, IDENTITY | {"network": "c"}, versions=2)
    StateFolder(tmp_path, IDENTITY, versions=2).close()
    (tmp_path / "service.json").write_text("[]")
    with pytest.raises(FileError, match="not the description of a state folder"):
        StateFolder(tmp_path, IDENTITY, versions=2)


def test_a_damaged_state_is_replaced_by_the_newest_version(tmp_path: Path) -> None:
    with open_engine(tmp_path, version_every=2, checkpoint_every=0, slots=1) as (_, batcher):
        for seed in range(5):
            ask(batcher, "a", seed)
    (state,) = tmp_path.rglob("state.safetensors")
    content = bytearray(state.read_bytes())
    content[-5] ^= 1
    state.write_bytes(content)
    with open_engine(tmp_path, slots=1) as (engine, batcher):
        assert found(ask(batcher, "a", 4)) == expect(range(5))[4:]
        assert engine.residents.records["a"].restored_version == 4
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    service = make_service(tmp_path)
    assert service.describe_health()["damaged"] == 1
    service.stop()


def test_a_full_disk_loses_nothing_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = folders.write_tensors, threading.Event()

    def write_or_fail(path: Any, *given: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *given)

    monkeypatch.setattr(folders, "write_tensors", write_or_fail)
    with open_client(tmp_path, slots=1, checkpoint_every=0) as (client, _):

        def get(stream: str, seed: int) -> Any:
            return send(client, stream, image(seed)).json()

        get("a", 0), get("b", 0)
        full.set()
        for seed in (1, 2):  # with evictions, which cannot be written either
            assert found(get("a", seed)) == expect(range(seed + 1))[-1:]
            assert found(get("b", seed)) == expect(range(seed + 1))[-1:]
        assert client.get("/readyz").json()["disk"] == "states cannot be written: No space left on device"
        metrics = client.get("/metrics").text.splitlines()
        assert "testtime_disk_ok 0" in metrics
        refused = send(client, "new", image(0))
        assert (refused.status_code, "No space left" in refused.json()["error"]) == (503, True)
        assert str(tmp_path) not in refused.text
        full.clear()
        for _ in range(200):  # it tries again by itself
            if client.get("/readyz").json()["disk"] == "ok":
                break
            threading.Event().wait(0.05)
        assert found(get("new", 0)) == expect([0])
    with open_engine(tmp_path) as (_, batcher):
        for stream in "ab":
            assert found(ask(batcher, stream, 3)) == expect(range(4))[3:]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is set, files of streams can be neither written nor removed."""
    write, unlink, is_set = folders.write_tensors, os.unlink, threading.Event()

    def check(path: Any) -> None:
        if is_set.is_set() and str(path).endswith(".safetensors"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(folders, "write_tensors", lambda path, *given: (check(path), write(path, *given)))
    monkeypatch.setattr(os, "unlink", lambda path, **given: (check(path), unlink(path, **given)))
    yield is_set
    is_set.clear()


def test_a_stream_that_cannot_be_deleted_is_refused_and_goes_on(tmp_path: Path, read_only: threading.Event) -> None:
    with open_client(tmp_path, slots=1, checkpoint_every=0) as (client, _):
        for stream in "ba":
            send(client, stream, image(0))
        read_only.set()
        for stream in "ab":  # a is evicted, and its state in memory only
            send(client, stream, image(1))
        for _ in range(2):
            refused = client.delete("/v1/streams/a")
            assert (refused.status_code, refused.headers.get("retry-after")) == (503, "10")
            assert os.strerror(errno.EROFS) in refused.json()["error"]
            assert str(tmp_path) not in refused.text
        assert found(send(client, "a", image(2)).json()) == expect(range(3))[2:]
        read_only.clear()
        for stream in "ab":
            assert client.delete(f"/v1/streams/{stream}").json()["deleted"]
        assert not list((tmp_path / "streams").iterdir())
        assert client.get("/v1/streams/a").status_code == 404


def test_an_expired_stream_that_cannot_be_deleted_is_tried_again(
    tmp_path: Path, read_only: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    delete, tried = StateFolder.delete, threading.Semaphore(0)

    def note(*given: Any) -> None:
        try:
            delete(*given)
        finally:
            tried.release()

    monkeypatch.setattr(StateFolder, "delete", note)
    with open_engine(tmp_path, checkpoint_every=0, ttl=0.2) as (engine, batcher):
        ask(batcher, "a", 0)
        read_only.set()
        for _ in range(3):
            assert tried.acquire(timeout=60)
        assert batcher.is_alive
        assert list(engine.residents.records) == ["a"]
        assert [record.name for record in caplog.records].count("testtime.serve.batcher") == 1
        read_only.clear()
        wait_for_expiry(engine, tmp_path)


def test_a_state_that_failed_and_waits_again_can_be_dropped(tmp_path: Path) -> None:
    with open_engine(tmp_path) as (engine, _):
        writer = engine.residents.writer
        entry = Entry("a", StreamRecord("a").describe(), {"x": torch.zeros(2)})
        entry.done.set_result(False)  # as after a write that failed
        with writer._disk:
            writer.put(entry)
            writer.drop("a")
        assert writer.find("a") is None


def test_a_disk_that_times_out_is_no_lost_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with open_engine(tmp_path) as (engine, batcher):
        ask(batcher, "a", 0)
        with monkeypatch.context() as patch:
            patch.setattr(StateFolder, "delete", fail)
            with pytest.raises(Refusal) as caught:
                run(batcher, "a", lambda engine: (engine.residents.delete("a", "deleted"), None))
        assert caught.value.status == 503
        assert "moved" not in caught.value.details
        assert "a" in engine.residents.records


def test_what_is_written_is_what_was_acknowledged(tmp_path: Path) -> None:
    """After every answer the folder is at most `checkpoint_every` images behind, 0 not at all."""
    for every in (0, 2):
        folder = tmp_path / str(every)
        with open_engine(folder, checkpoint_every=every) as (engine, batcher):
            for seed in range(6):
                ask(batcher, "a", seed, sequence=seed + 1)
                stored = engine.residents.writer.folder
                saved = stored.read("a")[0].sequence if stored.list_versions("a") or list(folder.rglob("state*")) else 0
                assert seed + 1 - every <= saved <= seed + 1
                assert engine.residents.records["a"].saved_sequence == saved


def test_another_method_needs_another_folder(tmp_path: Path) -> None:
    make_service(tmp_path).stop()
    other = Method("ttt", "", "", settings={**METHOD.settings, "lr": 0.5}, needs=("branch",))
    with pytest.raises(FileError, match=r"another settings \(lr: [0-9.]+ there, 0\.5 now\)"):
        make_service(tmp_path, method=other)
