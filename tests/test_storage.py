"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from testtime.storage import FileError, FolderError, atomic_file, find_files, hold_folder, write_atomic


def test_a_file_appears_with_its_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "file.txt"
    write_atomic(path, "grüße")
    assert path.read_bytes() == "grüße".encode()
    write_atomic(str(path), b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_others_may_read_the_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failure_half_way_leaves_what_was_there(tmp_path: Path, existed: bool, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    if existed:
        path.write_text("old")

    def write() -> None:
        with atomic_file(path) as temporary:
            temporary.write_text("ne")
            raise error("no space left")

    with pytest.raises(error, match="no space left"):
        write()
    assert [entry.name for entry in tmp_path.iterdir()] == (["file"] if existed else [])
    if existed:
        assert path.read_text() == "old"


def test_a_failing_replacement_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("refused")

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match="refused"):
        write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = {b"a" * 100_000, b"b" * 70_000}
    write_atomic(path, b"a" * 100_000)
    done = threading.Event()

    def write() -> None:
        for _ in range(20):
            for content in contents:
                write_atomic(path, content)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic_file(tmp_path / "table.md"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_with_tensors() -> None:
        with atomic_file(tmp_path / "network.safetensors"):
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    for call, name in ((fill, "table.md"), (fill_with_tensors, "network.safetensors")):
        with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder_to_hold(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("years of work")
    with pytest.raises(FolderError, match=r"notes\.txt: "), hold_folder(tmp_path / "notes.txt"):
        pass
    with hold_folder(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run").is_dir()


def test_a_shared_folder_is_held_by_several_and_by_nobody_alone(tmp_path: Path) -> None:
    shared, refused = hold_folder(tmp_path, shared=True), pytest.raises(FolderError, match="another process")
    with shared, hold_folder(tmp_path, shared=True), refused, hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path), pytest.raises(FolderError), hold_folder(tmp_path, shared=True):
        pass


def test_files_are_found_in_folders_in_order_and_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "c.txt", "._a.png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "d.png").mkdir()
    given = [tmp_path, tmp_path / "c.txt", tmp_path / "._a.png", tmp_path / "none"]
    found = find_files(given, (".png", ".jpg"), "images")
    assert found == [tmp_path / name for name in ("a.JPG", "b.png", "c.txt", "._a.png", "none")]


def test_a_folder_of_folders_is_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"contains no images$"):
        find_files([tmp_path], (".png",), "images")
    for name in ("ship", "cat", ".hidden"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileError, match=r"only folders \(cat, ship\)"):
        find_files([tmp_path], (".png",), "images")
