"""Corrupting pictures on disk: files, folders, data sets in their published layouts, and the gallery."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from testtime.corruptions import CORRUPTIONS, corrupt
from testtime.data import (
    corrupt_cifar,
    corrupt_file,
    corrupt_folder,
    corrupt_imagenet,
    draw_gallery,
    read_frost,
    write_gallery,
)
from testtime.data import corrupt_files as files
from testtime.data import corrupt_folders as folders
from testtime.storage import FileError, hold_folder


def picture(number: int, height: int = 32, width: int = 40, gray: bool = False) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(rows / (3 + channel) + columns / 5 + number) for channel in range(3)]
    pixels = np.stack(waves, -1).astype(np.uint8)
    return pixels[..., 0] if gray else pixels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tree of pictures of several sizes, one gray, and a file that is none."""
    root = tmp_path / "pictures"
    for number, (place, size) in enumerate(
        [("a/one.png", (32, 40)), ("a/two.png", (32, 40)), ("b/deep/three.png", (50, 33)), ("zero.png", (32, 40))]
    ):
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, *size)).save(path)
    Image.fromarray(picture(9, gray=True)).save(root / "b/gray.png")
    (root / "notes.txt").write_text("no picture")
    return root


class Steps(list[tuple[int, int, str]]):
    """A progress callback that lists what it is called with."""

    def __call__(self, done: int, total: int, word: str) -> None:
        self.append((done, total, word))


def tree(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def read(path: Path) -> torch.Tensor:
    return files.picture_tensor(files.read_picture(path))


def test_a_file_is_its_tensors_corruption(tmp_path: Path):
    Image.fromarray(picture(1)).save(tmp_path / "in.png")
    made = corrupt_file(tmp_path / "in.png", tmp_path / "new" / "out.png", "fog", 3, seed=7)
    assert made == tmp_path / "new" / "out.png"
    expected = corrupt(read(tmp_path / "in.png")[None], "fog", 3, seed=7)
    assert torch.equal(read(made), expected[0])
    assert tree(tmp_path) == ["in.png", "new/out.png"]


def test_pictures_are_read_upright_in_gray_or_colour(tmp_path: Path):
    turned = Image.fromarray(picture(1))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    assert read(tmp_path / "turned.png").shape == (3, 40, 32)
    Image.fromarray(picture(1, gray=True)).save(tmp_path / "gray.png")
    assert read(tmp_path / "gray.png").shape == (1, 32, 40)
    Image.fromarray(picture(1)).convert("P").save(tmp_path / "palette.png")
    assert read(tmp_path / "palette.png").shape == (3, 32, 40)


def test_deep_gray_and_transparent_pictures_are_read_as_they_look(tmp_path: Path):
    gray = picture(0, gray=True)
    Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    assert torch.equal(read(tmp_path / "deep.png"), torch.from_numpy(gray)[None])
    clear = np.dstack([picture(0), np.full(gray.shape, 255, np.uint8)])
    clear[:4, :, 3] = 0
    Image.fromarray(clear).save(tmp_path / "clear.png")
    seen = read(tmp_path / "clear.png")
    assert (seen[:, :4] == 255).all()
    assert torch.equal(seen[:, 4:], torch.from_numpy(picture(0)).permute(2, 0, 1)[:, 4:])
    Image.fromarray(gray.astype(np.float32) / 255).save(tmp_path / "float.tif")
    with pytest.raises(FileError, match=r"/float\.tif: "):
        read(tmp_path / "float.tif")


def test_the_input_is_never_written_over(tmp_path: Path):
    Image.fromarray(picture(1)).save(tmp_path / "in.png")
    before = (tmp_path / "in.png").read_bytes()
    (tmp_path / "link.png").symlink_to(tmp_path / "in.png")
    for target in ("in.png", "link.png", "x/../in.png"):
        with pytest.raises(FileError, match=r"/(in|link)\.png: "):
            corrupt_file(tmp_path / "in.png", tmp_path / target, "fog", 1)
    with pytest.raises(FileError, match=r"/(in|link)\.png: "):
        write_gallery(tmp_path / "in.png", tmp_path / "in.png")
    for target in (".", "pictures", "pictures/inside", ".."):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        with pytest.raises(FileError, match="input"):
            corrupt_folder(tmp_path / "pictures", tmp_path / target, "fog", 1)
    assert (tmp_path / "in.png").read_bytes() == before


def test_unreadable_pictures_are_named(tmp_path: Path):
    with pytest.raises(FileError, match=r"/absent\.png: no such file"):
        corrupt_file(tmp_path / "absent.png", tmp_path / "out.png", "fog", 1)
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(FileError, match=r"/broken\.png: "):
        corrupt_file(tmp_path / "broken.png", tmp_path / "out.png", "fog", 1)
    whole = tmp_path / "whole.jpg"
    Image.fromarray(picture(0, 200, 200)).save(whole)
    (tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:900])
    with pytest.raises(FileError, match=r"/cut\.jpg: "):
        corrupt_file(tmp_path / "cut.jpg", tmp_path / "out.png", "fog", 1)
    with pytest.raises(FileError, match=r"/out\.xyz: .*\.png"):
        corrupt_file(whole, tmp_path / "out.xyz", "fog", 1)
    with pytest.raises(ValueError, match="`severity` must be 1 to 5, got 9"):
        corrupt_file(whole, tmp_path / "out.png", "fog", 9)
    assert tree(tmp_path) == ["broken.png", "cut.jpg", "whole.jpg"]


def test_pictures_beyond_the_limits_are_named(tmp_path: Path):
    Image.new("L", (65_501, 1)).save(tmp_path / "long.png")
    with pytest.raises(FileError, match=r"/long\.png: .*65,500"):
        corrupt_file(tmp_path / "long.png", tmp_path / "out.png", "contrast", 1)
    Image.new("L", (20_000, 1)).save(tmp_path / "wide.png")
    with pytest.raises(FileError, match=r"/wide\.webp: ") as raised:  # WebP ends at 16,383
        corrupt_file(tmp_path / "wide.png", tmp_path / "wide.webp", "contrast", 1)
    assert str(raised.value).isprintable()
    assert tree(tmp_path) == ["long.png", "wide.png"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_a_lack_of_memory_names_the_picture(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    for module in (files, folders):
        monkeypatch.setattr(module, "corrupt", fail)
    with pytest.raises(FileError, match=r"/zero\.png: "):
        corrupt_file(folder / "zero.png", tmp_path / "out.png", "fog", 1)
    with pytest.raises(FileError, match=r"/a/one\.png: "):
        corrupt_folder(folder, tmp_path / "out", "fog", 1)
    assert tree(tmp_path / "out") == ["corruption.json"]
    assert not (tmp_path / "out.png").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no such files there")
def test_a_folder_may_hold_anything(folder: Path, tmp_path: Path):
    os.mkfifo(folder / "a" / "pipe.png")
    (folder / "a" / "nothing.png").symlink_to("nothing at all.png")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "again").symlink_to(folder)
    odd = os.fsdecode(b"odd \xff\n.png")
    Image.fromarray(picture(3)).save(folder / odd)
    steps = Steps()
    corrupt_folder(folder, tmp_path / "out", "contrast", 1, progress=steps)
    assert steps[-1][:2] == (6, 6)
    assert (tmp_path / "out" / odd).is_file()
    with pytest.raises(FileError, match=r"/pipe\.png: "):
        corrupt_file(folder / "a" / "pipe.png", tmp_path / "out.png", "fog", 1)
    (folder / odd).write_bytes(b"broken")
    with pytest.raises(FileError) as raised:
        corrupt_folder(folder, tmp_path / "other", "contrast", 1)
    assert str(raised.value).isprintable()


def test_large_pictures_are_read_few_at_a_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corrupt_folder(folder, tmp_path / "together", "fog", 2)
    monkeypatch.setattr(folders, "_WINDOW_PIXELS", 32 * 40 * 2)
    sizes: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda images, *rest: sizes.append(len(images)) or stack(images, *rest))
    corrupt_folder(folder, tmp_path / "apart", "fog", 2)
    assert max(sizes) == 2
    for name in tree(tmp_path / "together"):
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "apart" / name).read_bytes()


@pytest.mark.parametrize("content", ["[]", "7", "{", "", "[" * 100_000, '{"seed": NaN}'])
def test_damaged_settings_are_named(folder: Path, tmp_path: Path, content: str):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "corruption.json").write_text(content)
    with pytest.raises(FileError, match=r"/corruption\.json: ") as raised:
        corrupt_folder(folder, tmp_path / "out", "fog", 2)
    assert str(raised.value).isprintable()
    assert tree(tmp_path / "out") == ["corruption.json"]


def test_a_folder_keeps_its_tree_and_numbers_pictures_by_their_paths(folder: Path, tmp_path: Path):
    target = tmp_path / "out"
    steps = Steps()
    corrupt_folder(folder, target, "gaussian_noise", 5, seed=2, progress=steps)
    assert tree(target) == ["a/one.png", "a/two.png", "b/deep/three.png", "b/gray.png", "corruption.json", "zero.png"]
    assert steps[0][:2] == (0, 5)
    assert steps[-1][:2] == (5, 5)
    for number, place in enumerate(["a/one.png", "a/two.png", "b/deep/three.png", "b/gray.png", "zero.png"]):
        expected = corrupt(read(folder / place)[None], "gaussian_noise", 5, seed=2, samples=torch.tensor([number]))
        assert torch.equal(read(target / place), expected[0])


def test_a_folder_goes_on_where_it_was(folder: Path, tmp_path: Path):
    target = tmp_path / "out"
    corrupt_folder(folder, target, "fog", 2)
    kept, gone = target / "a/one.png", target / "b/gray.png"
    expected = gone.read_bytes()
    gone.unlink()
    kept.write_bytes(b"left as it is")
    steps = Steps()
    corrupt_folder(folder, target, "fog", 2, progress=steps)
    assert [done for done, _, _ in steps] == [4, 5]
    assert gone.read_bytes() == expected
    assert kept.read_bytes() == b"left as it is"


def test_a_folder_does_not_mix_settings(folder: Path, tmp_path: Path):
    corrupt_folder(folder, tmp_path / "out", "fog", 2)
    with pytest.raises(FileError, match=r"/out: .*seed: 0 there, 1 now; severity: 2 there, 3 now"):
        corrupt_folder(folder, tmp_path / "out", "fog", 3, seed=1)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(corrupt_folder, name="contrast", severity=2),
        functools.partial(corrupt_imagenet, names=["contrast"], severities=[2]),
    ],
)
@pytest.mark.parametrize("change", ["added", "renamed", "removed", "content"])
def test_a_folder_does_not_mix_pictures(folder: Path, tmp_path: Path, make: Callable[..., Path], change: str):
    for number, path in enumerate(["a/one.ppm", "a/two.ppm"]):  # uncompressed: all have the same size
        Image.fromarray(picture(number)).save(folder / path)
        (folder / path).with_suffix(".png").unlink()
    make(folder, tmp_path / "out")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in tree(tmp_path / "out")}
    if change == "added":
        Image.fromarray(picture(5)).save(folder / "a" / "first.png")
    elif change == "renamed":
        (folder / "zero.png").rename(folder / "null.png")
    elif change == "removed":
        (folder / "zero.png").unlink()
    else:
        Image.fromarray(picture(5)).save(folder / "a" / "two.ppm")
    with pytest.raises(FileError, match="/out: made from other pictures"):
        make(folder, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in tree(tmp_path / "out")} == before


def test_a_copy_of_the_pictures_resumes_the_folder(folder: Path, tmp_path: Path):
    corrupt_folder(folder, tmp_path / "out", "contrast", 2)
    expected = (tmp_path / "out/zero.png").read_bytes()
    (tmp_path / "out/zero.png").unlink()
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    corrupt_folder(tmp_path / "copy", tmp_path / "out", "contrast", 2)
    assert (tmp_path / "out/zero.png").read_bytes() == expected


def test_a_folder_without_a_checksum_is_accepted_once(folder: Path, tmp_path: Path):
    note = tmp_path / "out" / "corruption.json"
    corrupt_folder(folder, tmp_path / "out", "contrast", 2)
    settings = json.loads(note.read_text())
    del settings["pictures"]
    note.write_text(json.dumps(settings))
    with pytest.raises(FileError, match="seed: 0 there, 1 now"):
        corrupt_folder(folder, tmp_path / "out", "contrast", 2, seed=1)
    assert json.loads(note.read_text()) == settings
    corrupt_folder(folder, tmp_path / "out", "contrast", 2)
    (folder / "zero.png").unlink()
    with pytest.raises(FileError, match="other pictures"):
        corrupt_folder(folder, tmp_path / "out", "contrast", 2)


def test_a_picture_that_is_removed_meanwhile_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "find_pictures", lambda _: [Path("gone.png")])
    with pytest.raises(FileError, match=r"/gone\.png: cannot be read"):
        corrupt_folder(folder, tmp_path / "out", "contrast", 2)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_unknown_origin_is_left_alone(folder: Path, tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "fog.npy").write_bytes(b"somebody's")
    for run in (
        lambda target: corrupt_folder(folder, target, "fog", 2),
        lambda target: corrupt_imagenet(folder, target),
        lambda target: corrupt_cifar(*cifar(), target),
    ):
        with pytest.raises(FileError, match=r"/theirs: .*corruption\.json"):
            run(tmp_path / "theirs")
    assert tree(tmp_path / "theirs") == ["fog.npy"]


def test_a_broken_picture_stops_the_folder_and_leaves_no_part(folder: Path, tmp_path: Path):
    (folder / "b" / "broken.png").write_bytes(b"no")
    with pytest.raises(FileError, match=r"/broken\.png: "):
        corrupt_folder(folder, tmp_path / "out", "fog", 2)
    assert not [name for name in tree(tmp_path / "out") if name.endswith(".part")]


def test_folders_without_pictures_are_errors(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="/empty: "):
        corrupt_folder(tmp_path / "empty", tmp_path / "out", "fog", 1)
    with pytest.raises(FileError, match="/absent: "):
        corrupt_folder(tmp_path / "absent", tmp_path / "out", "fog", 1)
    Image.fromarray(picture(0)).save(tmp_path / "empty" / "one.png")
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileError, match="/taken: "):
        corrupt_folder(tmp_path / "empty", tmp_path / "taken", "fog", 1)


def cifar(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    images = np.stack([picture(n, 32, 32) for n in range(count)])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.arange(count) % 10


def test_cifar_has_the_published_layout(tmp_path: Path):
    images, labels = cifar()
    names = ("fog", "frost", "jpeg_compression")
    steps = Steps()
    corrupt_cifar(images, labels, tmp_path / "c", names=names, seed=4, chunk=4, progress=steps)
    assert tree(tmp_path / "c") == ["corruption.json", "fog.npy", "frost.npy", "jpeg_compression.npy", "labels.npy"]
    assert steps[-1][:2] == (90, 90)
    made = np.load(tmp_path / "c" / "labels.npy", allow_pickle=False)
    assert made.dtype == np.uint8
    assert made.tolist() == labels.tolist() * 5
    for name in names:
        array = np.load(tmp_path / "c" / f"{name}.npy", allow_pickle=False)
        assert array.shape == (30, 32, 32, 3)
        assert array.dtype == np.uint8
        for severity in range(1, 6):
            expected = corrupt(images, name, severity, seed=4).permute(0, 2, 3, 1).numpy()
            np.testing.assert_array_equal(array[(severity - 1) * 6 : severity * 6], expected)


def test_cifar_goes_on_where_it_was_stopped_and_leaves_no_half_file(tmp_path: Path):
    images, labels = cifar()
    target = tmp_path / "c"

    def interrupt(done: int, total: int, word: str) -> None:
        if word == "contrast 3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corrupt_cifar(images, labels, target, names=("fog", "contrast"), chunk=2, progress=interrupt)
    assert tree(target) == ["corruption.json", "fog.npy", "labels.npy"]
    first = (target / "fog.npy").stat().st_mtime_ns
    steps = Steps()
    corrupt_cifar(images, labels, target, names=("fog", "contrast"), chunk=2, progress=steps)
    assert steps[0][:2] == (30, 60)
    assert (target / "fog.npy").stat().st_mtime_ns == first
    assert tree(target) == ["contrast.npy", "corruption.json", "fog.npy", "labels.npy"]
    with pytest.raises(FileError, match=r"/c: .*seed: 0 there, 1 now"):
        corrupt_cifar(images, labels, target, seed=1)
    with pytest.raises(FileError, match=r"/c: .*shape: \[6, 3, 32, 32\] there, \[5, 3, 32, 32\] now"):
        corrupt_cifar(images[:5], labels[:5], target)


def test_a_killed_run_leaves_whole_files_only(tmp_path: Path):
    program = """
import sys, torch
from testtime.data import corrupt_cifar
images = torch.arange(4000 * 3072).view(4000, 3, 32, 32).to(torch.uint8)
labels = torch.zeros(4000, dtype=torch.long)
def report(done, total, word):
    if word.startswith("fog"):
        print(word, flush=True)
corrupt_cifar(images, labels, sys.argv[1], names=("contrast", "fog"), chunk=50, progress=report)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "c")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fog 1\n"
        process.kill()
    whole = [name for name in tree(tmp_path / "c") if not name.endswith(".part")]
    assert whole == ["contrast.npy", "corruption.json", "labels.npy"]
    assert np.load(tmp_path / "c" / "contrast.npy", allow_pickle=False).shape == (20_000, 32, 32, 3)


def test_cifar_is_written_block_after_block(tmp_path: Path):
    # A file that has its full length from the start would meet a full disk only when its pages are written.
    images, labels = torch.zeros(40, 3, 32, 32, dtype=torch.uint8), torch.zeros(40, dtype=torch.int64)

    def measure(done: int, total: int, word: str) -> None:
        for part in (tmp_path / "out").glob(".*.part"):
            assert part.stat().st_size <= 128 + done * 3072, word

    corrupt_cifar(images, labels, tmp_path / "out", names=["contrast"], chunk=10, progress=measure)
    assert np.load(tmp_path / "out" / "contrast.npy").shape == (200, 32, 32, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders there")
def test_a_folder_is_one_process_and_what_a_killed_one_left_goes(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".corruption.json.x.part").write_text("{")
    with hold_folder(out), pytest.raises(FileError, match="another process is at work"):
        corrupt_folder(folder, out, "contrast", 1)
    assert tree(out) == [".corruption.json.x.part"]
    corrupt_folder(folder, out, "contrast", 1)
    (out / "a" / ".one.png.x.part").write_text("half")
    (out / "a" / "one.png").unlink()
    corrupt_folder(folder, out, "contrast", 1)
    assert tree(out) == ["a/one.png", "a/two.png", "b/deep/three.png", "b/gray.png", "corruption.json", "zero.png"]


def test_frost_photographs_come_from_a_folder(tmp_path: Path):
    assert read_frost(None) is None
    with pytest.raises(FileError, match=rf"^{tmp_path}: .*frost1\.png"):
        read_frost(tmp_path)
    for number in range(1, 6):
        Image.fromarray(picture(number)).save(tmp_path / f"frost{number}.png")
    found = read_frost(tmp_path)
    assert found is not None
    for number, photograph in enumerate(found, start=1):
        assert torch.equal(photograph, torch.from_numpy(picture(number)).permute(2, 0, 1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "frost1.png").write_bytes(b"no picture")
    with pytest.raises(FileError, match=r"/frost1\.png: "):
        read_frost(tmp_path / "other")


def test_missing_frost_photographs_are_found_out_before_anything_is_written(folder: Path, tmp_path: Path):
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    with pytest.raises(FileError, match=r"frost1\.png"):
        corrupt_folder(folder, tmp_path / "out", "frost", 1, frost=tmp_path)
    with pytest.raises(FileError, match=r"frost1\.png"):
        corrupt_cifar(images, torch.zeros(1, dtype=torch.int64), tmp_path / "out", frost=tmp_path)
    assert not (tmp_path / "out").exists()


def test_cifar_checks_its_arguments(tmp_path: Path):
    images, labels = cifar()
    with pytest.raises(ValueError, match=r"`labels` must have one entry for each of 6 images, got \(5,\)"):
        corrupt_cifar(images, labels[:5], tmp_path / "c")
    with pytest.raises(ValueError, match=r"`images` must be uint8 \(N, 3, H, W\)"):
        corrupt_cifar(images.float(), labels, tmp_path / "c")
    with pytest.raises(ValueError, match="`name` must be one of"):
        corrupt_cifar(images, labels, tmp_path / "c", names=("mist",))
    assert not (tmp_path / "c").exists()


def test_imagenet_has_the_published_layout(tmp_path: Path):
    source = tmp_path / "val"
    for number, place in enumerate(["n01/a.JPEG", "n01/b.png", "n02/c.JPEG"]):
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, 120 + 20 * number, 150)).save(source / place)
    target = tmp_path / "c"
    steps = Steps()
    corrupt_imagenet(source, target, names=("contrast", "impulse_noise"), severities=(1, 4), seed=3, progress=steps)
    assert steps[-1][:2] == (12, 12)
    outputs = ["n01/a.JPEG", "n01/b.JPEG", "n02/c.JPEG"]
    expected = [f"{n}/{s}/{o}" for n, s, o in itertools.product(("contrast", "impulse_noise"), (1, 4), outputs)]
    assert tree(target) == sorted([*expected, "corruption.json"])
    middle = files.read_middle(source / "n02/c.JPEG")
    assert middle.size == (224, 224)
    wanted = corrupt(files.picture_tensor(middle)[None], "impulse_noise", 4, seed=3, samples=torch.tensor([2]))
    files.save_picture(files.tensor_picture(wanted[0]), tmp_path / "wanted.JPEG", quality=85)
    assert (target / "impulse_noise/4/n02/c.JPEG").read_bytes() == (tmp_path / "wanted.JPEG").read_bytes()
    (target / "contrast/1/n01/a.JPEG").unlink()
    steps = Steps()
    corrupt_imagenet(source, target, names=("contrast", "impulse_noise"), severities=(1, 4), seed=3, progress=steps)
    assert [done for done, _, _ in steps] == [11, 12]


def test_imagenet_refuses_two_pictures_of_one_name(tmp_path: Path):
    source = tmp_path / "val"
    source.mkdir()
    Image.fromarray(picture(0)).save(source / "a.JPEG")
    Image.fromarray(picture(0)).save(source / "a.png")
    with pytest.raises(FileError, match=r"/val: .*a\.JPEG"):
        corrupt_imagenet(source, tmp_path / "c")


def test_the_middle_is_cut_as_for_imagenet(tmp_path: Path):
    Image.fromarray(picture(0, 100, 300)).save(tmp_path / "wide.png")
    assert files.read_middle(tmp_path / "wide.png").size == (224, 224)
    tall = Image.fromarray(picture(0, 512, 256))
    tall.save(tmp_path / "tall.png")
    expected = tall.crop((16, 144, 240, 368))
    assert np.array_equal(np.asarray(files.read_middle(tmp_path / "tall.png")), np.asarray(expected))


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000)])
def test_the_middle_of_a_thread_is_refused_before_it_is_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
):
    def resize(self: Image.Image, size: tuple[int, int], *_: object) -> Image.Image:
        raise AssertionError(size)

    (tmp_path / "val").mkdir()
    Image.new("RGB", size).save(tmp_path / "val" / "thread.png")
    monkeypatch.setattr(Image.Image, "resize", resize)
    with pytest.raises(FileError, match=rf"/thread\.png: {size[0]}×{size[1]} pixels are too elongated"):
        corrupt_imagenet(tmp_path / "val", tmp_path / "c", names=["contrast"], severities=[1])
    assert tree(tmp_path / "c") == ["corruption.json"]


def test_the_gallery_shows_every_corruption_at_every_severity(tmp_path: Path):
    Image.fromarray(picture(0, 32, 32)).save(tmp_path / "in.png")
    write_gallery(tmp_path / "in.png", tmp_path / "gallery.png", seed=1)
    sheet = np.asarray(Image.open(tmp_path / "gallery.png"))
    image = read(tmp_path / "in.png")
    step = 32 * 4 + 6  # four screen pixels for each pixel, and the gap
    assert sheet.shape == (30 + 15 * step, 150 + 6 * step, 3)
    for row, name in enumerate(CORRUPTIONS):
        for column in range(6):
            top, left = 30 + row * step, 150 + column * step
            cell = sheet[top : top + 128 : 4, left : left + 128 : 4]
            expected = image if column == 0 else corrupt(image[None], name, column, seed=1)[0]
            np.testing.assert_array_equal(cell, expected.permute(1, 2, 0).numpy())
        label = sheet[30 + row * step : 30 + row * step + 128, :145]
        assert (label < 128).any()  # something is written beside the row


def test_the_gallery_takes_large_gray_and_float_images(tmp_path: Path):
    Image.fromarray(picture(0, 300, 400, gray=True)).save(tmp_path / "in.png")
    write_gallery(tmp_path / "in.png", tmp_path / "gallery.png")
    with Image.open(tmp_path / "gallery.png") as sheet:
        assert sheet.size[1] < 30 + 15 * 160
    small = torch.from_numpy(picture(0, 8, 8)).permute(2, 0, 1)
    same = np.asarray(draw_gallery(small)) == np.asarray(draw_gallery(small.float() / 255))
    assert same.all()
    with pytest.raises(FileError, match=r"/gallery\.jpg: .*\.png"):
        write_gallery(tmp_path / "in.png", tmp_path / "gallery.jpg")


# --------------------------------------------------------------------------------------------------- the command line


def run(*arguments: str | Path) -> int:
    pytest.importorskip("typer")
    from testtime import cli

    return cli.run(["corrupt", *map(str, arguments), "--device", "cpu"])


def test_the_command_corrupts_files_and_folders(folder: Path, tmp_path: Path):
    assert run(folder / "zero.png", tmp_path / "fog.png", "--name", "fog", "--severity", "3", "--seed", "7") == 0
    expected = corrupt(read(folder / "zero.png")[None], "fog", 3, seed=7)
    assert torch.equal(read(tmp_path / "fog.png"), expected[0])
    assert run(folder, tmp_path / "out", "--name", "contrast", "--severity", "5", "--scale", "imagenet") == 0
    expected = corrupt(read(folder / "a/two.png")[None], "contrast", 5, scale="imagenet")
    assert torch.equal(read(tmp_path / "out/a/two.png"), expected[0])
    assert run("--gallery", folder / "zero.png", tmp_path / "gallery.png") == 0
    assert (tmp_path / "gallery.png").is_file()


def test_the_command_makes_whole_sets(tmp_path: Path):
    images, labels = cifar(10_000 // 50)
    records = np.concatenate([labels.numpy()[:, None].astype(np.uint8), images.flatten(1).numpy()], 1)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    np.tile(records, (50, 1)).tofile(tmp_path / "cifar-10-batches-bin" / "test_batch.bin")
    target = tmp_path / "c"
    corrupt_cifar(images.repeat(50, 1, 1, 1), labels.repeat(50), target, names=())
    for name in CORRUPTIONS:  # all but one are finished, so that the test is quick
        if name != "contrast":
            (target / f"{name}.npy").write_bytes(b"")
    assert run(tmp_path / "cifar-10-batches-bin", target, "--all") == 0
    made = np.load(target / "contrast.npy", mmap_mode="r", allow_pickle=False)
    assert made.shape == (50_000, 32, 32, 3)
    expected = corrupt(images[:4], "contrast", 5).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(made[40_000:40_004], expected)
    assert np.load(target / "labels.npy", allow_pickle=False).shape == (50_000,)


def test_the_command_makes_imagenet_of_a_folder(tmp_path: Path):
    (tmp_path / "val/n01").mkdir(parents=True)
    Image.fromarray(picture(0)).save(tmp_path / "val/n01/a.JPEG")
    assert run(tmp_path / "val", tmp_path / "c", "--all") == 0
    made = [f"{name}/{severity}/n01/a.JPEG" for name in CORRUPTIONS for severity in range(1, 6)]
    assert tree(tmp_path / "c") == sorted([*made, "corruption.json"])


def test_the_command_fails_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    zero = folder / "zero.png"
    for arguments, code, words in [
        ((zero, tmp_path / "o.png", "--name", "mist"), 2, "`name` must be one of"),
        ((zero, tmp_path / "o.png", "--name", "fog", "--severity", "6"), 2, "--severity"),
        ((zero, tmp_path / "o.png"), 2, "give one of --name, --all and --gallery"),
        ((zero, tmp_path / "o.png", "--name", "fog", "--all"), 2, "give one of"),
        ((zero, zero, "--name", "fog"), 1, "zero.png: "),
        ((tmp_path / "absent.png", tmp_path / "o.png", "--name", "fog"), 1, "absent.png: no such file"),
        ((zero, tmp_path / "o.png", "--name", "frost", "--frost", tmp_path), 1, "frost1.png"),
        ((tmp_path / "absent", tmp_path / "o", "--all"), 1, "absent: "),
    ]:
        capsys.readouterr()
        assert run(*arguments) == code
        said = capsys.readouterr().err.strip().splitlines()
        assert words in said[-1]
        assert len(said) == 1
    assert not (tmp_path / "o.png").exists()
