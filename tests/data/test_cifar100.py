"""CIFAR-100 and CIFAR-100-C in their official layouts, in miniature, sound and damaged."""

from __future__ import annotations

import itertools
import pickle
import struct
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest

import testtime.data
from testtime.data import DataError, check, cifar100, describe, expand
from testtime.data.pickles import read_batch

COUNT = 12  # records a file
RECORD = 3074


def make_records(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (COUNT, 3, 32, 32) and fine labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8), rng.integers(0, 100, COUNT)


def write_binary(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for seed, name in enumerate(["train", "test"]):
        images, labels = make_records(seed)
        records = [bytes([label % 20, label]) + image.tobytes() for image, label in zip(images, labels, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    (folder / "fine_label_names.txt").write_text("\n".join(cifar100.CLASSES) + "\n\n")
    return folder


def pickled(images: np.ndarray, fine: list[int]) -> bytes:
    """The instructions that Python 2 wrote for the official files, protocol 2; `images` is (N, M)."""
    memo = itertools.count(1)

    def put() -> bytes:
        number = next(memo)
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content + put()

    def number(value: int) -> bytes:
        return b"M" + struct.pack("<H", value)

    def listed(items: list[bytes]) -> bytes:
        parts = [b"(" + b"".join(items[n : n + 1000]) + b"e" for n in range(0, len(items), 1000)]
        return b"]" + put() + b"".join(parts)

    pixels = images.tobytes()
    out = b"\x80\x02}" + put() + b"("
    out += text(b"filenames") + listed([text(f"bos_taurus_s_{n:06}.png".encode()) for n in range(len(images))])
    out += text(b"batch_label") + text(b"training batch 1 of 1")
    out += text(b"fine_labels") + listed([b"K" + bytes([label]) for label in fine])
    out += text(b"coarse_labels") + listed([b"K" + bytes([label % 20]) for label in fine])
    out += text(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
    out += b"K\x00\x85" + text(b"b") + b"\x87R" + put() + b"(K\x01" + number(len(images)) + number(images.shape[1])
    out += b"\x86cnumpy\ndtype\n" + put() + text(b"u1") + b"K\x00K\x01\x87R" + put()
    out += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return out + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tbu."


def write_python(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for seed, name in enumerate(["train", "test"]):
        images, labels = make_records(seed)
        (folder / name).write_bytes(pickled(images.reshape(COUNT, 3072), labels.tolist()))
    return folder


@pytest.fixture(params=["binary", "python", "binary archive", "python archive", "the folder itself"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    parent = tmp_path / "elsewhere" if "archive" in request.param else tmp_path
    python = "python" in request.param
    folder = write_python(parent / cifar100.PYTHON) if python else write_binary(parent / cifar100.BINARY)
    if "archive" in request.param:
        with tarfile.open(tmp_path / cifar100.ARCHIVES[folder.name], "w:gz") as tar:
            tar.add(folder, folder.name)
    return folder if request.param == "the folder itself" else tmp_path


def test_every_layout_reads_the_same(root: Path) -> None:
    for seed, split in enumerate(("train", "test")):
        found = testtime.data.open("cifar100", root, split, partial=True)
        images, labels = make_records(seed)
        assert (found.name, found.shape, found.classes) == ("cifar100", (3, 32, 32), cifar100.CLASSES)
        assert np.array_equal(found.images(slice(None)).numpy(), images)
        assert found.labels is not None
        assert found.labels.tolist() == labels.tolist()
    with pytest.raises(DataError, match=r"test(\.bin)?: holds 12 records"):
        cifar100.load(root)


def test_there_are_100_classes_in_order() -> None:
    assert len(set(cifar100.CLASSES)) == 100
    assert list(cifar100.CLASSES) == sorted(cifar100.CLASSES)


def test_a_pickle_of_the_official_length_is_within_the_limits() -> None:
    labels = (np.arange(50_000) % 100).tolist()
    content = pickled(np.zeros((50_000, 1), dtype=np.uint8), labels)
    found = read_batch(np.frombuffer(content, np.uint8), Path("train"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the official files name a module that numpy has since moved
        expected = pickle.loads(content, encoding="bytes")
    assert found.keys() == expected.keys()
    assert found[b"fine_labels"] == expected[b"fine_labels"] == labels
    assert found[b"data"].shape == (50_000, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole[:-1],
        lambda whole: b"",
        lambda whole: whole[:RECORD] + b"\x00\x64" + whole[RECORD + 2 :],  # fine label 100 in record 1
    ],
    ids=["short", "empty", "label"],
)
def test_damaged_binary_files(tmp_path: Path, change) -> None:
    path = write_binary(tmp_path / cifar100.BINARY) / "test.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as raised:
        cifar100.load(tmp_path, partial=True)
    assert raised.value.path == str(path)


def test_damaged_python_files(tmp_path: Path) -> None:
    path = write_python(tmp_path / cifar100.PYTHON) / "test"
    images, labels = make_records(1)
    pixels = images.reshape(COUNT, 3072)
    wrong = (pixels[:, :-1], labels.tolist()), (pixels, labels[:-1].tolist()), (pixels, [100] * COUNT)
    for content in (path.read_bytes()[:-9], *itertools.starmap(pickled, wrong)):
        path.write_bytes(content)
        with pytest.raises(DataError) as raised:
            cifar100.load(tmp_path, partial=True)
        assert raised.value.path == str(path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no CIFAR-100"):
        cifar100.load(tmp_path)
    assert describe("cifar100", tmp_path).state == "missing"
    path = write_binary(tmp_path / cifar100.BINARY) / "train.bin"
    path.unlink()
    with pytest.raises(DataError, match=r"train\.bin: no such file"):
        cifar100.load(tmp_path, "train", partial=True)


def test_check_and_list(tmp_path: Path) -> None:
    folder = tmp_path / cifar100.BINARY
    folder.mkdir()
    records = np.zeros((50_000, RECORD), dtype=np.uint8)
    records[:, 1] = np.arange(50_000) % 100
    records.tofile(folder / "train.bin")
    records[:10_000].tofile(folder / "test.bin")
    assert check("cifar100", tmp_path) == []
    assert describe("cifar100", tmp_path).state == "ready"
    assert describe("cifar100-c", tmp_path).state == "generated"
    records[3, 1] = 4
    records[:10_000].tofile(folder / "test.bin")
    faults = check("cifar100", tmp_path)
    assert ["99 of bear" in faults[0], "101 of beaver" in faults[1], len(faults)] == [True, True, 2]
    (folder / "test.bin").write_bytes(b"123")
    assert "test.bin" in describe("cifar100", tmp_path).detail


def test_official_corruptions(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-100-C"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (5 * COUNT, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(np.arange(99, 99 - COUNT, -1, dtype=np.uint8), 5)
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", labels)
    for level in range(1, 6):
        found = testtime.data.open(f"cifar100-c/fog/{level}", tmp_path, partial=True)
        rows = slice((level - 1) * COUNT, level * COUNT)
        assert (found.name, found.classes) == (f"cifar100-c/fog/{level}", cifar100.CLASSES)
        assert np.array_equal(found.images(slice(None)).numpy(), images[rows].transpose(0, 3, 1, 2))
        assert found.labels is not None
        assert found.labels.tolist() == labels[rows].tolist()
    labels[4 * COUNT + 2] = 100
    np.save(folder / "labels.npy", labels)
    with pytest.raises(DataError, match=r"labels\.npy: record 2 has label 100"):
        cifar100.load_c("fog", 5, tmp_path, partial=True)
    np.save(folder / "fog.npy", images[:-1])
    with pytest.raises(DataError, match=r"labels\.npy: "):
        cifar100.load_c("fog", 5, tmp_path, partial=True)
    assert len(check("cifar100-c", tmp_path)) == 15
    assert describe("cifar100-c", tmp_path).state == "incomplete"


def test_generated_corruptions(tmp_path: Path) -> None:
    assert len(expand("cifar100-c")) == 75
    write_binary(tmp_path / cifar100.BINARY)
    clean = cifar100.load(tmp_path, partial=True)
    found = testtime.data.open("cifar100-c/contrast/5", tmp_path, partial=True)
    assert found.labels is not None
    assert clean.labels is not None
    assert found.labels.equal(clean.labels)
    assert "generated from cifar100" in found.origin
    assert found.images([3]).float().std() < clean.images([3]).float().std()
    with pytest.raises(DataError, match=r"contrast\.npy: no such file"):
        cifar100.load_c("contrast", 5, tmp_path, source="official")
