"""Folders of pictures, ImageNet's layouts, and packing."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from pictures import pictures
from testtime.data import Corrupted, DataError, TensorSet, TestSet, folder, imagenet, open_packed, pack
from testtime.data.packing import find_damage

WNIDS = ("n01440764", "n02102040", "n03000684")


def draw(path: Path, shade: int, size: tuple[int, int] = (40, 32)) -> None:
    """A plain picture; JPEG keeps a single shade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


def shades(test_set: TestSet) -> list[int]:
    return [round(image.float().mean().item()) for image in test_set.images(slice(None))]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    place = tmp_path / "pets"
    for shade, name in enumerate(["cat/b.PNG", "cat/a.jpg", "dog/x.png", "dog/y.bmp"], start=1):
        draw(place / name, 10 * shade)
    (place / "cat" / "notes.txt").write_text("not a picture")
    (place / "cat" / ".hidden.png").write_bytes(b"")
    (place / ".git").mkdir()
    return place


def test_a_folder_for_each_class(pets: Path) -> None:
    test_set = folder.load(pets, size=16)
    assert test_set.name == "folder/pets"
    assert test_set.classes == ("cat", "dog")
    assert test_set.files == ["cat/a.jpg", "cat/b.PNG", "dog/x.png", "dog/y.bmp"]
    assert test_set.labels is not None
    assert test_set.labels.tolist() == [0, 0, 1, 1]
    assert test_set.images([0]).shape == (1, 3, 16, 16)
    assert shades(test_set) == [20, 10, 30, 40]


@pytest.mark.skipif(sys.platform == "win32", reason="no such names and files there")
def test_a_folder_may_hold_anything(pets: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd \xff\x1b[31m\n")
    draw(pets / odd / f"{odd}.png", 50)
    os.mkfifo(pets / "cat" / "pipe.png")
    (pets / "cat" / "folder.png").mkdir()
    (pets / "cat" / "nothing.png").symlink_to("nothing at all.png")
    test_set = folder.load(pets, size=16)
    assert test_set.classes == ("cat", "dog", odd)
    assert len(test_set) == 5
    noisy = Corrupted(test_set, "contrast", 1)
    assert len({test_set.fingerprint(), noisy.fingerprint()}) == 2
    flat = folder.load(pets / odd, size=16)
    assert len(Corrupted(flat, "contrast", 1).fingerprint()) == 64
    packed = pack(test_set, tmp_path / "packed")
    assert packed.classes == test_set.classes
    assert packed.images([4]).equal(test_set.images([4]))
    (pets / odd / f"{odd}.png").write_bytes(b"broken")
    (fault,) = test_set.faults()
    assert str(fault).isprintable()
    assert test_set.format_fault(fault).isprintable()
    (pets / "loop").symlink_to(pets / "loop")
    with pytest.raises(DataError, match="/loop: "):
        folder.load(pets)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    for name in ("nul\0byte", "a" * 5000, "none"):
        with pytest.raises(DataError) as raised:
            folder.load(tmp_path / name)
        assert str(raised.value).isprintable()


def test_classes_in_the_networks_order(pets: Path) -> None:
    test_set = folder.load(pets, size=16, classes=["dog", "emu", "cat"])
    assert test_set.labels is not None
    assert test_set.labels.tolist() == [0, 0, 2, 2]
    with pytest.raises(DataError, match=r"cat: not one of the classes requested \("):
        folder.load(pets, classes=["dog"])


def test_a_flat_folder_has_no_labels(pets: Path) -> None:
    test_set = folder.load(pets / "cat", size=16)
    assert test_set.labels is None
    assert len(test_set) == 2
    assert next(test_set.chunks(2)).labels is None


def test_faults_of_folders(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such folder"):
        folder.load(tmp_path / "none")
    with pytest.raises(DataError, match=r"a\.jpg: not a folder"):
        folder.load(pets / "cat" / "a.jpg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: holds neither"):
        folder.load(tmp_path / "empty")
    (pets / "emu").mkdir()
    with pytest.raises(DataError, match="emu: holds no pictures"):
        folder.load(pets)


def test_links_must_stay_inside(pets: Path, tmp_path: Path) -> None:
    (pets / "dog" / "z.png").symlink_to(pets / "cat" / "b.PNG")
    assert len(folder.load(pets)) == 5
    draw(tmp_path / "outside.png", 1)
    (pets / "dog" / "out.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(DataError, match=r"out\.png: leads out of"):
        folder.load(pets)
    (pets / "dog" / "out.png").unlink()
    (pets / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="loop: "):
        folder.load(pets)


def test_one_bad_picture_is_named(pets: Path) -> None:
    (pets / "dog" / "x.png").write_bytes(b"broken")
    test_set = folder.load(pets, size=16)
    assert test_set.images([0, 1]).shape == (2, 3, 16, 16)
    with pytest.raises(DataError, match=r"dog/x\.png: not a picture"):
        test_set.images(slice(None))
    seen: list[tuple[int, int]] = []
    (fault,) = test_set.faults(lambda done, total, _: seen.append((done, total)))
    assert str(fault).endswith("dog/x.png: not a picture in a known format")
    assert seen == [(4, 4)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, offset in (("train", 0), ("val", 100)):
        for k, wnid in enumerate(WNIDS):
            for n in range(3):
                draw(tmp_path / "imagenet" / split / wnid / f"{wnid}_{n}.JPEG", offset + 20 * k + 5 * n)
    return tmp_path


def test_imagenet_layout(root: Path) -> None:
    val = imagenet.load(root, size=24)
    assert (val.name, len(val), val.classes, val.shape) == ("imagenet", 9, WNIDS, (3, 24, 24))
    assert val.labels is not None
    assert val.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert shades(val) == [100, 105, 110, 120, 125, 130, 140, 145, 150]
    assert shades(imagenet.load(root, "train", size=24))[:3] == [0, 5, 10]
    assert len(imagenet.load(root / "imagenet", "test")) == 9
    whole = [*WNIDS[1:], "n00000001", WNIDS[0]]
    placed = imagenet.load(root, size=24, classes=whole)
    assert placed.labels is not None
    assert placed.labels.tolist() == [0, 0, 0, 1, 1, 1, 3, 3, 3]


def test_imagenet_sizes(root: Path) -> None:
    assert imagenet.load(root).shape == (3, 224, 224)
    assert imagenet.load(root).resize == 256  # type: ignore[attr-defined]
    assert imagenet.load(root, size=128, resize=128).images([0]).shape == (1, 3, 128, 128)


def test_imagenet_absent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no imagenet folder"):
        imagenet.load(tmp_path)
    with pytest.raises(ValueError, match="`split`"):
        imagenet.load(tmp_path, "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["imagenet-c", "ImageNet-C/weather", "."])
def test_imagenet_c_layout(tmp_path: Path, place: str) -> None:
    for level in (1, 2, 3, 5):
        for k, wnid in enumerate(WNIDS):
            draw(tmp_path / place / "fog" / str(level) / wnid / "a.JPEG", 40 * level + 10 * k, (224, 224))
    test_set = imagenet.load_c("fog", 5, tmp_path)
    assert test_set.name == "imagenet-c/fog/5"
    assert test_set.images([0]).shape == (1, 3, 224, 224)
    assert shades(test_set) == [200, 210, 220]
    assert "official" in test_set.origin
    with pytest.raises(DataError, match="fog/4: no such folder"):
        imagenet.load_c("fog", 4, tmp_path)


def test_imagenet_c_generated(root: Path) -> None:
    made = imagenet.load_c("brightness", 5, root, size=64)
    assert "generated" in made.origin
    assert min(shades(made)) > 180
    with pytest.raises(DataError, match="brightness/5: no such folder"):
        imagenet.load_c("brightness", 5, root, source="official")
    for arguments in (("fog", 6), ("../fog", 1)):
        with pytest.raises(ValueError, match=r"`level`|`corruption`"):
            imagenet.load_c(*arguments, root)


def test_packed_imagenet_is_the_same(root: Path) -> None:
    plain = imagenet.load(root, size=24)
    packed = imagenet.load(root, size=24, packed=True)
    assert (root / "packed" / "imagenet-val-24-27" / "index.json").is_file()
    assert packed.images(slice(None)).equal(plain.images(slice(None)))
    assert packed.labels is not None
    assert plain.labels is not None
    assert packed.labels.equal(plain.labels)
    assert (packed.name, packed.classes) == (plain.name, plain.classes)
    draw(root / "imagenet/val" / WNIDS[0] / "new.JPEG", 250)
    assert len(imagenet.load(root, size=24, packed=True)) == 10


class Counting(TensorSet):
    """Notes what is read, and breaks down at a sample."""

    def __init__(self, count: int = 10) -> None:
        images = pictures(count, 3, 4, 4, dtype=torch.uint8)
        super().__init__("counting", images, torch.arange(count) % 3)
        self.seen: list[int] = []
        self.breaks_at = -1

    def _read(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.breaks_at in numbers:
            raise KeyboardInterrupt
        self.seen.extend(numbers.tolist())
        return super()._read(numbers)


def test_packing_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source = Counting()
    source.breaks_at = 7
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path, block=3)
    with pytest.raises(DataError, match=r"index\.json: no such file"):
        open_packed(tmp_path)
    assert source.seen == [0, 1, 2, 3, 4, 5]
    source.breaks_at, source.seen = -1, []
    with open(tmp_path / "images.part", "ab") as file:
        file.write(b"half a block")
    with open(tmp_path / "blocks.part", "a") as file:
        file.write("half a li")
    steps: list[tuple[int, int]] = []
    packed = pack(source, tmp_path, block=3, progress=lambda done, total, _: steps.append((done, total)))
    assert source.seen == [6, 7, 8, 9]
    assert steps == [(9, 10), (10, 10)]
    assert packed.images(slice(None)).equal(source.images(slice(None)))
    assert find_damage(tmp_path) == []
    source.seen = []
    assert pack(source, tmp_path, block=3).labels is not None
    assert source.seen == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "images.u8", "index.json"]


@pytest.mark.parametrize("line", ["[" * 100_000, "{}", '["x", [7]]', '["x", [["7", "y"]]]', "[NaN, []]"])
def test_packing_starts_over_when_the_journal_is_damaged(tmp_path: Path, line: str) -> None:
    source = Counting()
    source.breaks_at = 7
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path, block=3)
    lines = (tmp_path / "blocks.part").read_text().splitlines()
    for content in ([line, *lines[1:]], [lines[0], line, *lines[2:]]):
        (tmp_path / "blocks.part").write_text("\n".join(content))
        source.breaks_at = -1
        assert pack(source, tmp_path, block=3).images(slice(None)).equal(source.images(slice(None)))
        (tmp_path / "index.json").unlink()


def test_packing_starts_over_when_the_part_is_damaged(tmp_path: Path) -> None:
    source = Counting()
    source.breaks_at = 7
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path, block=3)
    content = bytearray((tmp_path / "images.part").read_bytes())
    content[-1] ^= 1
    (tmp_path / "images.part").write_bytes(content)
    source.breaks_at = -1
    assert pack(source, tmp_path, block=3).images(slice(None)).equal(source.images(slice(None)))


def test_a_full_disk_names_the_folder_and_packing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = Counting()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        with pytest.raises(DataError, match=r"packed: cannot be written \(No space left on device\)"):
            pack(source, tmp_path / "packed", block=3)
    assert not (tmp_path / "packed" / "index.json").exists()
    assert pack(source, tmp_path / "packed", block=3).images(slice(None)).equal(source.images(slice(None)))


def test_damaged_packs(tmp_path: Path) -> None:
    source = Counting()
    pack(source, tmp_path, block=4)
    content = bytearray((tmp_path / "images.u8").read_bytes())
    content[5 * 48] ^= 1
    (tmp_path / "images.u8").write_bytes(content)
    assert find_damage(tmp_path) == [f"{tmp_path / 'images.u8'}: images 4 to 7 are damaged"]
    (tmp_path / "images.u8").write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"images\.u8: has 479 bytes, its index says 480"):
        open_packed(tmp_path)
    assert len(find_damage(tmp_path)) == 1
    assert pack(source, tmp_path, block=4).images(slice(None)).equal(source.images(slice(None)))
    good = json.loads((tmp_path / "index.json").read_text())
    wrong = [{**good, "labels": [99] * 10}, {**good, "shape": [3, -4, 4]}, {**good, "blocks": []}, [], {}]
    for index in wrong:
        (tmp_path / "index.json").write_text(json.dumps(index))
        with pytest.raises(DataError, match=r"index\.json: not the index of a packed set"):
            open_packed(tmp_path)
    wrong = [
        {**good, "count": 10**15, "block": 10**15, "blocks": ["x"], "labels": None},
        {**good, "shape": [2**40, 2**40, 2**40]},
        {**good, "shape": []},
        {**good, "classes": "abc"},
        {**good, "skipped": [3]},
        {**good, "labels": [0.5] * 10},
    ]
    for content in (*map(json.dumps, wrong), "[" * 100_000, '{"format": 1e999}', "\0"):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(DataError, match=r"/(index\.json|images\.u8): ") as raised:
            open_packed(tmp_path)
        assert str(raised.value).isprintable()
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index\.json: not a JSON file"):
        open_packed(tmp_path)


def test_a_finished_set_is_opened_without_writing(tmp_path: Path) -> None:
    source = Counting()
    pack(source, tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()  # cannot be opened for writing, as if the folder were read-only
    before = tmp_path.stat().st_mtime_ns
    assert pack(source, tmp_path).images(slice(None)).equal(source.images(slice(None)))
    assert tmp_path.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="cannot be written"):
        pack(Counting(9), tmp_path)


def test_packing_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", fail)
    source = Counting()
    assert pack(source, tmp_path).images(slice(None)).equal(source.images(slice(None)))


def test_several_packers_at_once(tmp_path: Path) -> None:
    source = Counting(200)
    found: list[TestSet] = []
    threads = [threading.Thread(target=lambda: found.append(pack(source, tmp_path, block=7))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(packed.images([0, 199]).equal(source.images([0, 199])) for packed in found)
    assert find_damage(tmp_path) == []


def test_unlabelled_sets_can_be_packed_and_ambiguous_ones_not(tmp_path: Path) -> None:
    plain = TensorSet("plain", torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    assert pack(plain, tmp_path).labels is None
    plain.right = torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="several right labels"):
        pack(plain, tmp_path)
    with pytest.raises(ValueError, match="`block`"):
        pack(Counting(), tmp_path, block=0)
