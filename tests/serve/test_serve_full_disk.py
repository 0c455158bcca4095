"""A disk that is really full: a small file system, filled to its last byte, and emptied again."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serve_engine import ask, expect, found

from serving import image, open_client, open_engine, send

BYTES = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "none", str(path)]
    with contextlib.suppress(OSError):
        if subprocess.run(mount, capture_output=True).returncode == 0:
            try:
                yield path
            finally:
                subprocess.run(["umount", "--lazy", str(path)], check=True)
            return
    pytest.skip("needs the right to mount a file system")


def fill(path: Path) -> None:
    """Write a file until nothing more fits."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def test_a_full_disk_loses_nothing_is_reported_and_recovers(disk: Path) -> None:
    state, ballast = disk / "state", disk / "ballast"
    with open_client(state, slots=1, checkpoint_every=0, version_every=2) as (client, service):

        def get(stream: str, seed: int) -> Any:
            return found(send(client, stream, image(seed)).json())

        for stream in "ab":
            get(stream, 0)
        fill(ballast)
        for seed in range(1, 5):  # with evictions and versions
            for stream in "ab":
                assert get(stream, seed) == expect(range(seed + 1))[-1:]
        assert client.get("/readyz").json()["disk"] == "states cannot be written: No space left on device"
        assert client.get("/readyz").json()["ready"]
        metrics = client.get("/metrics").text.splitlines()
        assert "testtime_disk_ok 0" in metrics
        assert "testtime_unwritten_states 2" in metrics
        refused = send(client, "new", image(0))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert "No space left" in refused.json()["error"]
        assert str(disk) not in refused.text
        for stream in "ab":  # what was stored before is whole
            assert service.engine.residents.writer.folder.read(stream)[0].seen == 1
        ballast.unlink()
        for _ in range(400):  # it tries again by itself
            if not len(service.engine.residents.writer):
                break
            threading.Event().wait(0.05)
        assert client.get("/readyz").json()["disk"] == "ok"
        for stream in "ab":
            assert service.engine.residents.writer.folder.read(stream)[0].seen == 5
        assert get("new", 0) == expect([0])
        assert not list(state.rglob("*.part"))
    with open_engine(state) as (_, batcher):
        for stream in "ab":
            assert found(ask(batcher, stream, 5)) == expect(range(6))[5:]


def test_a_service_that_ends_on_a_full_disk_says_so_and_leaves_what_was_stored(disk: Path) -> None:
    state = disk / "state"
    with open_client(state, checkpoint_every=0) as (client, service):
        send(client, "a", image(0))
        fill(disk / "ballast")
        send(client, "a", image(1))
        assert not service.stop()
    (disk / "ballast").unlink()
    with open_engine(state) as (_, batcher):
        assert found(ask(batcher, "a", 1)) == expect(range(2))[1:]
