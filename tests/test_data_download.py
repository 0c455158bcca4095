"""Downloads from a server on this machine: resumed, checked, whole or not at all."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testtime.data import DataError, download, get
from testtime.data.download import Remote, extract, fetch

CONTENT = bytes(range(256)) * 5000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    files: dict[str, bytes]
    requests: list[str | None]
    cuts: list[int]
    ranges: bool
    failures: list[int]


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
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + self.server.cuts.pop(0) if self.server.cuts else len(content)
        self.wfile.write(content[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Server(("127.0.0.1", 0), Handler)
    found.files, found.requests, found.cuts, found.failures = {"/file": CONTENT}, [], [], []
    found.ranges = True
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def url(server: Server, path: str = "/file") -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_a_whole_file(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch(url(server), tmp_path / "deep" / "file", MD5, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [found.name for found in path.parent.iterdir()] == ["file"]
    fetch(url(server), path, MD5)
    assert len(server.requests) == 1  # what is there is not fetched again


def test_an_interrupted_transfer_goes_on(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000]
    fetch(url(server), tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requests == [None, "bytes=300000-"]


def test_giving_up_keeps_the_part_for_the_next_time(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 100_000]
    with pytest.raises(DataError, match=r"broke off after 200,000 bytes .*run again to go on"):
        fetch(url(server), tmp_path / "file", MD5, attempts=2)
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.part").stat().st_size == 200_000
    fetch(url(server), tmp_path / "file", MD5)
    assert server.requests[-1] == "bytes=200000-"
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_servers_without_ranges_start_over(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    fetch(url(server), tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"file: has md5 {MD5} instead of {'0' * 32} and was deleted$"):
        fetch(url(server), tmp_path / "file", "0" * 32)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.part").write_bytes(b"something else")
    with pytest.raises(DataError, match="earlier transfer may be to blame"):
        fetch(url(server), tmp_path / "file", MD5)
    assert fetch(url(server), tmp_path / "file", MD5).read_bytes() == CONTENT


def test_a_whole_part_is_recognised_and_a_longer_one_thrown_away(server: Server, tmp_path: Path) -> None:
    for content in (CONTENT, CONTENT + b"more"):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file.part").write_bytes(content)
        assert fetch(url(server), tmp_path / "file", MD5).read_bytes() == CONTENT


def test_servers_that_refuse_or_stumble(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="/none: the server answers 404"):
        fetch(url(server, "/none"), tmp_path / "file")
    server.failures = [503]
    assert fetch(url(server), tmp_path / "file", MD5).exists()
    server.failures = [500, 500, 500]
    with pytest.raises(DataError, match=r"cannot be reached \(the server answers 500"):
        fetch(url(server), tmp_path / "other", MD5)


def test_offline(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/file: cannot be reached .* is this machine online\?"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", MD5, timeout=2)
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


def test_get_downloads_and_extracts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive_of({"cifar-10-batches-bin/test_batch.bin": b"x"})
    server.files["/a.tar.gz"] = content
    md5 = hashlib.md5(content).hexdigest()
    monkeypatch.setitem(download.REMOTES, "cifar10", (Remote(url(server, "/a.tar.gz"), md5, "cifar-10-batches-bin"),))
    place = get("cifar10", tmp_path)
    assert place == tmp_path / "cifar-10-batches-bin"
    assert [found.name for found in tmp_path.iterdir()] == ["cifar-10-batches-bin"]
    assert (place / "test_batch.bin").read_bytes() == b"x"
    get("cifar10", tmp_path)
    assert len(server.requests) == 1


def test_get_plain_files(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remotes = []
    for version, count in (("v4", 2021), ("v6", 2000)):
        for part, array in (("data", np.zeros((count, 32, 32, 3), np.uint8)), ("labels", np.zeros(count, np.int64))):
            file = io.BytesIO()
            np.save(file, array)
            path = f"/cifar10.1_{version}_{part}.npy"
            server.files[path] = file.getvalue()
            remotes.append(Remote(url(server, path), None, "CIFAR-10.1", archive=False))
    monkeypatch.setitem(download.REMOTES, "cifar10.1", tuple(remotes))
    good, server.files["/cifar10.1_v6_data.npy"] = server.files["/cifar10.1_v6_data.npy"], b"<html>Sorry</html>"
    with pytest.raises(DataError, match=r"cifar10\.1_v6_data\.npy: not a plain \.npy array"):
        get("cifar10.1", tmp_path)
    server.files["/cifar10.1_v6_data.npy"] = good
    assert get("cifar10.1", tmp_path) == tmp_path / "CIFAR-10.1"
    assert len(server.requests) == 6  # v4 was whole the first time


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (archive_of({"../evil": b"x"}), "not a readable archive"),
        (archive_of({"set/link": b""}, type=tarfile.SYMTYPE, linkname="/etc"), "holds the link"),
        (archive_of({"set/link": b""}, type=tarfile.LNKTYPE, linkname="x"), "holds the link"),
        (archive_of({"set/device": b""}, type=tarfile.CHRTYPE), "not a readable archive"),
        (archive_of({"other/file": b"x"}), "does not hold the folder set"),
        (archive_of({"set/file": CONTENT})[:-500], "not a readable archive"),
        (b"nothing", "not a readable archive"),
    ],
    # An archive holds the time: as a name it would be another for each of several processes.
    ids=["outside", "link", "hard link", "device", "other folder", "cut short", "no archive"],
)
def test_archives_are_extracted_whole_or_not_at_all(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.tar\.gz: {fault}"):
        extract(tmp_path / "in" / "a.tar.gz", tmp_path / "in" / "set")
    assert [found.name for found in (tmp_path / "in").iterdir()] == ["a.tar.gz"]
    assert [found.name for found in tmp_path.iterdir()] == ["in"]


def test_sets_without_a_download_say_where_they_are(tmp_path: Path) -> None:
    for name in ("imagenet", "imagenet-c", "vid-robust", "vid-cifar7"):
        with pytest.raises(ValueError, match=rf"{name} cannot be downloaded directly\. .*https://.*{tmp_path}"):
            get(name, tmp_path)
    with pytest.raises(ValueError, match="`name` must be one of cifar10, cifar10-c"):
        get("mnist", tmp_path)
    with pytest.raises(ValueError, match="digits-c ships with the package"):
        get("digits-c", tmp_path)


def test_the_official_places() -> None:
    """Checksums as their publishers give them; a change here must be meant."""
    assert {name: [remote.md5 for remote in remotes] for name, remotes in download.REMOTES.items()} == {
        "cifar10": ["c32a1d4ab5d03f1284b67883e8d87530"],
        "cifar10-c": ["56bf5dcef84df0e2308c6dcbcbbd8499"],
        "cifar10.1": [None] * 4,
    }
    assert all(remote.url.startswith("https://") for remotes in download.REMOTES.values() for remote in remotes)
