"""CIFAR-10, CIFAR-10-C and CIFAR-10.1 in their official layouts, in miniature, sound and damaged."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import sys
import tarfile
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from testtime.data import DataError, cifar
from testtime.data.pickles import read_batch

COUNT = 20  # records a file
TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


def make_records(file: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (COUNT, 3, 32, 32) and labels, different in every file."""
    rng = np.random.default_rng(file)
    return rng.integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8), rng.permutation(np.arange(COUNT) % 10)


def write_binary(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate([*TRAIN, "test_batch"]):
        images, labels = make_records(number)
        with open(folder / f"{name}.bin", "wb") as file:
            for image, label in zip(images, labels, strict=True):
                file.write(bytes([label]) + image.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(cifar.CLASSES) + "\n\n")
    return folder


def pickled(images: np.ndarray, labels: np.ndarray, title: bytes = b"training batch 1 of 5") -> bytes:
    """The instructions that Python 2 wrote for the official files, protocol 2."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    def size(number: int) -> bytes:
        return b"K" + bytes([number]) if number < 256 else b"M" + struct.pack("<H", number)

    memo = itertools.count(1)

    def put() -> bytes:
        number = next(memo)
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    pixels = images.tobytes()
    out = b"\x80\x02}" + put() + b"(" + text(b"batch_label") + put() + text(title) + put()
    out += text(b"labels") + put() + b"]" + put() + b"("
    out += b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    out += text(b"data") + put() + b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
    out += b"K\x00\x85" + text(b"b") + b"\x87R" + put() + b"(K\x01" + size(len(images)) + size(3072) + b"\x86"
    out += b"cnumpy\ndtype\n" + put() + text(b"u1") + b"K\x00K\x01\x87R" + put()
    out += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    out += b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    out += text(b"filenames") + put() + b"]" + put() + b"("
    out += b"".join(text(f"picture_s_{n:06}.png".encode()) + put() for n in range(len(images)))
    return out + b"eu."


def write_python(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate([*TRAIN, "test_batch"]):
        (folder / name).write_bytes(pickled(*make_records(number)))
    return folder


def write_archive(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


@pytest.fixture(params=["binary", "python", "binary archive", "python archive", "the folder itself"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "elsewhere" if "archive" in request.param else tmp_path
    folder = write_python(place / cifar.PYTHON) if "python" in request.param else write_binary(place / cifar.BINARY)
    if "archive" in request.param:
        write_archive(folder, tmp_path / cifar.ARCHIVES[folder.name])
    return folder if request.param == "the folder itself" else tmp_path


def test_every_layout_reads_the_same(root: Path) -> None:
    test = cifar.load(root, "test", partial=True)
    images, labels = make_records(5)
    assert (test.name, len(test), test.shape, test.classes) == ("cifar10", COUNT, (3, 32, 32), cifar.CLASSES)
    assert np.array_equal(test.images(slice(None)).numpy(), images)
    assert test.labels is not None
    assert test.labels.dtype == torch.int64
    assert test.labels.tolist() == labels.tolist()

    train = cifar.load(root, "train", partial=True)
    assert len(train) == 5 * COUNT
    order = [99, 0, 20, 19, 45]
    expected = np.concatenate([make_records(number)[0] for number in range(5)])[order]
    assert np.array_equal(train.images(order).numpy(), expected)


def test_cut_down_sets_need_to_be_asked_for(root: Path) -> None:
    with pytest.raises(DataError, match="holds 20 records, the official file 10,000"):
        cifar.load(root, "test")


def test_the_miniature_pickle_is_what_python_would_read() -> None:
    images, labels = make_records(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the official files name a module that numpy has since moved
        batch = pickle.loads(pickled(images, labels), encoding="bytes")
    assert np.array_equal(batch[b"data"], images.reshape(COUNT, 3072))
    own = read_batch(np.frombuffer(pickled(images, labels), np.uint8), Path("batch"))
    assert own.keys() == batch.keys()
    assert own[b"labels"] == batch[b"labels"] == labels.tolist()
    assert own[b"filenames"] == batch[b"filenames"]
    assert np.array_equal(own[b"data"], batch[b"data"])


class Malice:
    def __reduce__(self):
        return os.system, ("touch harm-was-done",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Malice(), 2),
        pickle.dumps(Malice(), 4),
        pickle.dumps({"data": Malice()}, 2),
        b"\x80\x02cos\nsystem\nU\x04true\x85R.",
        b"\x80\x02cnumpy\ndtype\nU\x04true\x85R.",
        b"\x80\x02cnumpy\nndarray\nK\x05\x85R.",
        b"\x80\x02cbuiltins\neval\n(U\x011tR.",
        b"\x80\x02ios\nsystem\n(U\x04truetR.",
        b"(S'touch harm-was-done'\nios\nsystem\n.",
        b"\x80\x02}cnumpy\ndtype\nb.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_malicious_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_python(tmp_path / cifar.PYTHON)
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch: (refused|cut short or damaged)"):
        cifar.load(tmp_path, "test", partial=True)
    assert not (tmp_path / "harm-was-done").exists()


def test_every_cut_of_a_pickle_is_one_error(tmp_path: Path) -> None:
    whole = pickled(*make_records(0))
    cuts = [*range(0, 300), *range(300, len(whole) - 700, 997), *range(len(whole) - 700, len(whole))]
    for length in cuts:
        with pytest.raises(DataError, match=r"^batch: "):
            read_batch(np.frombuffer(whole[:length], np.uint8), Path("batch"))


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_protocols_are_refused(protocol: int) -> None:
    with pytest.raises(DataError, match="refused"):
        read_batch(np.frombuffer(pickle.dumps({b"labels": [1]}, protocol), np.uint8), Path("batch"))


@pytest.mark.parametrize(
    "program",
    [
        b"(t" * 50_000,
        b"(" * 100_000,
        b"K\x00" * 100_000,
        b"}" + b"".join(b"r" + struct.pack("<I", number) for number in range(100_000)),
        b"K\x00" + b"\x85" * 100_000,
        b"]q\x00h\x00a" * 30_000,
        b"]" + b"]\x85a" * 30_000,
        b"](" + b"K\x00" * 60_000 + b"e" + b"(e" * 100_000,
        b"N" + b"q\x00h\x00" * 50_000,
        b"(K\x00q\x00tq\x01" + b"(h\x01h\x01h\x01tq\x01" * 20_000,
        b"K\x00(q\x01t",
        b"K\x00(\x85t",
        b"K\x00(K\x01s",
    ],
    ids=lambda program: repr(program[:12]),
)
def test_a_pickle_costs_no_more_than_its_length(program: bytes) -> None:
    started = time.process_time()
    with pytest.raises(DataError, match=r"^batch: ") as raised:
        read_batch(np.frombuffer(b"\x80\x02" + program + b".", np.uint8), Path("batch"))
    assert str(raised.value).isprintable()
    assert time.process_time() - started < 5


def test_pickles_of_something_else(tmp_path: Path) -> None:
    images, labels = make_records(0)
    folder = write_python(tmp_path / cifar.PYTHON)
    wrong = {
        "has 20 images but 19 labels": pickled(images, labels[:-1]),
        "'data' is not an array": b"\x80\x02}(U\x06labels]u.",
        "does not hold a dictionary": b"\x80\x02].",
        "record 3 has label 77": pickled(images, np.array([*labels[:3], 77, *labels[4:]])),
    }
    for fault, content in wrong.items():
        (folder / "test_batch").write_bytes(content)
        with pytest.raises(DataError, match=f"test_batch: .*{fault}"):
            cifar.load(tmp_path, "test", partial=True)


def test_damaged_binary_files(tmp_path: Path) -> None:
    folder = write_binary(tmp_path / cifar.BINARY)
    path = folder / "test_batch.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin: 61,459 bytes are not a whole number of records"):
        cifar.load(tmp_path, partial=True)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin: "):
        cifar.load(tmp_path, partial=True)
    path.write_bytes(whole[: 3073 * 2] + b"\x0a" + whole[3073 * 2 + 1 :])
    with pytest.raises(DataError, match=r"test_batch\.bin: record 2 has label 10"):
        cifar.load(tmp_path, partial=True)
    path.unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin: no such file"):
        cifar.load(tmp_path, partial=True)
    (tmp_path / "outside.bin").write_bytes(whole)
    path.symlink_to(tmp_path / "outside.bin")
    with pytest.raises(DataError, match=r"test_batch\.bin: leads out of"):
        cifar.load(tmp_path, partial=True)
    (folder / "inside.bin").write_bytes(whole)
    path.unlink()
    path.symlink_to("inside.bin")
    assert len(cifar.load(tmp_path, partial=True)) == COUNT


def test_the_set_may_lie_behind_a_link(tmp_path: Path) -> None:
    write_binary(tmp_path / "disk" / "deep")
    (tmp_path / cifar.BINARY).symlink_to(tmp_path / "disk" / "deep")
    assert len(cifar.load(tmp_path, partial=True)) == COUNT


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **changes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in changes.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("../evil", {}, "leads out of it"),
        ("/etc/evil", {}, "leads out of it"),
        (
            "cifar-10-batches-bin/link",
            {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
            "neither a file nor a folder",
        ),
        (
            "cifar-10-batches-bin/test_batch.bin",
            {"type": tarfile.LNKTYPE, "linkname": "x"},
            "neither a file nor a folder",
        ),
        ("cifar-10-batches-bin/test_batch.bin", {"type": tarfile.FIFOTYPE}, "neither a file nor a folder"),
        ("cifar-10-batches-bin/other.bin", {}, "does not hold cifar-10-batches-bin/test_batch.bin"),
        ("cifar-10-batches-bin/other.bin", {"pax_headers": {"comment": "x" * 3_000_000}}, "too long"),
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, name: str, changes: dict, fault: str) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        add(tar, name, **changes)
    with pytest.raises(DataError, match=rf"cifar-10-binary\.tar\.gz: .*{fault}"):
        cifar.load(tmp_path, partial=True)


def test_damaged_archives(tmp_path: Path) -> None:
    archive = write_archive(write_binary(tmp_path / "made" / cifar.BINARY), tmp_path / "cifar-10-binary.tar.gz")
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no archive", whole[:1000] + bytes(1000) + whole[2000:]):
        archive.write_bytes(content)
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz: "):
            cifar.load(tmp_path, partial=True)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no CIFAR-10"):
        cifar.load(tmp_path)
    with pytest.raises(ValueError, match="`split`"):
        cifar.load(tmp_path, "val")  # type: ignore[arg-type]


def write_c(root: Path, name: str = "fog", count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    (root / "CIFAR-10-C").mkdir(exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (5 * count, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(np.arange(count, dtype=np.uint8) % 10, 5)
    np.save(root / "CIFAR-10-C" / f"{name}.npy", images)
    np.save(root / "CIFAR-10-C" / "labels.npy", labels)
    return images, labels


def test_official_corruptions(tmp_path: Path) -> None:
    images, labels = write_c(tmp_path)
    for level in range(1, 6):
        test = cifar.load_c("fog", level, tmp_path, partial=True)
        rows = slice((level - 1) * COUNT, level * COUNT)
        assert (test.name, len(test)) == (f"cifar10-c/fog/{level}", COUNT)
        assert np.array_equal(test.images(slice(None)).numpy(), images[rows].transpose(0, 3, 1, 2))
        assert test.labels is not None
        assert test.labels.tolist() == labels[rows].tolist()
        assert "official" in test.origin


def test_official_arrays_stay_on_disk(tmp_path: Path) -> None:
    write_c(tmp_path)
    part = cifar.load_c("fog", 3, tmp_path, partial=True).parts[0]  # type: ignore[attr-defined]
    while isinstance(part.base, np.ndarray) and not isinstance(part, np.memmap):
        part = part.base
    assert isinstance(part, np.memmap)


def test_only_a_chunk_is_in_memory(tmp_path: Path) -> None:
    write_c(tmp_path)
    # As long as the official file, with a hole instead of pixels.
    shape = (50_000, 32, 32, 3)
    np.lib.format.open_memmap(tmp_path / "CIFAR-10-C" / "fog.npy", mode="w+", dtype=np.uint8, shape=shape)
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.zeros(50_000, dtype=np.uint8))
    test_set = cifar.load_c("fog", 4, tmp_path)
    tracemalloc.start()
    try:
        assert sum(len(images) for _, images, _ in test_set.chunks(500)) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 500 * 3072


def test_damaged_corruption_files(tmp_path: Path) -> None:
    images, labels = write_c(tmp_path)
    folder = tmp_path / "CIFAR-10-C"

    def refuses(fault: str) -> None:
        with pytest.raises(DataError, match=fault):
            cifar.load_c("fog", 5, tmp_path, source="official", partial=True)

    with pytest.raises(DataError, match=r"fog\.npy: holds 100 images; five levels of 10,000 are 50,000"):
        cifar.load_c("fog", 1, tmp_path)
    np.save(folder / "fog.npy", images[:-1])
    np.save(folder / "labels.npy", labels[:-1])
    refuses(r"fog\.npy: holds 99 images")
    np.save(folder / "labels.npy", labels)
    refuses(r"labels\.npy: has shape \(100,\) instead of \(99\)")
    np.save(folder / "fog.npy", images.astype(np.float32))
    refuses(r"fog\.npy: has dtype float32 instead of uint8")
    np.save(folder / "fog.npy", images.transpose(0, 3, 1, 2))
    refuses(r"fog\.npy: has shape \(100, 3, 32, 32\) instead of \(N, 32, 32, 3\)")
    np.save(folder / "fog.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    refuses(r"fog\.npy: not a plain \.npy array")
    np.save(folder / "fog.npy", images)
    whole = (folder / "fog.npy").read_bytes()
    for content in (whole[:-1], whole[:40], b"", pickle.dumps(Malice(), 2)):
        (folder / "fog.npy").write_bytes(content)
        refuses(r"fog\.npy: (not a plain \.npy array|an empty file)")
    np.savez(folder / "fog.npz", images)
    (folder / "fog.npz").rename(folder / "fog.npy")
    refuses(r"fog\.npy: not a plain \.npy array")
    write_c(tmp_path)
    np.save(folder / "labels.npy", np.where(np.arange(100) == 85, 10, labels).astype(np.uint8))
    refuses(r"labels\.npy: record 5 has label 10")
    (folder / "labels.npy").unlink()
    refuses(r"labels\.npy: no such file")
    (folder / "fog.npy").unlink()
    refuses(r"fog\.npy: no such file")


def npy(header: bytes, version: bytes = b"\1\0") -> bytes:
    form = "<H" if version == b"\1\0" else "<I"
    return b"\x93NUMPY" + version + struct.pack(form, len(header)) + header + bytes(100 * 3072)


SHAPE = b"(100, 32, 32, 3)"


@pytest.mark.parametrize(
    "content",
    [
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-100, 32, 32, 3), }"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999, 32, 32, 3), }"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (5000000000, 32, 32, 3), }"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (100, 32, 32, 3, 1), }"),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': " + SHAPE + b", }"),
        npy(b"{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': " + SHAPE + b", }"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': " + SHAPE + b", 'more': 1}"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': " + SHAPE + b", }", b"\x09\0"),
        npy(b"(" * 9000),
        npy(b" " * 60_000),
        npy(b"[" * 200_000, b"\2\0"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': " + SHAPE + b", }")[:-1],
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': " + SHAPE + b", }") + b"more",
        b"\x93NUMPY\1\0\xff",
        b"\x93NUMPY\2\0\xff\xff\xff\xff",
    ],
    ids=range(15),
)
def test_hostile_arrays_are_one_error(content: bytes, tmp_path: Path) -> None:
    write_c(tmp_path)
    path = tmp_path / "CIFAR-10-C" / "fog.npy"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        cifar.load_c("fog", 5, tmp_path, source="official", partial=True)
    assert str(raised.value).startswith(f"{path}: ")
    assert str(raised.value).isprintable()


def test_arrays_as_other_programs_write_them(tmp_path: Path) -> None:
    images, _ = write_c(tmp_path)
    path = tmp_path / "CIFAR-10-C" / "fog.npy"
    np.save(path, np.asfortranarray(images))
    test = cifar.load_c("fog", 1, tmp_path, partial=True)
    assert np.array_equal(test.images(slice(None)).numpy(), images[:COUNT].transpose(0, 3, 1, 2))
    old = b"{'descr': '|u1', 'fortran_order': False, 'shape': (100L, 32L, 32L, 3L), }  \n"  # as Python 2 wrote it
    path.write_bytes(npy(old, b"\2\0")[: -100 * 3072] + images.tobytes())
    test = cifar.load_c("fog", 1, tmp_path, partial=True)
    assert np.array_equal(test.images(slice(None)).numpy(), images[:COUNT].transpose(0, 3, 1, 2))


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes there")
def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    write_c(tmp_path)
    (tmp_path / "CIFAR-10-C" / "fog.npy").unlink()
    os.mkfifo(tmp_path / "CIFAR-10-C" / "fog.npy")
    with pytest.raises(DataError, match=r"/fog\.npy: "):
        cifar.load_c("fog", 5, tmp_path, source="official", partial=True)
    folder = write_binary(tmp_path / cifar.BINARY)
    (folder / "test_batch.bin").unlink()
    os.mkfifo(folder / "test_batch.bin")
    with pytest.raises(DataError, match=r"/test_batch\.bin: "):
        cifar.load(tmp_path, partial=True)


def test_corruptions_are_generated_where_no_files_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_binary(tmp_path / cifar.BINARY)
    made = cifar.load_c("gaussian_noise", 5, tmp_path, partial=True)
    plain = cifar.load(tmp_path, partial=True)
    assert made.name == "cifar10-c/gaussian_noise/5"
    assert "generated" in made.origin
    assert made.labels is not None
    assert plain.labels is not None
    assert made.labels.equal(plain.labels)
    assert not made.images([3]).equal(plain.images([3]))
    assert not caplog.records

    write_c(tmp_path)
    cifar.load_c("gaussian_noise", 5, tmp_path, partial=True)
    assert "no gaussian_noise.npy; generating it" in caplog.text
    assert "official" in cifar.load_c("fog", 5, tmp_path, partial=True).origin
    assert "generated" in cifar.load_c("fog", 5, tmp_path, "generated", partial=True).origin


@pytest.mark.parametrize(
    "arguments", [("fog", 0), ("fog", 6), ("../fog", 1), ("fog", 1, None, "other"), ("mist", 1, None, "generated")]
)
def test_bad_corruptions(tmp_path: Path, arguments: tuple) -> None:
    write_binary(tmp_path / cifar.BINARY)
    name, level, _, source = (*arguments, None, "auto")[:4] if len(arguments) == 2 else arguments
    with pytest.raises(ValueError, match=r"`(level|corruption|source)` must be"):
        cifar.load_c(name, level, tmp_path, source, partial=True)


@pytest.mark.parametrize(("version", "count"), [("v4", 2021), ("v6", 2000)])
@pytest.mark.parametrize("folder", ["", "CIFAR-10.1", "CIFAR-10.1/datasets"])
def test_cifar10_1(tmp_path: Path, version, count: int, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.int32)
    np.save(place / f"cifar10.1_{version}_data.npy", images)
    np.save(place / f"cifar10.1_{version}_labels.npy", labels)
    test = cifar.load_10_1(tmp_path, version)
    assert len(test) == count
    assert np.array_equal(test.images([7, count - 1]).numpy(), images[[7, -1]].transpose(0, 3, 1, 2))
    np.save(place / f"cifar10.1_{version}_data.npy", images[:-1])
    with pytest.raises(DataError, match=f"holds {count - 1:,} images, the official file {count:,}"):
        cifar.load_10_1(tmp_path, version)
    np.save(place / f"cifar10.1_{version}_data.npy", images)
    np.save(place / f"cifar10.1_{version}_labels.npy", labels - 1)
    with pytest.raises(DataError, match="record 0 has label -1"):
        cifar.load_10_1(tmp_path, version)


def test_cifar10_1_absent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no cifar10\.1_v6_data\.npy"):
        cifar.load_10_1(tmp_path)
    with pytest.raises(ValueError, match="`version`"):
        cifar.load_10_1(tmp_path, "v5")  # type: ignore[arg-type]


@pytest.mark.skipif(
    not os.environ.get("TESTTIME_DATA") or cifar.find() is None,
    reason="needs the real CIFAR-10 under the folder that TESTTIME_DATA names",
)
def test_the_real_cifar10() -> None:
    train, test = cifar.load(split="train"), cifar.load(split="test")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.bincount().tolist() == [5000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    total = torch.zeros(3, dtype=torch.float64)
    for _, images, _ in train.chunks(2000):
        total += images.sum((0, 2, 3), dtype=torch.float64)
    means = total / (len(train) * 32 * 32 * 255)
    assert [round(mean, 4) for mean in means.tolist()] == [0.4914, 0.4822, 0.4465]
