"""Pictures and archives with every kind of damage: the right picture, or one error of one line that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testtime.data import DataError, read_picture
from testtime.data.download import extract
from testtime.data.pictures import open_picture

ROWS, COLUMNS = np.mgrid[0:40, 0:60]
RGB = np.stack([ROWS * 6, COLUMNS * 4, (ROWS + COLUMNS) * 2], axis=2).astype(np.uint8)
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")

Content = bytes | Callable[[Path], object]


def saved(kind: str, pixels: np.ndarray = RGB, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def put(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def chunk(kind: bytes, content: bytes, crc: int | None = None) -> bytes:
    """A part of a PNG."""
    crc = zlib.crc32(kind + content) if crc is None else crc
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def png(width: int, height: int, *parts: bytes, pixels: bytes | None = None, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of a header, other parts and pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    rows = bytes((1 + 3 * width) * height) if pixels is None else pixels
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(parts) + data + chunk(b"IEND", b"")


def segment(marker: int, content: bytes) -> bytes:
    """A part of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def with_segment(marker: int, content: bytes) -> bytes:
    return put(saved("JPEG"), 0, b"")[:2] + segment(marker, content) + saved("JPEG")[2:]


def jpeg_size(width: int, height: int) -> bytes:
    whole = saved("JPEG")
    return put(whole, whole.index(b"\xff\xc0") + 5, struct.pack(">HH", height, width))


def tiff(**tags: int | tuple[int, int, int]) -> bytes:
    """A TIFF with some of its tags changed: to a number, or to type, count and value."""
    whole = saved("TIFF", dpi=(72, 72))
    (start,) = struct.unpack("<I", whole[4:8])
    (count,) = struct.unpack("<H", whole[start : start + 2])
    numbers = {"width": 256, "height": 257, "bits": 258, "compression": 259, "offset": 273, "samples": 277}
    numbers["resolution"] = 282
    for place in range(start + 2, start + 2 + 12 * count, 12):
        (tag,) = struct.unpack("<H", whole[place : place + 2])
        for name, value in tags.items():
            if numbers[name] == tag:
                whole = put(
                    whole, place + 2, struct.pack("<HII", *((4, 1, value) if isinstance(value, int) else value))
                )
    return whole


def animated(damage: bytes | None) -> bytes:
    """A GIF of two frames, the second one with some bytes in the middle replaced, or cut off."""
    file = io.BytesIO()
    frames = [Image.fromarray(RGB), Image.fromarray(RGB[::-1])]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=100)
    whole = file.getvalue()
    second = whole.index(b"!\xf9", whole.index(b"!\xf9") + 1) + 8
    return whole[: second + 20] if damage is None else put(whole, second + 20, damage)


EXIF_CUT = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\x01\0"
EXIF_WILD = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + struct.pack("<HHII", 0x0112, 2, 0x7FFFFFFF, 0xFFFFFFF0) * 2
MPF = b"MPF\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0xB001, 4, 1, 9)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


# What cannot be a picture.
REFUSED: dict[str, Content] = {
    **{
        f"{kind} cut at {share} %": saved(kind)[: len(saved(kind)) * share // 100]
        for kind in FORMATS
        for share in (5, 60)
    },
    **{f"{kind} cut at 90 %": saved(kind)[: len(saved(kind)) * 9 // 10] for kind in FORMATS if kind != "PNG"},
    **{f"{kind} with another beginning": put(saved(kind), 0, b"\0\0") for kind in FORMATS},
    **{
        f"{kind} of {width} x {height}": content
        for width, height in ((60_000, 60_000), (9_000, 9_000), (0, 40))
        for kind, content in {
            "PNG": png(width, height, pixels=bytes(100)),
            "JPEG": jpeg_size(width, height),
            "BMP": put(saved("BMP"), 18, struct.pack("<ii", width, height)),
            "TIFF": tiff(width=width, height=height),
            "PPM": b"P6\n%d %d\n255\n" % (width, height) + bytes(100),
        }.items()
    },
    "GIF of 9000 x 9000": put(saved("GIF"), 6, struct.pack("<HH", 9000, 9000)),
    "WEBP of 9000 x 9000": put(saved("WEBP", lossless=True), 21, struct.pack("<I", 8999 | 8999 << 14)),
    "text": b"hello\n",
    "nothing": b"",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "PNG whose header has a wrong checksum": put(saved("PNG"), 29, bytes(4)),
    "PNG whose pixels have a wrong checksum": put(saved("PNG"), len(saved("PNG")) - 16, bytes(4)),
    "PNG with a flipped bit": put(saved("PNG"), 60, bytes([saved("PNG")[60] ^ 16])),
    "PNG without compressed pixels": png(3, 2).replace(zlib.compress(bytes(20)), b"x" * len(zlib.compress(bytes(20)))),
    "PNG of fewer rows than promised": png(300, 200, pixels=bytes(100)),
    "PNG with a comment of 50 MB": png(3, 2, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(50_000_000)))),
    "PNG of 3 bits": png(3, 2, depth=3),
    "JPEG with noise in it": put(saved("JPEG"), len(saved("JPEG")) - 300, bytes(range(255))),
    "JPEG without its end": saved("JPEG")[:-2],
    "TIFF that points beyond itself": tiff(offset=0x7FFFFFFF),
    "TIFF that points into its header": put(saved("TIFF"), 4, struct.pack("<I", 4)),
    "TIFF of unknown compression": tiff(compression=999),
    "TIFF of 200 channels": tiff(samples=200),
    "TIFF of 77 bits": tiff(bits=77),
    "TIFF of floats": saved("TIFF", np.ones((4, 4), np.float32)),
    "TIFF of 32 bits": saved("TIFF", np.ones((4, 4), np.int32)),
    "TIFF without its directory": saved("TIFF", compression="tiff_lzw")[:-300],
    "BMP of 77 bits": put(saved("BMP"), 28, struct.pack("<H", 77)),
    "BMP of unknown compression": put(saved("BMP"), 30, struct.pack("<I", 77)),
    "BMP that points beyond itself": put(saved("BMP"), 10, struct.pack("<I", 0x7FFFFFFF)),
    "PPM without numbers": b"P6\nfoo bar\n255\n",
    "PPM with a long number": b"P6\n" + b"1" * 500 + b" 2\n255\n",
    "PPM without a range": b"P6\n2 2\n0\n" + bytes(12),
    "PPM of letters": b"P3\n2 1\n255\n1 2 3 4 5 x\n",
    "PFM": b"PF\n2 2\n-1.0\n" + bytes(48),
    "GIF without a palette": put(saved("GIF"), 10, b"\0"),
    "GIF with noise in it": put(saved("GIF"), 800, bytes(range(100, 200))),
    "WEBP longer than the file": put(saved("WEBP"), 4, b"\xff\xff\xff\x7f"),
    "WEBP of something else": put(saved("WEBP"), 12, b"ABCD"),
    "a missing file": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": make_pipe,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}

# What is a picture nevertheless, with the pixels it must have: as they are, nearly, or those of an array.
OPENED: dict[str, tuple[bytes, bool | np.ndarray]] = {
    **{
        f"{kind} with something after it": (saved(kind) + b"more" * 100, kind in ("PNG", "TIFF", "BMP", "PPM"))
        for kind in FORMATS
    },
    "JPEG whose EXIF is cut short": (with_segment(0xE1, EXIF_CUT), False),
    "JPEG whose EXIF points anywhere": (with_segment(0xE1, EXIF_WILD), False),
    "JPEG whose EXIF is noise": (with_segment(0xE1, b"Exif\0\0" + bytes(range(256))), False),
    "JPEG with a wrong colour profile": (with_segment(0xE2, b"ICC_PROFILE\0\1\1nonsense"), False),
    "JPEG with a wrong index of pictures": (with_segment(0xE2, MPF), False),
    "PNG with a wrong colour profile": (png(3, 2, chunk(b"iCCP", b"x\0\0nonsense")), np.zeros((2, 3, 3))),
    "PNG with a wrong EXIF": (png(3, 2, chunk(b"eXIf", b"nonsense")), np.zeros((2, 3, 3))),
    "PNG with more rows than promised": (png(3, 2, pixels=bytes(20_000_000)), np.zeros((2, 3, 3))),
    "PNG without its end": (saved("PNG")[:-12], True),
    "PNG animated by no frames": (png(3, 2, chunk(b"acTL", bytes(8))), np.zeros((2, 3, 3))),
    "PNG of one pixel": (saved("PNG", RGB[7:8, 9:10]), RGB[7:8, 9:10]),
    "PNG of 16 bits": (saved("PNG", np.array([[0, 65535]], np.uint16)), np.array([[[0] * 3, [255] * 3]])),
    "PNG with one transparent colour": (
        png(2, 1, chunk(b"PLTE", bytes(range(6))), chunk(b"tRNS", b"\0"), colour=3, pixels=b"\0\0\1"),
        np.array([[[255, 255, 255], [3, 4, 5]]]),
    ),
    "GIF whose second frame is cut short": (animated(None), False),
    "GIF whose second frame is damaged": (animated(bytes(range(200, 230))), False),
    "BMP from top to bottom": (put(saved("BMP", RGB[::-1].copy()), 22, struct.pack("<i", -40)), True),
    "TIFF whose resolution points anywhere": (tiff(resolution=(5, 0x0FFFFFFF, 0x7FFFFFF0)), True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_one_error(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if os.name == "nt" and not isinstance(REFUSED[name], bytes):
        pytest.skip("no pipes, devices and links there")
    path, content = tmp_path / "a picture.png", REFUSED[name]
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    for read in (read_picture, open_picture):
        with pytest.raises(DataError) as raised:
            read(path)
        text = str(raised.value)
        assert text.startswith(f"{path}: ")
        assert text.isprintable()
        assert len(text) > len(f"{path}: ")
        assert raised.value.__cause__ is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("action", ["error", "always"])
@pytest.mark.parametrize("name", OPENED)
def test_what_is_a_picture_opens_without_a_word(
    name: str, action, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content, expected = OPENED[name]
    path = tmp_path / "a picture.png"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        picture = read_picture(path).permute(1, 2, 0).numpy().astype(int)
    if isinstance(expected, bool):
        assert np.abs(picture - RGB).mean() <= (0 if expected else 12)
    else:
        assert np.array_equal(picture, expected)
    assert capfd.readouterr().err == ""


# Archives ------------------------------------------------------------------------------------------------------------

NOISE = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8).tobytes()
Member = tuple[str, bytes, dict[str, object]]


def member(name: str, content: bytes = b"", **changes: object) -> Member:
    return name, content, changes


def tar(*members: Member, format: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, content, changes in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def header(name: str, **changes: object) -> bytes:
    """A member's header alone, whatever it promises."""
    info = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def flip(content: bytes, at: int) -> bytes:
    return put(content, at, bytes([content[at] ^ 0x10]))


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("set/file", NOISE)
    return file.getvalue()


SOUND = tar(member("set/", type=tarfile.DIRTYPE), member("set/a", NOISE), member("set/b/c", NOISE), member("set/d"))
PACKED = gzip.compress(SOUND, mtime=0)
END = bytes(1024)

DAMAGED: dict[str, Content] = {
    **{f"packed, cut at {share} %": PACKED[: len(PACKED) * share // 100] for share in (1, 30, 60, 90, 99)},
    "packed, without its last byte": PACKED[:-1],
    "packed, without its checksum": PACKED[:-8],
    **{f"plain, cut at {share} %": SOUND[: len(SOUND) * share // 100] for share in (1, 7, 20, 50)},
    "plain, cut between two files": SOUND[: 512 + 512 + 3072],
    "plain, cut where the end should be told": SOUND[: 4 * 512 + 2 * 3072],
    **{f"packed, flipped at {at}": flip(PACKED, at) for at in (0, 2, 3000, len(PACKED) - 6, len(PACKED) - 2)},
    "plain, flipped in a name": flip(SOUND, 512 + 2),
    "plain, flipped in a length": flip(SOUND, 512 + 130),
    "plain, flipped in a checksum": flip(SOUND, 512 + 150),
    "plain, flipped in a kind": flip(SOUND, 512 + 156),
    "a link": tar(member("set/a", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "a link beside the folder": tar(member("set/a", NOISE), member("b", type=tarfile.SYMTYPE, linkname="set")),
    "a hard link": tar(member("set/a", NOISE), member("set/b", type=tarfile.LNKTYPE, linkname="set/a")),
    "a character device": tar(member("set/a", type=tarfile.CHRTYPE)),
    "a block device": tar(member("set/a", type=tarfile.BLKTYPE)),
    "a pipe in it": tar(member("set/a", type=tarfile.FIFOTYPE)),
    "a hole": header("set/a", type=tarfile.GNUTYPE_SPARSE, size=0) + END,
    "a kind that nobody knows": header("set/a", type=b"Z") + END,
    "an absolute name": tar(member("/set/a", NOISE)),
    "a name that leads out": tar(member("../set/a", NOISE)),
    "a name that leads out later": tar(member("set/a/../../../b", NOISE)),
    "a folder that leads out": tar(member("set/a", NOISE), member("../b", type=tarfile.DIRTYPE)),
    "a name with backslashes": tar(member("set\\..\\..\\a", NOISE)),
    "a long name": tar(member("set/" + "a" * 300, NOISE)),
    "a name twice": tar(member("set/a", NOISE), member("set/a", b"other")),
    "a name twice, once with a dot": tar(member("set/a", NOISE), member("./set/./a", b"other")),
    "a file that is a folder later": tar(member("set/a", NOISE), member("set/a/b", NOISE)),
    "a folder that is a file later": tar(member("set/a/b", NOISE), member("set/a", NOISE)),
    "too many files": tar(*(member(f"set/{number}") for number in range(101))),
    "too many folders": tar(*(member(f"set/{number}", type=tarfile.DIRTYPE) for number in range(101))),
    "too much": tar(member("set/a", bytes(1_000_001))),
    "too much, packed": gzip.compress(tar(member("set/a", bytes(30_000_000)))),
    "too much in all": tar(*(member(f"set/{number}", bytes(300_000)) for number in range(4))),
    "a promise of gigabytes": header("set/a", size=1 << 33) + NOISE + END,
    "a promise of less than nothing": header("set/a", size=-512) + NOISE + END,
    "less than nothing by another header": tar(
        member("set/a", pax_headers={"size": "-1024"}), format=tarfile.PAX_FORMAT
    ),
    "a header of megabytes": tar(member("set/a", pax_headers={"comment": "a" * 3_000_000}), format=tarfile.PAX_FORMAT),
    "a name of megabytes": header("x", type=tarfile.GNUTYPE_LONGNAME, size=3 << 20)
    + bytes(3 << 20)
    + header("set/a")
    + END,
    "headers for ever": header("x", type=tarfile.XHDTYPE, size=0) * 3000 + header("set/a") + END,
    "a header of less than nothing": header("x", type=tarfile.XHDTYPE, size=-1024) + header("set/a") + END,
    "holes for ever": header("x", type=tarfile.GNUTYPE_SPARSE)[:482] + b"\1" + (b"1" * 504 + b"\1" + bytes(7)) * 3000,
    "another folder": tar(member("other/a", NOISE)),
    "a file of the folder's name": tar(member("set", NOISE)),
    "nothing in it": END,
    "nothing": b"",
    "text": b"hello\n" * 500,
    "zeros": bytes(100),
    "a zip file": zipped(),
    "a picture": saved("PNG"),
    "packed twice": gzip.compress(PACKED),
    "packed by bzip2": bz2.compress(SOUND),
    "packed by xz": lzma.compress(SOUND),
    "packed text": gzip.compress(b"hello" * 1000),
    "packed nothing": gzip.compress(b""),
    "a missing file": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": make_pipe,
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_archive_is_one_error_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    if os.name == "nt" and not isinstance(DAMAGED[name], bytes):
        pytest.skip("no pipes, devices and links there")
    path, content = tmp_path / "in" / "a.tar.gz", DAMAGED[name]
    path.parent.mkdir()
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError) as raised:
        extract(path, path.parent / "set", files=100, size=1_000_000)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "content", [SOUND, PACKED, SOUND + bytes(9000), tar(member("./set/a", NOISE), member("readme"))]
)
def test_a_sound_archive_is_extracted(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(content)
    extract(tmp_path / "a.tar.gz", tmp_path / "set", files=100, size=1_000_000)
    assert (tmp_path / "set" / "a").read_bytes() == NOISE
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.tar.gz", "set"]
