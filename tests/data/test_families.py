"""The sets by name: opening, listing, checking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import testtime.data
from testtime.data import DataError, Family, TensorSet, check, data_root, describe, describe_all, expand, get, names
from testtime.data.corrupted import make_corrupted
from testtime.data.families import FAMILIES
from testtime.data.gradual import make_gradual


def test_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESTTIME_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_root(tmp_path / "given") == tmp_path / "given"
    assert data_root("~/sets") == tmp_path / "home" / "sets"
    assert data_root() == tmp_path / "env"
    monkeypatch.delenv("TESTTIME_DATA")
    assert data_root() == tmp_path / "xdg" / "testtime"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == tmp_path / "home" / ".cache" / "testtime"


@pytest.fixture
def cifar_root(tmp_path: Path) -> Path:
    """CIFAR-10 in full size, every picture black: labels are what counts here."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.zeros((10_000, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(10_000) % 10
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        records.tofile(folder / f"{name}.bin")
    return tmp_path


def test_open_by_name(cifar_root: Path) -> None:
    opened = {
        "digits": 500,
        "digits-c/contrast/2": 500,
        "digits-gradual/impulse_noise": 500,
        "cifar10": 10_000,
        "cifar10-c/jpeg_compression/1": 10_000,
        "cifar10-gradual/shot_noise": 10_000,
    }
    for name, count in opened.items():
        test_set = testtime.data.open(name, cifar_root)
        assert (test_set.name, len(test_set)) == (name, count)
        assert len(test_set.images([0, count - 1])) == 2
    assert len(testtime.data.open("cifar10", cifar_root, split="train")) == 50_000
    assert len(testtime.data.open("digits", split="train", size=8)) == 1297


def test_options_reach_the_set(cifar_root: Path) -> None:
    assert testtime.data.open("digits-c/fog/1", size=24).shape == (1, 24, 24)
    assert "seed 7" in testtime.data.open("digits-gradual/shot_noise", size=24, seed=7).origin
    with pytest.raises(ValueError, match="digits has no option `colour`"):
        testtime.data.open("digits", colour=True)
    with pytest.raises(ValueError, match="cifar10 has no option `size`"):
        testtime.data.open("cifar10", cifar_root, size=3)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("cifar", "Did you mean 'cifar10'"),
        ("nothing-like-it", "`name` must be one of digits"),
        ("cifar10-c", "needs CORRUPTION/LEVEL, such as cifar10-c/fog/5"),
        ("cifar10-c/fog", "needs CORRUPTION/LEVEL"),
        ("digits-c/fog/five", "the level must be 1 to 5"),
        ("digits-c/fog/6", "`level` must be 1 to 5"),
        ("digits-c/mist/1", "`corruption` must be one of"),
        ("digits-gradual", "needs NOISE"),
        ("digits-gradual/fog", "`noise` must be one of"),
        ("digits/5", "digits has no parts"),
        ("cifar10.1/v5", "`version`"),
        ("cifar10.1/v6/x", "must be cifar10.1, cifar10.1/v4"),
        ("folder", "`root` must name the folder"),
    ],
)
def test_bad_names(name: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        testtime.data.open(name)


def test_bad_splits() -> None:
    with pytest.raises(ValueError, match="`split`"):
        testtime.data.open("digits", split="dev")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no training split"):
        testtime.data.open("digits-c/fog/5", split="train")


def test_expand() -> None:
    assert len(expand("cifar10-c")) == 75
    assert len(expand("cifar10-c/*/5")) == 15
    assert expand(["digits", "digits-gradual", "digits"]) == (
        "digits",
        "digits-gradual/gaussian_noise",
        "digits-gradual/shot_noise",
        "digits-gradual/impulse_noise",
    )
    assert expand("cifar10-c/fog") == tuple(f"cifar10-c/fog/{level}" for level in range(1, 6))
    assert expand("cifar10.1") == ("cifar10.1",)
    assert expand("cifar10-c/saturate/5") == ("cifar10-c/saturate/5",)
    with pytest.raises(ValueError, match="matches no data set"):
        expand("cifar10-c/*/6")
    with pytest.raises(ValueError, match="matches no data set"):
        expand("mnist")
    assert len(set(names())) == len(names())


def test_describe_an_empty_root(tmp_path: Path) -> None:
    found = {description.name: description for description in describe_all(tmp_path)}
    assert list(found) == [name for name in FAMILIES if name != "folder"]
    assert found["digits"].state == found["digits-c"].state == found["digits-gradual"].state == "built in"
    missing = [name for name in found if not name.startswith("digits")]
    assert {found[name].state for name in missing} == {"missing"}
    assert all(found[name].path is not None and found[name].detail for name in missing)
    assert found["cifar10"].detail == "testtime data get cifar10"
    assert found["cifar10"].path == tmp_path / "cifar-10-batches-bin"


def test_describe_cifar(cifar_root: Path) -> None:
    assert describe("cifar10", cifar_root).state == "ready"
    assert describe("cifar10-c", cifar_root).state == "generated"
    assert describe("cifar10-gradual", cifar_root).state == "generated"
    (cifar_root / "CIFAR-10-C").mkdir()
    found = describe("cifar10-c", cifar_root)
    assert found.state == "incomplete"
    assert "gaussian_noise.npy: no such file" in found.detail
    (cifar_root / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    found = describe("cifar10", cifar_root)
    assert found.state == "incomplete"
    assert "data_batch_3.bin: no such file" in found.detail
    with pytest.raises(ValueError, match="`name`"):
        describe("folder", cifar_root)


def test_check_cifar(cifar_root: Path) -> None:
    assert check("cifar10", cifar_root) == []
    assert check("cifar10-gradual/shot_noise", cifar_root) == []
    assert check("cifar10-c/fog/5", cifar_root) == []
    path = cifar_root / "cifar-10-batches-bin" / "test_batch.bin"
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)
    records[0, 0] = 1
    records.tofile(path)
    faults = check("cifar10", cifar_root)
    assert len(faults) == 2
    assert "test has 999 of airplane, not 1,000" in faults[0]
    path.write_bytes(b"123")
    (cifar_root / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    faults = check("cifar10", cifar_root)
    assert ["data_batch_2.bin" in faults[0], "test_batch.bin" in faults[1]] == [True, True]


def test_check_cifar_c(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    # A file with a hole: as long as the official one, without its bytes on disk.
    np.lib.format.open_memmap(folder / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    labels = np.tile(np.arange(10_000) % 10, 5).astype(np.uint8)
    np.save(folder / "labels.npy", labels)
    assert check("cifar10-c/fog", tmp_path) == []
    assert len(check("cifar10-c", tmp_path)) == 14
    labels[20_000] = 3
    np.save(folder / "labels.npy", labels)
    assert "other labels at level 3" in check("cifar10-c/fog", tmp_path)[0]


def test_check_pictures(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for wnid in ("n1", "n2"):
            (tmp_path / "imagenet" / split / wnid).mkdir(parents=True)
            for n in range(2):
                Image.new("RGB", (30, 30)).save(tmp_path / "imagenet" / split / wnid / f"{n}.JPEG")
    steps: list[tuple[int, int]] = []
    assert check("imagenet", tmp_path, lambda done, total, _: steps.append((done, total))) == []
    assert steps == [(4, 8), (8, 8)]
    assert describe("imagenet", tmp_path).state == "incomplete"
    assert "val has 4 pictures of 2 classes" in describe("imagenet", tmp_path).detail
    (tmp_path / "imagenet" / "train" / "n2" / "1.JPEG").write_bytes(b"")
    faults = check("imagenet", tmp_path)
    assert faults == [f"{tmp_path / 'imagenet/train/n2/1.JPEG'}: an empty file"]
    assert check("folder", tmp_path / "imagenet" / "train") == faults
    (tmp_path / "imagenet-c" / "fog" / "1" / "n1").mkdir(parents=True)
    Image.new("RGB", (224, 224)).save(tmp_path / "imagenet-c" / "fog" / "1" / "n1" / "a.JPEG")
    assert check("imagenet-c/fog/1", tmp_path) == []
    assert len(check("imagenet-c/fog", tmp_path)) == 4
    assert len(check("imagenet-c", tmp_path)) == 74
    assert "gaussian_noise" in describe("imagenet-c", tmp_path).detail


def test_a_family_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(part: str, root: object, split: str, shade: int = 0) -> TensorSet:
        images = torch.full((2, 1, 4, 4), shade, dtype=torch.uint8)
        return TensorSet(f"blank/{part}", images, torch.tensor([0, 1]))

    def find(root: object) -> Path | None:
        return next(tmp_path.glob("blank*"), None)

    blank = Family(
        "blank",
        "two blank images",
        load,
        lambda parts, root, progress: [f"{part} is blank" for part in parts],
        ("a", "b"),
        find,
        lambda root, path: None if path.name == "blank" else "is not blank",
        folder="blank",
        elsewhere="make {root}/blank",
    )
    monkeypatch.setitem(FAMILIES, "blank", blank)
    assert names()[-2:] == ("blank/a", "blank/b")
    assert expand("blank") == expand("blank/*") == ("blank/a", "blank/b")
    opened = testtime.data.open("blank/b", shade=7)
    assert (opened.name, opened.images([0]).unique().tolist()) == ("blank/b", [7])
    with pytest.raises(ValueError, match="`colour`"):
        testtime.data.open("blank/a", colour=1)
    with pytest.raises(ValueError, match="no training split"):
        testtime.data.open("blank/a", split="train")
    found = describe_all(tmp_path)[-1]
    assert (found.name, found.what, found.state) == ("blank", blank.what, "missing")
    assert (found.path, found.detail) == (tmp_path / "blank", f"make {tmp_path}/blank")
    with pytest.raises(ValueError, match=f"make {tmp_path}/blank"):
        get("blank", tmp_path)
    (tmp_path / "blanket").touch()
    assert (describe("blank").state, describe("blank").detail) == ("incomplete", "is not blank")
    (tmp_path / "blanket").rename(tmp_path / "blank")
    assert describe("blank").state == "ready"
    assert check("blank") == ["a is blank", "b is blank"]
    assert check("blank/b") == ["b is blank"]


def test_a_set_made_from_a_family_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Family("blank", "", lambda part, root, split: TensorSet("blank", torch.zeros(3, 3, 8, 8, dtype=torch.uint8)))
    for derived in (make_corrupted(base, "blanks"), make_gradual(base, "blanks")):
        monkeypatch.setitem(FAMILIES, derived.name, derived)
        (name, *_) = expand(derived.name)
        assert (testtime.data.open(name).name, len(testtime.data.open(name, seed=3))) == (name, 3)
        assert describe(derived.name).state == "built in"


def test_check_what_is_not_there(tmp_path: Path) -> None:
    assert check("digits") == check("digits-c") == []
    for name in ("cifar10", "cifar10.1", "imagenet", "vid-robust", "vid-cifar7", "cifar10-c"):
        assert len(check(name, tmp_path)) in (1, 2)
    with pytest.raises(ValueError, match="`name`"):
        check("mnist")


def test_missing_sets_say_so(tmp_path: Path) -> None:
    for name in ("cifar10", "cifar10.1", "cifar10-c/fog/1", "imagenet", "imagenet-c/fog/1", "vid-robust"):
        with pytest.raises(DataError, match="holds no"):
            testtime.data.open(name, tmp_path)
