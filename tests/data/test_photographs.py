"""Photographs, from files that nobody vouches for over the packed cache to ImageNet's recipe and an evaluation."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from pictures import pictures
from testtime import Episodic, ResizedCropFlip, augment, load, resnet18, resnet50, train
from testtime.cli import run
from testtime.data import DataError, TestSet, fit_picture, folder, imagenet, pack, pack_all
from testtime.data import open as open_set
from testtime.data.folder import PictureSet
from testtime.training import Pool, Recipe, Trainer, Training, prepare

CLASSES = ("ants", "bees", "empty")
GOOD = ("cmyk.jpg", "gray.jpg", "one.png", "plain.jpg", "sixteen.png", "turned.jpg")
BAD = {
    "ants/cut.jpg": "cannot be decoded",
    "ants/huge.png": "limit of 64,000,000",
    "bees/nothing.jpg": "an empty file",
    "bees/text.jpg": "not a picture in a known format",
}


def photograph(seed: int, size: tuple[int, int] = (60, 45)) -> Image.Image:
    """Smooth colours, so that JPEG keeps them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def huge_png(side: int) -> bytes:
    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = part(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", zlib.compress(b"\0" * 100)) + part(b"IEND", b"")


def add_good(place: Path, offset: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    photograph(offset).save(place / "plain.jpg")
    photograph(offset + 1).convert("CMYK").save(place / "cmyk.jpg")
    photograph(offset + 2).convert("L").save(place / "gray.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph(offset + 3).save(place / "turned.jpg", exif=exif)
    Image.fromarray(np.arange(48, dtype=np.uint16).reshape(6, 8) * 1000).save(place / "sixteen.png")
    Image.new("RGB", (1, 1), (9, 8, 7)).save(place / "one.png")
    (place / "notes.txt").write_text("not a picture, and not called one")


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Every kind of file that a folder of photographs may hold."""
    place = tmp_path / "zoo"
    for number, name in enumerate(CLASSES[:2]):
        add_good(place / name, 10 * number)
    (place / "empty").mkdir()
    (place / "ants/cut.jpg").write_bytes((place / "ants/plain.jpg").read_bytes()[:700])
    (place / "ants/huge.png").write_bytes(huge_png(20_000))
    (place / "bees/nothing.jpg").write_bytes(b"")
    (place / "bees/text.jpg").write_text("hello")
    return place


def good_files() -> list[str]:
    return [f"{name}/{file}" for name in CLASSES[:2] for file in GOOD]


def check_zoo(found: TestSet, place: Path, size: int, resize: int) -> None:
    """The good pictures in order, each decoded by itself, and a line for each of the others."""
    expected = torch.stack([fit_picture(place / file, size, resize) for file in good_files()])
    assert found.images(slice(None)).equal(expected)
    assert found.labels is not None
    assert found.labels.tolist() == [0] * 6 + [1] * 6
    assert found.classes == CLASSES
    first, *lines = found.skipped
    assert first == "empty: holds no pictures"
    assert [line.split(": ")[0] for line in lines] == list(BAD)
    assert all(fault in line and "\n" not in line for line, fault in zip(lines, BAD.values(), strict=True))


def test_bad_pictures_are_left_out_and_named(zoo: Path) -> None:
    check_zoo(folder.load(zoo, size=16, on_bad="skip"), zoo, 16, 18)
    check_zoo(folder.list_pictures(zoo, 16, on_bad="skip").load_into_memory("skip"), zoo, 16, 18)


def test_a_bad_picture_stops_before_anything_is_read(zoo: Path) -> None:
    with pytest.raises(DataError, match="empty: holds no pictures"):
        folder.load(zoo, size=16, on_bad="fail")
    (zoo / "empty").rmdir()
    for open_it in (
        lambda: folder.load(zoo, size=16, on_bad="fail"),
        lambda: folder.list_pictures(zoo, 16).load_into_memory(),
    ):
        with pytest.raises(DataError, match=r"ants/cut\.jpg: cannot be decoded"):
            open_it()
    for file in BAD:
        (zoo / file).unlink()
    assert len(folder.load(zoo, size=16, on_bad="fail")) == 12
    with pytest.raises(ValueError, match="`on_bad`"):
        folder.load(zoo, on_bad="ignore")  # type: ignore[arg-type]


def test_a_folder_of_nothing_but_bad_pictures(tmp_path: Path) -> None:
    (tmp_path / "ants").mkdir()
    (tmp_path / "ants/a.jpg").write_text("hello")
    for open_it in (
        lambda: folder.load(tmp_path, on_bad="skip"),
        lambda: folder.list_pictures(tmp_path).load_into_memory("skip"),
        lambda: pack(folder.list_pictures(tmp_path), tmp_path / "packed", on_bad="skip"),
    ):
        with pytest.raises(DataError, match=r"cannot be read|can be read"):
            open_it()


def test_a_pack_leaves_the_same_out(zoo: Path, tmp_path: Path) -> None:
    listed = folder.list_pictures(zoo, 16, on_bad="skip")
    packed = pack(listed, tmp_path / "packed", block=5, on_bad="skip")
    check_zoo(packed, zoo, 16, 18)
    checked = folder.load(zoo, size=16, on_bad="skip")
    assert packed.fingerprint() == checked.fingerprint() != listed.fingerprint()
    assert packed.images([3, 0, 11]).equal(checked.images([3, 0, 11]))
    with pytest.raises(DataError, match=r"was packed without 4 files that cannot be read; ants/cut\.jpg"):
        pack(listed, tmp_path / "packed", block=5)


def test_packing_that_failed_goes_on_with_skip(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = folder.list_pictures(zoo, 16, on_bad="skip")
    (zoo / "ants/cut.jpg").write_bytes((zoo / "ants/plain.jpg").read_bytes())
    (zoo / "ants/huge.png").write_bytes((zoo / "ants/one.png").read_bytes())
    with pytest.raises(DataError, match=r"bees/nothing\.jpg: an empty file"):
        pack(listed, tmp_path / "packed", block=4)
    seen: list[int] = []
    whole = PictureSet.try_images

    def watched(self: PictureSet, numbers: torch.Tensor) -> tuple[torch.Tensor, dict[int, DataError]]:
        seen.extend(numbers.tolist())
        return whole(self, numbers)

    monkeypatch.setattr(PictureSet, "try_images", watched)
    packed = pack(listed, tmp_path / "packed", block=4, on_bad="skip")
    assert seen == list(range(8, 16))  # the first two blocks were there
    assert len(packed) == 14
    assert len(packed.unreadable) == 2


# ImageNet ------------------------------------------------------------------------------------------------------------

WNIDS = ("n01440764", "n02102040", "n03000684")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """ImageNet's layout in miniature."""
    for offset, split in enumerate(("train", "val")):
        for number, wnid in enumerate(WNIDS):
            for n in range(3):
                path = tmp_path / "imagenet" / split / wnid / f"{n}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                photograph(100 * offset + 10 * number + n, (70, 50)).save(path)
    return tmp_path


def test_the_papers_recipe_is_imagenets_default(root: Path) -> None:
    setup = prepare("imagenet", root=root)
    assert setup.recipe == Recipe.imagenet()
    assert (setup.recipe.epochs, setup.recipe.batch, setup.recipe.drops) == (90, 256, (30, 60))
    assert setup.net.card.architecture["name"] == "resnet18"
    assert (setup.net.card.size, setup.net.card.augment) == (224, {"name": "resized-crop-flip", "size": 224})
    assert setup.source.shape == (3, 256, 256)
    assert setup.test is not None
    assert setup.test.shape == (3, 224, 224)
    norms = [module for module in setup.net.modules() if isinstance(module, nn.GroupNorm)]
    assert norms
    assert {norm.num_groups for norm in norms} == {32}
    features = setup.net.encoder(torch.zeros(1, 3, 64, 64))
    assert features.shape == (1, 256, 4, 4)  # a sixteenth: groups 1 to 3 are the encoder, group 4 the branches'
    naive = Image.open(root / "imagenet/train" / WNIDS[0] / "0.JPEG").resize((358, 256), Image.Resampling.BILINEAR)
    assert np.array_equal(setup.source.images([0])[0].permute(1, 2, 0).numpy(), np.asarray(naive)[:, 51:307])
    naive = Image.open(root / "imagenet/val" / WNIDS[0] / "0.JPEG").resize((358, 256), Image.Resampling.BILINEAR)
    assert np.array_equal(setup.test.images([0])[0].permute(1, 2, 0).numpy(), np.asarray(naive)[16:240, 67:291])


def test_crops_may_be_kept_large(root: Path) -> None:
    assert prepare("imagenet", root=root, size=28).net.card.augment == {"name": "resized-crop-flip", "size": 28}
    net = prepare("imagenet", root=root, size=28, area=0.35).net
    assert net.card.augment == {"name": "resized-crop-flip", "size": 28, "scale": [0.35, 1.0]}
    assert augment.make(net.card.augment) == ResizedCropFlip(28, scale=(0.35, 1.0))
    for wrong in ({"area": 0.0}, {"area": 1.5}, {"area": 0.5, "network": "resnet26"}):
        with pytest.raises(ValueError, match="`area` must be in"):
            prepare("imagenet", root=root, size=28, **wrong)  # type: ignore[arg-type]


def test_the_cache_is_made_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare("imagenet", root=root, size=28)
    assert sorted(path.name for path in (root / "packed").iterdir()) == ["imagenet-train-32-32", "imagenet-val-28-32"]

    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr("testtime.data.folder.fit_pictures", fail)
    again = prepare("imagenet", root=root, size=28)
    assert again.source.images(slice(None)).equal(first.source.images(slice(None)))
    assert open_set("imagenet", root, size=28).images([0]).shape == (1, 3, 28, 28)  # evaluation reads it too


def test_training_from_the_cache_is_training_from_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed set read by the batch, the same in memory, and a run that stopped after an epoch: one result."""
    recipe = Recipe.imagenet(epochs=2, batch=4, drops=(1,))

    def trained(epochs: int, **options: object) -> nn.Module:
        setup = prepare(str(root / "imagenet"), "resnet18", size=28, **options)  # type: ignore[arg-type]
        out = root / "run" if "cache" in options else None
        return train(setup.net, setup.source, recipe=recipe.over(epochs), folder=out)

    held = trained(2)
    monkeypatch.setattr("testtime.training.pool.RESIDENT_BYTES", 0)
    setup = prepare(str(root / "imagenet"), "resnet18", size=28, cache=root / "cache")
    progress = _stop_after_an_epoch()
    with pytest.raises(KeyboardInterrupt):
        train(setup.net, setup.source, recipe=recipe.over(2), folder=root / "run", progress=progress)
    resumed = trained(2, cache=root / "cache")
    for name, tensor in held.state_dict().items():
        assert tensor.equal(resumed.state_dict()[name]), name
    data = json.loads((root / "run/record.json").read_text())["configuration"]["data"]
    assert data["shape"] == [3, 32, 32]


def _stop_after_an_epoch() -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, text: str) -> None:
        if total and done > total // 2:
            raise KeyboardInterrupt

    return progress


def test_a_limit_decodes_only_what_it_takes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare("imagenet", root=root, size=28)
    assert isinstance(whole.source, TestSet)
    decoded: list[str] = []
    real = PictureSet.try_images

    def watched(self: PictureSet, numbers: torch.Tensor) -> tuple[torch.Tensor, dict[int, DataError]]:
        decoded.extend(self.files[number] for number in numbers.tolist())
        return real(self, numbers)

    monkeypatch.setattr(PictureSet, "try_images", watched)
    some = prepare("imagenet", root=root, size=28, limit=4)
    assert len(some.source) == 4
    assert len(decoded) == 4 + 9  # the test set is whole
    assert some.source.labels is not None
    everything = {bytes(image.numpy().tobytes()): n for n, image in enumerate(whole.source.images(slice(None)))}
    numbers = [everything[image.numpy().tobytes()] for image in some.source.images(slice(None))]
    assert whole.source.labels is not None
    assert some.source.labels.equal(whole.source.labels[numbers])


@pytest.mark.parametrize("size", [64, 224])
def test_corrupted_photographs_are_made_at_224_and_scaled(root: Path, size: int) -> None:
    """Short side to 256, centre 224, corrupted with ImageNet's parameters, then down: by hand, with Pillow."""
    from testtime.corruptions import corrupt

    made = imagenet.load_c("contrast", 4, root, size=size, seed=3)
    assert made.shape == (3, size, size)
    number, file = 4, root / "imagenet/val" / WNIDS[1] / "1.JPEG"
    picture = Image.open(file).resize((358, 256), Image.Resampling.BILINEAR).crop((67, 16, 291, 240))
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    shifted = corrupt(pixels, "contrast", 4, seed=3, samples=torch.tensor([number]), scale="imagenet")[0]
    naive = Image.fromarray(shifted.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BILINEAR)
    difference = made.images([number])[0].permute(1, 2, 0).int().numpy() - np.asarray(naive).astype(int)
    assert np.abs(difference).max() <= 1


def test_packed_corruptions_are_what_a_run_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = open_set("imagenet-c/contrast/5", root, size=32)
    images, mark = fresh.images(slice(None)), fresh.fingerprint()
    done: list[tuple[int, int]] = []
    packed = pack_all("imagenet-c/contrast/*", root, size=32, progress=lambda *step: done.append(step[:2]))
    assert len(packed) == 5
    assert done[-1] == (45, 45)
    monkeypatch.setattr("testtime.corruptions.corrupt", None)
    again = open_set("imagenet-c/contrast/5", root, size=32)
    assert again.images(slice(None)).equal(images)
    assert again.fingerprint() == mark  # a run may go on with either
    with pytest.raises(ValueError, match="Only imagenet and imagenet-c"):
        pack_all("digits", root)


# Networks ------------------------------------------------------------------------------------------------------------


def test_resnet50_trains_a_step_and_adapts() -> None:
    net = resnet50(3, size=32, seed=1)
    net.describe(augment={"name": "resized-crop-flip", "size": 32})
    images = torch.stack([torch.from_numpy(np.array(photograph(n, (40, 40)))).permute(2, 0, 1) for n in range(3)])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    pool = Pool("images", images, torch.arange(3), torch.device("cpu"))
    trainer = Trainer([Training(net, Recipe.imagenet(batch=3), pool)])
    for batch in trainer.batches(0):
        trainer.step(*batch)
    assert trainer.read()[0]["loss"] > 0
    changed = [name for name, tensor in net.state_dict().items() if not tensor.equal(before[name])]
    assert {name.split(".")[0] for name in changed} == {"encoder", "classifier", "ssl"}
    net.eval()
    prediction = Episodic(net, steps=1, copies=2, lr=0.01).predict(images[:1, :, :32, :32])
    assert prediction.adapted.tolist() == [True]
    assert not prediction.logits.equal(prediction.logits_before)


def test_crops_of_the_networks_size_come_from_larger_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    net = resnet18(3, size=32)
    net.describe(augment={"name": "resized-crop-flip", "size": 32})
    images = pictures(4, 3, 37, 37, dtype=torch.uint8)
    pool = Pool("images", images, torch.tensor([0, 1, 2, 0]), torch.device("cpu"))
    trainer = Trainer([Training(net, Recipe.imagenet(batch=4), pool)])
    seen: list[tuple[int, ...]] = []
    encode = trainer.model.encode

    def look(images: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(images.shape))
        return encode(images)

    monkeypatch.setattr(trainer.model, "encode", look)
    for batch in trainer.batches(0):
        trainer.step(*batch)
    assert set(seen) == {(4, 3, 32, 32)}


# The command line ----------------------------------------------------------------------------------------------------


def test_training_and_evaluation_of_a_folder_with_bad_pictures(
    zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    training = ["train", "--data", str(zoo), "--network", "resnet18", "--size", "32", "--epochs", "1", "--batch", "8"]
    training += ["--device", "cpu", "--out", str(out)]
    assert run(training) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert "empty: holds no pictures" in error
    assert not (out / "record.json").exists()
    assert run([*training, "--on-bad-image", "skip", "--limit", "64"]) == 0
    record = json.loads((out / "record.json").read_text())
    lines = record["configuration"]["data"]["skipped"]
    assert [line.split(": ")[0] for line in lines] == ["empty", *BAD]
    assert record["configuration"]["data"]["count"] == 12
    assert capsys.readouterr().err.count("left out: ") == 5

    evaluation = ["eval", "-c", str(out / "network.safetensors"), "--data", str(zoo), "--methods", "fixed,online"]
    evaluation += ["--copies", "2", "--device", "cpu", "--out", str(runs)]
    assert run(evaluation) == 1
    assert "empty: holds no pictures" in capsys.readouterr().err
    assert not (runs / "run.json").exists()
    assert run([*evaluation, "--on-bad-image", "skip"]) == 0
    about = json.loads((runs / "run.json").read_text())
    assert about["skipped"] == {"folder/zoo": lines}
    assert "12 images" in capsys.readouterr().out


def test_data_pack_on_the_command_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "imagenet/val" / WNIDS[2] / "2.JPEG").write_bytes(b"broken")
    arguments = ["data", "pack", "imagenet", "imagenet-c/fog/5", "--size", "32", "--data-root", str(root)]
    assert run(arguments) == 1
    assert "2.JPEG: not a picture" in capsys.readouterr().err
    assert run([*arguments, "--on-bad-image", "skip", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("left out: n03000684/2.JPEG: not a picture in a known format\n") == 1
    assert shown.out == f"2 sets are in {root / 'packed'}\n"
    assert len(open_set("imagenet-c/fog/5", root, size=32, on_bad="skip")) == 8
    assert run(["data", "check", "packed", "--data-root", str(root)]) == 0
    with open(root / "packed/imagenet-c-fog-5-32/images.u8", "r+b") as file:
        file.write(b"\xff\x00\xff")
    assert run(["data", "check", "packed", "--data-root", str(root)]) == 1
    assert "images 0 to 7 are damaged" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_share_the_cache_and_the_batches(root: Path) -> None:
    """`torchrun` with two processes gives what one gives, up to the order of a sum."""
    arguments = ["-m", "testtime", "train", "--data", str(root / "imagenet"), "--network", "resnet18", "--size", "28"]
    arguments += ["--batch", "4", "--cache", str(root / "cache"), "--device", "cpu"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for start, out in (([], root / "one"), (launch, root / "two")):
        command = [sys.executable, *start, *arguments, "--epochs", "1", "--out", str(out)]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
    assert sorted(path.name.split("-")[0] for path in (root / "cache").iterdir()) == ["train", "val"]
    one, two = (json.loads((root / name / "record.json").read_text()) for name in ("one", "two"))
    assert one["configuration"] == two["configuration"]
    assert (one["hardware"]["processes"], two["hardware"]["processes"]) == (1, 2)
    assert two["epochs"][0]["loss"] == pytest.approx(one["epochs"][0]["loss"], rel=1e-3)
    nets = [load(root / name / "network.safetensors").state_dict() for name in ("one", "two")]
    for name, tensor in nets[0].items():
        assert torch.allclose(tensor, nets[1][name], rtol=1e-2, atol=1e-4), name


@pytest.mark.slow
def test_the_documents_code_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of docs/imagenet.md, at a size for two cores."""
    document = (Path(__file__).parents[2] / "docs/imagenet.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    smaller = {
        '"cuda"': '"cpu"',
        'epochs=60, precision="bf16"': "epochs=1, batch=4",
        "size=128": "size=28",
        '"imagenet-c/*/5"': '"imagenet-c/contrast/5"',
        'copies=["64"]': 'copies=["2"], corruptions="contrast", limit=2',
    }
    for old, new in smaller.items():
        assert old in code
        code = code.replace(old, new)
    monkeypatch.chdir(root)
    (root / "imagenet").rename(root / "photographs")
    exec(compile(code, "docs/imagenet.md", "exec"), {})
    assert capsys.readouterr().out.count(" error ") == 3  # a line for each mode
    assert (root / "photographs/packed/imagenet-c-contrast-5-28/index.json").is_file()
    assert sorted(path.name[:3] for path in (root / "cache").iterdir()) == ["tra", "val"]
