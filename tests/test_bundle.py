"""Packed folders: what is unpacked is what was packed, a running training included; anything else is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from models import CLASSES, pictures
from testtime import Recipe, bundle, resnet26, train
from testtime.bundle import pack_folder, unpack_folder
from testtime.storage import FileError, atomic_file, hold_folder

FILES = {
    "run.json": b"{}\n",
    "empty": b"",
    "units/a/1.json": bytes(range(256)) * 10,
    "units/a b%2F.json": b"x" * 999,
    "units/ü.json": b"y",
    "z.bin": random.Random(0).randbytes(5000),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "run"


@pytest.fixture
def packed(run: Path, tmp_path: Path) -> Path:
    pack_folder(run, tmp_path / "packed", 1000)
    return tmp_path / "packed"


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("limit", [100, 777, 5000, 1 << 20])
def test_a_folder_comes_back_as_it_was(run: Path, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MIB", 700)  # so that files have several pieces
    content = b"".join(FILES[name] for name in sorted(FILES))
    count = pack_folder(run, tmp_path / "packed", limit)
    parts = sorted((tmp_path / "packed").glob("part-*"))
    assert [len(path.read_bytes()) for path in parts[:-1]] == [limit] * (count - 1)
    assert b"".join(path.read_bytes() for path in parts) == content
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {"index.json", *(path.name for path in parts)}
    assert unpack_folder(tmp_path / "packed", tmp_path / "deep" / "again") == len(FILES)
    assert read(tmp_path / "deep" / "again") == read(run)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["again"]


def test_the_index_has_the_checksums_of_files_and_parts(packed: Path) -> None:
    index = json.loads((packed / "index.json").read_text())
    assert {file["name"]: (file["size"], file["sha256"]) for file in index["files"]} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in FILES.items()
    }
    parts = [path.read_bytes() for path in sorted(packed.glob("part-*"))]
    assert [part["sha256"] for part in index["parts"]] == [hashlib.sha256(part).hexdigest() for part in parts]


def test_an_empty_folder_can_be_packed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert pack_folder(tmp_path / "run", tmp_path / "packed") == 0
    assert unpack_folder(tmp_path / "packed", tmp_path / "again") == 0
    assert read(tmp_path / "again") == {}


def test_locks_and_temporary_files_are_left_out(run: Path, tmp_path: Path) -> None:
    for name in ("units/.1.json.x8d.part", "run.lock"):
        (run / name).write_bytes(b"?")
    pack_folder(run, tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    assert read(tmp_path / "again") == FILES


def test_progress_ends_at_the_total(run: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    parts = pack_folder(run, tmp_path / "packed", 1000, lambda done, total, _: seen.append((done, total)))
    assert seen == [(done, len(FILES)) for done in range(len(FILES) + 1)]
    seen.clear()
    unpack_folder(tmp_path / "packed", tmp_path / "again", lambda done, total, _: seen.append((done, total)))
    assert seen == [(done, parts + len(FILES)) for done in range(parts + len(FILES) + 1)]


# A run at work


def test_a_training_packed_between_epochs_resumes_elsewhere_bit_for_bit(tmp_path: Path) -> None:
    images, labels = pictures(24)
    recipe = Recipe(epochs=4, batch=8, lr=0.05, drops=(), seed=3)

    def fit(folder: Path, progress: Callable[[int, int, str], None] | None = None) -> None:
        net = resnet26(CLASSES, depth=8, channels=1, size=8)
        train(net, images, labels, recipe, folder=folder, progress=progress)

    def pack(done: int, total: int, text: str) -> None:
        if 0 < total // 2 <= done and not (tmp_path / "packed").exists():
            with pytest.raises(FileError), hold_folder(tmp_path / "run"):
                pass  # the training holds it
            pack_folder(tmp_path / "run", tmp_path / "packed", 10_000)

    fit(tmp_path / "run", pack)
    unpack_folder(tmp_path / "packed", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / "network.safetensors").exists()
    epochs = json.loads((tmp_path / "elsewhere" / "record.json").read_text())["epochs"]
    assert 1 <= len(epochs) < 4
    before = (tmp_path / "elsewhere" / "checkpoint.safetensors").read_bytes()
    fit(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "checkpoint.safetensors").read_bytes() != before
    assert weights(tmp_path / "elsewhere") == weights(tmp_path / "run")


def weights(run: Path) -> dict[str, bytes]:

    files = {name: load_file(run / f"{name}.safetensors") for name in ("network", "checkpoint")}
    return {
        f"{file}/{name}": tensor.numpy().tobytes()
        for file, tensors in files.items()
        for name, tensor in tensors.items()
    }


def test_a_file_that_the_run_removes_meanwhile_is_left_out(run: Path, tmp_path: Path) -> None:
    def remove(done: int, total: int, name: str) -> None:
        (run / "z.bin").unlink(missing_ok=True)

    pack_folder(run, tmp_path / "packed", progress=remove)
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    assert read(tmp_path / "again") == {name: content for name, content in FILES.items() if name != "z.bin"}


def test_a_file_that_the_run_replaces_meanwhile_is_one_version(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MIB", 100)
    old, new = b"old" * 1000, b"new" * 2000
    (run / "z.bin").write_bytes(old)

    def replace_while_reading(path: Path) -> Any:
        for number, piece in enumerate(read_pieces(path)):
            if path.name == "z.bin" and number == 3:
                (tmp_path / "z").write_bytes(new)
                os.replace(tmp_path / "z", path)
            yield piece

    read_pieces = bundle._read_pieces
    monkeypatch.setattr(bundle, "_read_pieces", replace_while_reading)
    pack_folder(run, tmp_path / "packed")
    monkeypatch.setattr(bundle, "_read_pieces", read_pieces)
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    assert (run / "z.bin").read_bytes() == new
    assert (tmp_path / "again" / "z.bin").read_bytes() == old


# Packing is refused


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "dangling link", "pipe"])
def test_links_and_devices_are_not_packed(run: Path, tmp_path: Path, kind: str) -> None:
    strange = run / "units" / "strange"
    if kind == "pipe":
        os.mkfifo(strange)
    else:
        strange.symlink_to({"link to a file": run / "empty", "link to a folder": run}.get(kind, tmp_path / "nothing"))
    with pytest.raises(FileError, match="strange: "):
        pack_folder(run, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("name", ["A/1", "units/A/1.json", "Z.bin", "a:b", "a\\b", "nul.txt", "dot.", "a\nb", "\u202e"])
def test_names_that_other_systems_cannot_store_are_not_packed(run: Path, tmp_path: Path, name: str) -> None:
    (run / "a").write_bytes(b"")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"")
    with pytest.raises(FileError) as caught:
        pack_folder(run, tmp_path / "packed")
    assert str(caught.value).isprintable()
    assert not (tmp_path / "packed").exists()


def test_only_a_new_or_empty_folder_is_packed_into(run: Path, packed: Path, tmp_path: Path) -> None:
    before = read(packed)
    with pytest.raises(FileError, match="packed: not empty"):
        pack_folder(run, packed)
    assert read(packed) == before
    for inside in (run, run / "packed"):
        with pytest.raises(FileError, match="lies in"):
            pack_folder(run, inside)
    for missing in (tmp_path / "nothing", run / "empty"):
        with pytest.raises(FileError, match="folder"):
            pack_folder(missing, tmp_path / "other")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="a file"):
        pack_folder(run, tmp_path / "file")
    with pytest.raises(ValueError, match=r"`limit`.*0"):
        pack_folder(run, tmp_path / "other", 0)
    assert not (tmp_path / "other").exists()


def test_packing_that_fails_leaves_nothing_and_can_be_repeated(run: Path, tmp_path: Path) -> None:
    def fail(done: int, total: int, name: str) -> None:
        if name == "z.bin":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_folder(run, tmp_path / "packed", 100, fail)
    assert read(tmp_path / "packed") == {}
    # A killed process leaves parts, but no index.
    (tmp_path / "packed" / "part-0001.bin").write_bytes(b"old")
    (tmp_path / "packed" / ".part-0002.bin.x.part").write_bytes(b"old")
    with pytest.raises(FileError, match=r"index\.json: no such file"):
        unpack_folder(tmp_path / "packed", tmp_path / "again")
    pack_folder(run, tmp_path / "packed", 1 << 20)
    assert set(read(tmp_path / "packed")) == {"part-0001.bin", "index.json"}


@pytest.mark.parametrize(
    "name", ["part-one.txt", "part-001.bin", "part-0001.bin.old", ".part-notes", ".index.json.bak", "part-x/mine"]
)
def test_files_of_others_are_left_alone(run: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "packed"
    for file in ("part-0001.bin", name):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_bytes(b"mine")
    before = read(out)
    with pytest.raises(FileError, match="packed: not empty"):
        pack_folder(run, out)
    assert read(out) == before


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_only_files_count_as_parts(run: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "packed").mkdir()
    part = tmp_path / "packed" / "part-0001.bin"
    part.mkdir() if kind == "folder" else part.symlink_to(run / "z.bin")
    with pytest.raises(FileError, match="packed: not empty"):
        pack_folder(run, tmp_path / "packed")
    assert part.exists()


def test_packing_that_fails_removes_only_its_own_files(run: Path, tmp_path: Path) -> None:
    def add_and_fail(done: int, total: int, name: str) -> None:
        if name == "z.bin":
            (tmp_path / "packed" / "part-time.txt").write_bytes(b"mine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_folder(run, tmp_path / "packed", 100, add_and_fail)
    assert read(tmp_path / "packed") == {"part-time.txt": b"mine"}


@pytest.mark.parametrize("name", ["part-0001.bin", "part-12345.bin", "index.json"])
def test_temporary_files_of_a_killed_process_are_removed(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "packed" / name) as temporary:
        temporary.rename(tmp_path / "left")  # as if it had been killed here
    (tmp_path / "left").rename(temporary)
    pack_folder(run, tmp_path / "packed")
    assert not temporary.exists()


# Unpacking is refused


def test_an_existing_folder_must_be_identical(run: Path, packed: Path, tmp_path: Path) -> None:
    assert unpack_folder(packed, run) == len(FILES)  # identical
    (tmp_path / "again").mkdir()
    unpack_folder(packed, tmp_path / "again")  # empty
    assert read(tmp_path / "again") == FILES
    (run / "z.bin").write_bytes(b"mine")
    (tmp_path / "again" / "more").write_bytes(b"")
    for folder in (run, tmp_path / "again", run / "z.bin"):
        before = read(tmp_path)
        with pytest.raises(FileError, match="folder"):
            unpack_folder(packed, folder)
        assert read(tmp_path) == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a flipped bit": flip,
    "a link": link,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("number", [1, 9])
def test_a_missing_or_damaged_part_is_named(packed: Path, tmp_path: Path, damage: str, number: int) -> None:
    DAMAGES[damage](packed / f"part-{number:04}.bin")
    with pytest.raises(FileError, match=f"part-{number:04}.bin: "):
        unpack_folder(packed, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "run"]


def rename(name: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["files"][0].update(name=name)


NAMES = [
    "/etc/x", "../x", "units/../../x", "a/./b", "a//b", "", ".", "..", "a/", "C:\\x", "C:x", "\\\\host\\x", "nul",
    "con.txt", "x" * 300, "a/" * 600 + "a", "a\0b", "a\x1b[31m", "\ud800", "Z.BIN", "UNITS/b", "Run.json", "z.bin",
    "z.bin/x", 3, None,
]  # fmt: skip
INDEXES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"the name {str(name)[:20]!r}": rename(name) for name in NAMES},
    "no format": lambda index: index.pop("format"),
    "another format": lambda index: index.update(format=2),
    "no files": lambda index: index.pop("files"),
    "files that are a number": lambda index: index.update(files=3),
    "files that are numbers": lambda index: index.update(files=[3]),
    "no parts": lambda index: index.pop("parts"),
    "a part too few": lambda index: index["parts"].pop(),
    "a part too many": lambda index: index["parts"].append({"size": 1, "sha256": "0" * 64}),
    "a file too few": lambda index: index["files"].pop(),
    "a negative size": lambda index: index["files"][0].update(size=-1),
    "a size that is a text": lambda index: index["files"][0].update(size="3"),
    "a huge size": lambda index: index["files"][0].update(size=10**15),
    "huge sizes": lambda index: (index["files"][0].update(size=10**15), index["parts"][0].update(size=10**15)),
    "sizes exchanged": lambda index: (index["files"][0].update(size=3), index["files"][1].update(size=0)),
    "no checksum": lambda index: index["files"][0].pop("sha256"),
    "another checksum": lambda index: index["files"][0].update(sha256="0" * 64),
    "another checksum of a part": lambda index: index["parts"][0].update(sha256="0" * 64),
}


@pytest.mark.parametrize("damage", list(INDEXES))
def test_a_hostile_index_writes_nothing(packed: Path, tmp_path: Path, damage: str) -> None:
    index = json.loads((packed / "index.json").read_text())
    INDEXES[damage](index)
    (packed / "index.json").write_text(json.dumps(index))
    before = read(tmp_path)
    with pytest.raises(FileError) as caught:
        unpack_folder(packed, tmp_path / "again")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert read(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "run"]


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"format": NaN}', "[" * 100_000])
def test_an_index_that_is_not_one_is_named(packed: Path, tmp_path: Path, text: str) -> None:
    (packed / "index.json").write_text(text)
    with pytest.raises(FileError, match=r"index\.json: "):
        unpack_folder(packed, tmp_path / "again")
