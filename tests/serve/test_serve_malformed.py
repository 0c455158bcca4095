"""Requests that nobody should send: each gets a clear refusal, none an error of the service, and all goes on."""

from __future__ import annotations

import io
import json
import pickle
import socket
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from serving import as_array, as_picture, image, open_client, send
from testtime.serve import bodies
from testtime.serve.decode import Decoder
from testtime.serve.refusal import Refusal

NPY, PNG = "application/x-npy", "image/png"
GOOD = as_array(image(0))


def save(array: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **more)
    return file.getvalue()


def header(text: str, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """A file of numpy's with any header."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\x01\x00" else "<I", len(line)) + line + content


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A PNG that claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def animation(form: str) -> bytes:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue", "green")]
    file = io.BytesIO()
    frames[0].save(file, form, save_all=True, append_images=frames[1:])
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a.npy", GOOD)
    return file.getvalue()


SHAPES = [(), (0,), (16,), (16, 16), (1, 16, 16), (3, 16, 15), (3, 0, 16), (16, 16, 3), (0, 3, 16, 16), (2, 1, 16, 16)]
SHAPES += [(1, 1, 3, 16, 16), (300, 3, 16, 16)]
KINDS: list[Any] = ["int64", "int8", "bool", "complex64", ">f4", "uint16", "U4", "M8[s]"]
CLAIMS = {  # shapes that agree with the length of the content
    "unknown": ("(-1, -1, 16, 16)", 1024),
    "negative": ("(-1, -3, 16, 16)", 3072),
    "endless": (f"(0, {10**21})", 0),
    "empty": ("(0, 9999999, 9999999, 9999999)", 0),
    "deep": (f"({'1, ' * 100})", 4),
    "boolean": ("(True, 1, 16, 16)", 1024),
}
BODIES: dict[str, tuple[str, bytes]] = {
    **{f"shape {shape}": (NPY, save(np.zeros(shape, "float32"))) for shape in SHAPES},
    **{f"dtype {kind}": (NPY, save(np.zeros((3, 16, 16), kind))) for kind in KINDS},
    **{f"value {value}": (NPY, save(np.full((3, 16, 16), value))) for value in (np.nan, np.inf, -np.inf, 2.0, -0.1)},
    "objects": (NPY, save(np.array([{}, []], dtype=object), allow_pickle=True)),
    "record": (NPY, save(np.zeros((3, 16, 16), [("a", "f4")]))),
    "pickle": (NPY, pickle.dumps([1, 2])),
    "archive": (NPY, archive()),
    "truncated array": (NPY, GOOD[:-1]),
    "too long array": (NPY, GOOD + b"x"),
    "only a magic": (NPY, b"\x93NUMPY"),
    "unknown version": (NPY, b"\x93NUMPY\x09\x00" + GOOD[8:]),
    "terabytes": (NPY, header("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999, 3, 16, 16), }")),
    "overflow": (NPY, header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 300 + ",), }")),
    "negative": (NPY, header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3, 16, 16), }")),
    **{
        f"{name} shape": (NPY, header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}", bytes(count)))
        for name, (shape, count) in CLAIMS.items()
    },
    "code": (NPY, header("__import__('os').getcwd()")),
    "nested": (NPY, header("(" * 400)),
    "long header": (NPY, header(" " * 5000)),
    "null header": (NPY, header("\0" * 20)),
    "huge header": (NPY, header("{}", version=b"\x02\x00")),
    "array as PNG": (PNG, GOOD),
    "PNG as array": (NPY, as_picture()),
    "PNG as JPEG": ("image/jpeg", as_picture()),
    "JPEG as PNG": (PNG, as_picture("JPEG")),
    "PNG as WebP": ("image/webp", as_picture()),
    "text as PNG": (PNG, b"hello"),
    "truncated PNG": (PNG, as_picture()[:200]),
    "truncated JPEG": ("image/jpeg", as_picture("JPEG")[:100]),
    "truncated WebP": ("image/webp", as_picture("WEBP")[:40]),
    "magic of PNG": (PNG, b"\x89PNG\r\n\x1a\n"),
    "magic of JPEG": ("image/jpeg", b"\xff\xd8\xff"),
    "magic of WebP": ("image/webp", b"RIFF\0\0\0\0WEBP"),
    "a bomb": (PNG, png(50_000, 50_000, zlib.compress(b"\0" * 100_000))),
    "no pixels": (PNG, png(0, 16)),
    "no content": (PNG, png(16, 16)),
    "above the limit": (PNG, png(1000, 101, zlib.compress(b"\0" * 303_101))),
    "elongated": (PNG, png(1, 99_999, zlib.compress(b"\0" * 399_996))),
    "flipped bit": (PNG, as_picture()[:100] + b"\xff" + as_picture()[101:]),
    "animated PNG": (PNG, animation("PNG")),
    "animated WebP": ("image/webp", animation("WEBP")),
    "GIF": ("image/gif", animation("GIF")),
    "GIF as PNG": (PNG, animation("GIF")),
    "SVG": ("image/svg+xml", b"<svg/>"),
    "JSON": ("application/json", b"{}"),
    "text": ("text/plain", b"x"),
    "form": ("application/x-www-form-urlencoded", b"a=b"),
    "no type": ("", GOOD),
    "strange type": ("image/", GOOD),
    "stranger type": ("\x7f/;;;=", GOOD),
    "type list": ("image/png, image/jpeg", GOOD),
    "empty PNG": (PNG, b""),
    "empty array": (NPY, b""),
    "too large": (PNG, b"\x89PNG\r\n\x1a\n" + b"x" * 100_000),
    "no boundary": ("multipart/form-data", b"x"),
    "empty boundary": ('multipart/form-data; boundary=""', b"x"),
    "long boundary": ("multipart/form-data; boundary=" + "b" * 100, b"x"),
    "other boundary": ("multipart/form-data; boundary=a", b"--b\r\n\r\n--b--"),
    "no end": ("multipart/form-data; boundary=a", b"--a\r\nContent-Type: image/png\r\n\r\nx"),
    "no parts": ("multipart/form-data; boundary=a", b"--a--"),
    "no head": ("multipart/form-data; boundary=a", b"--a\r\nx\r\n--a--"),
    "part without a type": ("multipart/form-data; boundary=a", b"--a\r\nX: y\r\n\r\nx\r\n--a--"),
    "part of text": ("multipart/form-data; boundary=a", b"--a\r\nContent-Type: text/plain\r\n\r\nx\r\n--a--"),
    "empty part": ("multipart/form-data; boundary=a", b"--a\r\nContent-Type: image/png\r\n\r\n\r\n--a--"),
    "nested multipart": ("multipart/form-data; boundary=a", b"--a\r\nContent-Type: multipart/mixed\r\n\r\nx\r\n--a--"),
    "many parts": ("multipart/form-data; boundary=a", b"--a\r\nA: b\r\n\r\n\r\n" * 300 + b"--a--"),
    "other multipart": ("multipart/mixed; boundary=a", b"--a\r\n\r\nx\r\n--a--"),
}
NAMES = ["-a", ".a", "_a", "a b", "a%20b", "ä", "a" * 65, "%2e%2e", "a%00b", "a%0d%0ab", "a%5cb", "a:b", "a;b", "%ff"]
NAMES += ["*", "~", "a@b", "a+b", "a,b", "a'b", "a%22b", "%3Cscript%3E", "🙂", "%25", "a%7fb", "-", "."]
FORMS: dict[str, tuple[str, bytes]] = {
    "array": (NPY, GOOD),
    "PNG": (PNG, as_picture()),
    "JPEG": ("image/jpeg", as_picture("JPEG")),
    "WebP": ("image/webp", as_picture("WEBP")),
    "multipart": ("multipart/form-data; boundary=a", b"--a\r\nContent-Type: x/y\r\n\r\n" + GOOD + b"\r\n--a--"),
}
CUTS = 30  # of each form
QUERIES = ["0", "-1", "x", "1.5", "", "1e3", "9" * 30, "null", "%00", "2**3", "NaN", "true", "[1]"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with open_client(tmp_path_factory.mktemp("state"), max_upload=100_000, max_pixels=100_000) as (client, service):
        send(client, "good", image(0), sequence=1)
        yield client
        assert client.get("/readyz").json()["ready"]
        about = client.get("/v1/streams/good").json()
        assert (about["version"], about["seen"]) == (1, 1)  # nothing malformed was learned from
        assert list(service.engine.residents.records) == ["good"]
        assert not list(Path(service.settings.state).rglob("*.part"))


def check(response: httpx.Response, *statuses: int) -> None:
    """A refusal in one sentence, without a trace of files or code."""
    assert response.status_code in statuses, response.text
    error = json.loads(response.text)["error"]
    assert isinstance(error, str)
    assert error.endswith(".")
    assert "\n" not in error
    assert not any(word in response.text for word in ("Traceback", "site-packages", ".py", "/tmp", "File "))


@pytest.mark.parametrize("name", BODIES)
def test_bodies(client: httpx.Client, name: str) -> None:
    kind, content = BODIES[name]
    headers = {"Content-Type": kind} if kind else {}
    check(client.post("/v1/streams/good/predict", content=content, headers=headers), 400, 413, 415, 422)


@pytest.mark.parametrize("name", FORMS)
def test_bodies_that_end_too_early(client: httpx.Client, name: str) -> None:
    kind, content = FORMS[name]
    for cut in range(CUTS):
        part = content[: 1 + cut * (len(content) - 8) // CUTS]
        check(client.post("/v1/streams/good/predict", content=part, headers={"Content-Type": kind}), 400)


def test_there_are_at_least_three_hundred() -> None:
    """Without those that schemathesis makes up."""
    assert len(BODIES) + 2 * len(NAMES) + 4 * len(QUERIES) - 2 + CUTS * len(FORMS) >= 300


@pytest.mark.parametrize("name", NAMES)
def test_names_of_streams(client: httpx.Client, name: str) -> None:
    response = client.post(f"/v1/streams/{name}/predict", content=GOOD, headers={"Content-Type": NPY})
    check(response, 404, 405, 422)
    check(client.get(f"/v1/streams/{name}/export"), 404, 422)


@pytest.mark.parametrize("value", QUERIES)
def test_queries(client: httpx.Client, value: str) -> None:
    url = f"/v1/streams/good/predict?sequence={value}"
    check(client.post(url, content=GOOD, headers={"Content-Type": NPY}), 422)
    if value != "0":
        check(client.post(f"/v1/streams/good/rollback?version={value}"), 422)
        check(client.get(f"/v1/streams?offset={value}"), 422)
    check(client.get(f"/v1/streams?limit={value}"), 422)


def test_other_requests(client: httpx.Client) -> None:
    check(client.post("/v1/predict", content=GOOD, headers={"Content-Type": NPY, "Content-Encoding": "gzip"}), 415)
    check(client.get("/v1/predict"), 405)
    check(client.put("/v1/streams/good"), 405)
    check(client.get("/v1/streams/good/predict"), 405)
    check(client.get("/v2/streams"), 404)
    check(client.get("/v1/../../etc/passwd"), 404)
    check(client.get("/v1/streams/..%2f..%2fetc%2fpasswd"), 404, 422)
    check(client.post("/v1/streams/good/unknown"), 404, 405)
    check(client.post("/v1/streams/nobody/reset"), 404)
    check(client.post("/v1/streams/good/rollback?version=5"), 404)
    check(client.request("PATCH", "/healthz"), 405)


def test_a_picture_that_takes_too_long_costs_its_decoder_only() -> None:
    decoder = Decoder(3, 16, 100_000, workers=1, seconds=20)
    assert len(decoder.decode("image/png", as_picture())) == 1
    (worker,) = decoder._all
    decoder._seconds = 0.0
    with pytest.raises(Refusal, match="crashed or took too long"):
        decoder.decode("image/png", as_picture(size=(300, 300)))
    decoder._seconds = 20.0
    assert not worker.is_alive
    assert len(decoder.decode("image/png", as_picture())) == 1  # another process
    decoder.close()
    assert not any(one.is_alive for one in decoder._all)


def test_a_body_that_comes_too_slowly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SECONDS", 0.2)
    with open_client(tmp_path) as (client, _):
        with socket.create_connection((client.base_url.host, client.base_url.port), 10) as slow:
            head = f"POST /v1/streams/a/predict HTTP/1.1\r\nHost: {client.base_url.netloc.decode()}\r\n"
            slow.sendall(f"{head}Content-Type: {NPY}\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD[:100])
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        assert send(client, "a", image(0)).status_code == 200
