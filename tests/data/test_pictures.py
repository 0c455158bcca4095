"""Decoding pictures that nobody vouches for: a picture, or one line that names the file and the fault."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from testtime.data import DataError, fit_picture, read_picture
from testtime.data.pictures import fit_pictures
from testtime.evaluation.predict_files import load_image
from testtime.networks.card import Card


@pytest.fixture
def rgb() -> np.ndarray:
    """Smooth, so that JPEG keeps it; not symmetric in any way."""
    rows, columns = np.mgrid[0:40, 0:60]
    return np.stack([rows * 6, columns * 4, (rows + columns) * 2], axis=2).astype(np.uint8)


def save(path: Path, array: np.ndarray, mode: str | None = None, **options) -> Path:
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return path


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".ppm", ".tif"])
def test_lossless_formats_come_back_exactly(tmp_path: Path, rgb: np.ndarray, suffix: str) -> None:
    picture = read_picture(save(tmp_path / f"a{suffix}", rgb))
    assert picture.dtype == torch.uint8
    assert np.array_equal(picture.permute(1, 2, 0).numpy(), rgb)


@pytest.mark.parametrize(("suffix", "mode"), [(".jpg", None), (".jpg", "CMYK"), (".gif", None), (".webp", None)])
def test_other_formats_come_back_nearly(tmp_path: Path, rgb: np.ndarray, suffix: str, mode: str | None) -> None:
    picture = read_picture(save(tmp_path / f"a{suffix}", rgb, mode))
    assert picture.shape == (3, 40, 60)
    assert np.abs(picture.permute(1, 2, 0).numpy().astype(int) - rgb).mean() < 12


def test_gray_becomes_three_equal_channels(tmp_path: Path, rgb: np.ndarray) -> None:
    picture = read_picture(save(tmp_path / "a.png", rgb[..., 0]))
    assert np.array_equal(picture.numpy(), np.stack([rgb[..., 0]] * 3))


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257, 257 * 128, 65535]], dtype=np.uint16)
    picture = read_picture(save(tmp_path / "a.png", values))
    assert picture[0].tolist() == [[0, 1, 128, 255]]
    assert picture.shape == (3, 1, 4)
    assert torch.equal(read_picture(save(tmp_path / "a.tif", values)), picture)


def test_thirty_two_bits_have_no_known_range(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 16 bits"):
        read_picture(save(tmp_path / "a.tif", np.array([[0, 255, 65535]], dtype=np.int32)))


def test_transparent_parts_become_white(tmp_path: Path) -> None:
    pixels = np.array([[[200, 0, 0, 255], [9, 9, 9, 0], [0, 0, 0, 128]]], dtype=np.uint8)
    picture = read_picture(save(tmp_path / "a.png", pixels))
    assert picture[:, 0, 0].tolist() == [200, 0, 0]
    assert picture[:, 0, 1].tolist() == [255, 255, 255]
    assert abs(int(picture[0, 0, 2]) - 127) <= 1


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "a.png", transparency=bytes([255, 0]))
    picture = read_picture(tmp_path / "a.png")
    assert picture[:, 0, 0].tolist() == [10, 20, 30]
    assert picture[:, 0, 1].tolist() == [255, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(tmp_path: Path, rgb: np.ndarray, orientation: int) -> None:
    """The eight orientations by their definition: where the stored first row and column lie in the upright picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = {
        1: rgb,
        2: rgb[:, ::-1],
        3: rgb[::-1, ::-1],
        4: rgb[::-1],
        5: rgb.transpose(1, 0, 2),
        6: rgb.transpose(1, 0, 2)[::-1],
        7: rgb.transpose(1, 0, 2)[::-1, ::-1],
        8: rgb.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    picture = read_picture(save(tmp_path / "a.png", np.ascontiguousarray(stored), exif=exif))
    assert np.array_equal(picture.permute(1, 2, 0).numpy(), rgb)


def test_one_pixel(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.array([[[1, 2, 3]]], dtype=np.uint8))
    assert read_picture(path).flatten().tolist() == [1, 2, 3]
    assert fit_picture(path, 8).unique(dim=1).flatten().tolist() == [1] * 8 + [2] * 8 + [3] * 8


def test_an_open_file_will_do(rgb: np.ndarray) -> None:
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    file.seek(0)
    assert read_picture(file).shape == (3, 40, 60)
    with pytest.raises(DataError, match="picture: not a picture"):
        read_picture(io.BytesIO(b"hello"))


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises any size in a few bytes."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", zlib.compress(b"\0" * 100)) + part(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (10_000, 10_000), (9_000, 9_000)])
def test_bombs_are_refused(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(width, height))
    with pytest.raises(DataError, match=r"bomb\.png: .*limit of 64,000,000"):
        read_picture(tmp_path / "bomb.png")


def test_the_limit_is_an_argument(tmp_path: Path, rgb: np.ndarray) -> None:
    path = save(tmp_path / "a.png", rgb)
    assert read_picture(path, limit=40 * 60).shape == (3, 40, 60)
    with pytest.raises(DataError, match="60×40 pixels are above the limit of 2,399"):
        read_picture(path, limit=40 * 60 - 1)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "an empty file"),
        (b"GIF89a", "not a picture|cannot be decoded"),
        (b"\xff\xd8\xff\xe0" + bytes(50), "not a picture|cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (bytes(1000), "not a picture"),
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "not a picture|cannot be decoded"),
    ],
)
def test_files_that_are_no_pictures(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "wrong.jpg").write_bytes(content)
    with pytest.raises(DataError, match=rf"wrong\.jpg: ({fault})"):
        read_picture(tmp_path / "wrong.jpg")


def shape_or_error(path: Path) -> tuple[int, ...] | str:
    try:
        return tuple(read_picture(path).shape)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".webp", ".bmp", ".tif"])
def test_every_cut_is_a_picture_or_one_error(tmp_path: Path, rgb: np.ndarray, suffix: str) -> None:
    whole = save(tmp_path / f"a{suffix}", rgb).read_bytes()
    path = tmp_path / f"cut{suffix}"
    outcomes = []
    for share in range(1, 20):
        path.write_bytes(whole[: len(whole) * share // 20])
        outcomes.append(shape_or_error(path))
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert all(error.startswith(f"{path}: ") and "\n" not in error for error in errors)
    assert {outcome for outcome in outcomes if not isinstance(outcome, str)} <= {(3, 40, 60)}
    assert len(errors) >= 15


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".webp", ".tif"])
def test_flipped_bytes_give_a_picture_or_one_error(tmp_path: Path, rgb: np.ndarray, suffix: str) -> None:
    whole = save(tmp_path / f"a{suffix}", rgb).read_bytes()
    path = tmp_path / f"flipped{suffix}"
    for position in range(0, min(len(whole), 400), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        outcome = shape_or_error(path)
        assert outcome.startswith(f"{path}: ") if isinstance(outcome, str) else outcome[0] == 3


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_picture(tmp_path / "none.png")
    with pytest.raises(DataError, match="a folder"):
        read_picture(tmp_path)


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", np.ones((4, 4), dtype=np.float32))
    with pytest.raises(DataError, match="floating-point"):
        read_picture(path)


def test_fit_is_resize_then_centre_crop(tmp_path: Path, rgb: np.ndarray) -> None:
    path = save(tmp_path / "a.png", rgb)
    resized = np.asarray(Image.fromarray(rgb).resize((48, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(fit_picture(path, 28).permute(1, 2, 0).numpy(), resized[2:30, 10:38])
    assert np.array_equal(fit_picture(path, 40, 40).permute(1, 2, 0).numpy(), rgb[:, 10:50])
    tall = save(tmp_path / "b.png", np.ascontiguousarray(rgb.transpose(1, 0, 2)))
    assert np.array_equal(fit_picture(tall, 28).permute(2, 1, 0).numpy(), resized[2:30, 10:38])


def test_stretch_keeps_the_whole_picture(tmp_path: Path, rgb: np.ndarray) -> None:
    path = save(tmp_path / "a.png", rgb)
    whole = np.asarray(Image.fromarray(rgb).resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(fit_picture(path, 32, "stretch").permute(1, 2, 0).numpy(), whole)


def test_large_jpegs_are_decoded_small_and_look_the_same(tmp_path: Path) -> None:
    rows, columns = np.mgrid[0:1000, 0:1400]
    waves = (127 + 60 * np.sin(rows / 90) + 60 * np.cos(columns / 70)).astype(np.uint8)
    jpeg = save(tmp_path / "a.jpg", np.stack([waves] * 3, axis=2), quality=95)
    png = save(tmp_path / "a.png", np.stack([waves] * 3, axis=2))
    difference = fit_picture(jpeg, 56).float() - fit_picture(png, 56).float()
    assert difference.abs().mean() < 2


def test_too_elongated(tmp_path: Path) -> None:
    path = save(tmp_path / "thread.png", np.zeros((1, 30_000, 3), dtype=np.uint8))
    with pytest.raises(DataError, match=r"thread\.png: 30000×1 pixels are too elongated"):
        fit_picture(path, 224)


@pytest.mark.parametrize("threads", [1, 3, None])
def test_in_parallel_is_the_same_and_errors_come_through(tmp_path: Path, rgb: np.ndarray, threads: int | None) -> None:
    paths = [save(tmp_path / f"{n}.png", np.roll(rgb, n, axis=1)) for n in range(9)]
    together = fit_pictures(paths, 20, threads=threads)
    assert torch.equal(together, torch.stack([fit_picture(path, 20) for path in paths]))
    paths[4].write_bytes(b"")
    with pytest.raises(DataError, match=r"4\.png: an empty file"):
        fit_pictures(paths, 20, threads=threads)
    assert fit_pictures([], 20).shape == (0, 3, 20, 20)


def test_warnings_that_are_errors_do_not_reach_threads(tmp_path: Path, rgb: np.ndarray) -> None:
    whole = save(tmp_path / "a.jpg", rgb).read_bytes()
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\x01\0"
    paths = [tmp_path / f"{number}.jpg" for number in range(32)]
    for path in paths:
        path.write_bytes(whole[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + whole[2:])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        pictures = fit_pictures(paths, 20, threads=8)
    assert shown == []
    assert torch.equal(pictures, fit_picture(tmp_path / "a.jpg", 20).expand_as(pictures))


def test_a_gray_network_sees_the_same_whatever_torchs_default_is(tmp_path: Path, rgb: np.ndarray) -> None:
    path = save(tmp_path / "a.png", rgb)
    card = Card(architecture={"name": "resnet26", "channels": 1}, size=20)
    expected = load_image(card, path)
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        found = load_image(card, path)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("size", "resize", "word"), [(0, None, "size"), (20, 19, "resize"), (20, "crop", "resize")])
def test_bad_arguments_are_named(tmp_path: Path, size: int, resize, word: str) -> None:
    with pytest.raises(ValueError, match=f"`{word}`"):
        fit_picture(tmp_path / "a.png", size, resize)
