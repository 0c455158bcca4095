"""Downloads from a server on this machine: resumed, checked, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import io
import os
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testtime.data import DataError, download, get
from testtime.data.download import extract, fetch
from testtime.data.families import FAMILIES
from testtime.data.family import Remote

CONTENT = bytes(range(256)) * 5000
SIZE = len(CONTENT)
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    files: dict[str, bytes]
    requests: list[str | None]
    cuts: list[int]
    ranges: bool
    lengths: bool
    endless: bool
    failures: list[int]
    halfway: threading.Event
    goes_on: threading.Event


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`; each entry of `server.cuts` ends one answer after that many bytes."""

    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.requests.append(asked)
        if self.server.failures:
            self.send_error(self.server.failures.pop(0))
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        if start >= len(content) > 0 and start:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.server.lengths:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + self.server.cuts.pop(0) if self.server.cuts else len(content)
        with contextlib.suppress(OSError):  # who was sent too much has gone
            self.wfile.write(content[start : min(start + 1000, end)])
            self.server.halfway.set()
            self.server.goes_on.wait()
            self.wfile.write(content[start + 1000 : end])
            while self.server.endless:
                self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Server(("127.0.0.1", 0), Handler)
    found.files, found.requests, found.cuts, found.failures = {"/file": CONTENT}, [], [], []
    found.ranges = found.lengths = True
    found.endless, found.halfway, found.goes_on = False, threading.Event(), threading.Event()
    found.goes_on.set()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.endless = False
    found.shutdown()
    thread.join()
    found.server_close()


def url(server: Server, path: str = "/file") -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_a_whole_file(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch(url(server), tmp_path / "deep" / "file", SIZE, MD5, lambda done, total, _: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (SIZE, SIZE)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [found.name for found in path.parent.iterdir()] == ["file"]
    fetch(url(server), path, SIZE, MD5)
    assert len(server.requests) == 1  # what is there is not fetched again


def test_an_interrupted_transfer_goes_on(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000]
    fetch(url(server), tmp_path / "file", SIZE, MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requests == [None, "bytes=300000-"]


def test_giving_up_keeps_the_part_for_the_next_time(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 100_000]
    with pytest.raises(DataError, match=r"interrupted after 200,000 bytes .*run again to resume"):
        fetch(url(server), tmp_path / "file", SIZE, MD5, attempts=2)
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.part").stat().st_size == 200_000
    fetch(url(server), tmp_path / "file", SIZE, MD5)
    assert server.requests[-1] == "bytes=200000-"
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_servers_without_ranges_start_over(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    fetch(url(server), tmp_path / "file", SIZE, MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"/file: has {MD5} instead of md5:0"):
        fetch(url(server), tmp_path / "file", SIZE, "md5:0")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.part").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"/file: has md5:.*run again"):
        fetch(url(server), tmp_path / "file", SIZE, MD5)
    assert fetch(url(server), tmp_path / "file", SIZE, MD5).read_bytes() == CONTENT


def test_a_whole_part_is_recognised_and_a_longer_one_thrown_away(server: Server, tmp_path: Path) -> None:
    for content in (CONTENT, CONTENT + b"more"):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file.part").write_bytes(content)
        assert fetch(url(server), tmp_path / "file", SIZE, MD5).read_bytes() == CONTENT


def test_servers_that_refuse_or_stumble(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="/none: the server answers 404"):
        fetch(url(server, "/none"), tmp_path / "file", SIZE, MD5)
    server.failures = [503]
    assert fetch(url(server), tmp_path / "file", SIZE, MD5).exists()
    server.failures = [500, 500, 500]
    with pytest.raises(DataError, match=r"cannot be reached \(the server answers 500"):
        fetch(url(server), tmp_path / "other", SIZE, MD5)


def test_offline(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/file: cannot be reached .* is this machine online\?"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", SIZE, MD5, timeout=2)
    assert list(tmp_path.iterdir()) == []


def archive_of(files: dict[str, bytes], **changes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in changes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def offer(server: Server, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let an archive be CIFAR-10."""
    server.files["/a.tar.gz"] = content
    checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
    remote = Remote(url(server, "/a.tar.gz"), len(content), checksum, "cifar-10-batches-bin")
    monkeypatch.setitem(FAMILIES, "cifar10", replace(FAMILIES["cifar10"], remotes=(remote,)))


def test_get_downloads_and_extracts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive_of({"cifar-10-batches-bin/test_batch.bin": b"x"})
    offer(server, monkeypatch, content)
    place = get("cifar10", tmp_path)
    assert place == tmp_path / "cifar-10-batches-bin"
    assert [found.name for found in tmp_path.iterdir()] == ["cifar-10-batches-bin"]
    assert (place / "test_batch.bin").read_bytes() == b"x"
    get("cifar10", tmp_path)
    assert len(server.requests) == 1


def test_get_plain_files(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remotes = []
    for part in ("v6_data", "v6_labels"):
        content = part.encode() * 100
        server.files[f"/{part}.npy"] = content
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        remotes.append(Remote(url(server, f"/{part}.npy"), len(content), checksum, "CIFAR-10.1", archive=False))
    monkeypatch.setitem(FAMILIES, "cifar10.1", replace(FAMILIES["cifar10.1"], remotes=tuple(remotes)))
    good, server.files["/v6_labels.npy"] = server.files["/v6_labels.npy"], b"<html>Sorry</html>"
    with pytest.raises(DataError, match=r"/v6_labels\.npy: "):
        get("cifar10.1", tmp_path)
    assert [path.name for path in (tmp_path / "CIFAR-10.1").iterdir()] == ["v6_data.npy"]
    server.files["/v6_labels.npy"] = good
    assert get("cifar10.1", tmp_path) == tmp_path / "CIFAR-10.1"
    assert (tmp_path / "CIFAR-10.1/v6_labels.npy").read_bytes() == good
    assert len(server.requests) == 3  # the first was whole the first time


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders there")
def test_one_download_at_a_time(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(server, monkeypatch, archive_of({"cifar-10-batches-bin/test_batch.bin": os.urandom(100_000)}))
    server.goes_on.clear()
    place: list[Path] = []
    first = threading.Thread(target=lambda: place.append(get("cifar10", tmp_path)))
    first.start()
    assert server.halfway.wait(10)
    while not any(tmp_path.iterdir()):
        time.sleep(0.01)
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match=f"^{tmp_path}: "):
        get("cifar10", tmp_path)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before
    server.goes_on.set()
    first.join()
    assert place == [tmp_path / "cifar-10-batches-bin"]
    assert len(server.requests) == 1


def test_servers_that_do_not_say_how_long_a_file_is(server: Server, tmp_path: Path) -> None:
    server.lengths = False
    assert fetch(url(server), tmp_path / "file", SIZE, MD5).read_bytes() == CONTENT
    server.cuts = [50_000, 50_000, 50_000]
    with pytest.raises(DataError, match="interrupted after 150,000 bytes"):
        fetch(url(server), tmp_path / "short", SIZE, MD5)
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize("lengths", [True, False])
def test_a_server_that_sends_too_much_is_cut_off(server: Server, tmp_path: Path, lengths: bool) -> None:
    server.endless, server.lengths = not lengths, lengths
    for size in (1000, SIZE - 1):
        with pytest.raises(DataError, match=rf"/file: .*{size:,}"):
            fetch(url(server), tmp_path / "file", size, MD5)
        assert list(tmp_path.iterdir()) == []


def test_a_server_that_offers_another_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"/file: offers {SIZE:,} bytes"):
        fetch(url(server), tmp_path / "file", SIZE + 1, MD5)
    assert len(server.requests) == 1  # nothing another attempt would change
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_part(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "open", lambda path, mode: Full(path, mode.replace("b", "")), raising=False)
    with pytest.raises(DataError, match=r"/file\.part: "):
        fetch(url(server), tmp_path / "file", SIZE, MD5)
    assert len(server.requests) == 1


def test_what_a_killed_extraction_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".set.abc.part" / "set").mkdir(parents=True)
    (tmp_path / "a.tar.gz").write_bytes(archive_of({"set/file": b"x", "other/file": b"y"}))
    extract(tmp_path / "a.tar.gz", tmp_path / "set")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        *("a.tar.gz", "set", "set/file"),
    ]


def test_sets_without_a_download_say_where_they_are(tmp_path: Path) -> None:
    for name in ("imagenet", "imagenet-c", "imagenet-v2", "imagenet-r", "imagenet-a", "vid-robust", "vid-cifar7"):
        with pytest.raises(ValueError, match=rf"{name} cannot be downloaded directly\. .*https://.*{tmp_path}"):
            get(name, tmp_path)
    with pytest.raises(ValueError, match="`name` must be one of cifar10, cifar10-c"):
        get("mnist", tmp_path)
    with pytest.raises(ValueError, match="digits-c"):
        get("digits-c", tmp_path)


def test_the_official_files() -> None:
    """Lengths and checksums as they are published; a change here must be meant."""
    offered = {family.name: family.remotes for family in FAMILIES.values() if family.remotes}
    assert {name: [(r.size, r.checksum[:12]) for r in remotes] for name, remotes in offered.items()} == {
        "cifar10": [(170_052_171, "md5:c32a1d4a")],
        "cifar10-c": [(2_918_471_680, "md5:56bf5dce")],
        "cifar10.1": [
            (128 + 2021 * 3072, "sha256:5aaed"),
            (128 + 2021 * 4, "sha256:1f954"),
            (128 + 2000 * 3072, "sha256:29971"),
            (128 + 2000 * 4, "sha256:ae40b"),
        ],
        "cifar100": [(168_513_733, "md5:03b5dce0")],
        "cifar100-c": [(2_918_473_216, "md5:11f0ed0f")],
    }
    for remotes in offered.values():
        for remote in remotes:
            assert remote.url.startswith("https://")
            assert len(remote.checksum.partition(":")[2]) in (32, 64)
