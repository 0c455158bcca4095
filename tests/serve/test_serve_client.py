"""The client: typed answers, repeated requests, refusals, and `testtime send`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import testtime as tt
from serving import TOKEN, as_picture, image, make_online, open_client
from testtime import cli
from testtime.serve.client import encode_images


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_answers_are_typed_and_lost_ones_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_client(tmp_path / "state", token=TOKEN, checkpoint_every=2) as (http, service):
        url = str(http.base_url)
        camera, online = tt.Client(url, TOKEN).stream("camera-7"), make_online()
        original, lost = tt.Client._send, [False, True, True]

        def send(self: tt.Client, method: str, path: str, *given: Any) -> bytes:
            content = original(self, method, path, *given)
            if "predict" in path and lost and lost.pop(0):
                raise ConnectionResetError("lost on its way")
            return content

        monkeypatch.setattr(tt.Client, "_send", send)
        for number in range(3):
            found = camera.predict(image(number))
            expected = online.predict(image(number)[None])
            (one,) = found.answers
            assert list(one.probabilities) == expected.logits.softmax(-1)[0].tolist()
            assert list(one.before.probabilities) == expected.logits_before.softmax(-1)[0].tolist()
            assert (one.number, one.sample) == (int(expected.classes), number)
            assert (one.adapted, one.rolled_back) == (True, False)
            assert (found.sequence, found.version, found.repeated) == (number + 1, number + 1, number == 1)
        assert camera.info()["seen"] == 3
        assert len(camera.predict(image(3), image(4)).answers) == 2
        assert tt.Client(url, TOKEN).stream("camera-7").predict(image(5)).sequence == 5  # another process goes on
        with pytest.raises(tt.ServiceError, match="out of order") as caught:
            camera.predict(image(6).repeat(1, 1, 1)) if camera._next is None else _skip(camera)
        assert (caught.value.status, caught.value.expected) == (409, 6)

        with pytest.raises(tt.ServiceError, match="needs a valid token"):
            tt.Client(url).list_streams()
        assert [one["id"] for one in tt.Client(url, TOKEN).list_streams()] == ["camera-7"]
        assert len(tt.Client(url, TOKEN).predict(as_picture()).answers) == 1

        (tmp_path / "token").write_text(f"{TOKEN}\n")
        (tmp_path / "pictures").mkdir()
        for number in range(3):
            (tmp_path / "pictures" / f"{number}.png").write_bytes(as_picture(size=(16 + number, 20)))
        arguments = [url, str(tmp_path / "pictures"), "--stream", "sent", "--token-file", str(tmp_path / "token")]
        capsys.readouterr()
        assert cli.run(["send", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines] == [str(tmp_path / f"pictures/{n}.png") for n in range(3)]
        assert cli.run(["send", *arguments[:1], str(tmp_path / "none"), *arguments[2:]]) == 1
        assert "no such file" in capsys.readouterr().err
        assert service.engine.residents.records["sent"].seen == 3


def _skip(camera: Any) -> None:
    camera._next = 9
    camera._unsaved.clear()
    camera.predict(image(6))


@pytest.mark.usefixtures("no_waiting")
def test_a_service_that_is_not_there_is_an_error_after_some_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def refuse(*given: Any) -> bytes:
        attempts.append(1)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(tt.Client, "_send", refuse)
    with pytest.raises(tt.ServiceError, match="cannot be reached: refused") as caught:
        tt.Client("http://127.0.0.1:1", retries=3).list_streams()
    assert (caught.value.status, len(attempts)) == (None, 4)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://"])
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="`url` must be like"):
        tt.Client(url)


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"text")
    for name, said in (("a.png", "not a PNG"), ("b.png", "no such file")):
        with pytest.raises(tt.FileError, match=said) as caught:
            encode_images([tmp_path / name])
        assert caught.value.path == str(tmp_path / name)


def test_pictures_that_cannot_be_used_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = {
        "0.png": as_picture()[:200],  # unreadable to the service
        "1.png": as_picture(),
        "2.png": b"text",
        "3.png": b"\x89PNG" + bytes(10_000),  # above its limit
        "4.png": b"",
        "5.png": as_picture(size=(17, 17)),
    }
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, content in bodies.items():
        (pictures / name).write_bytes(content)
    with open_client(tmp_path / "state", max_upload=5000) as (http, service):
        for given, missing in (([pictures], []), ([*sorted(pictures.iterdir()), pictures / "6.png"], [6])):
            http.delete("/v1/streams/a")
            capsys.readouterr()
            assert cli.run(["send", str(http.base_url), *map(str, given), "--stream", "a", "--json"]) == 1
            out, err = capsys.readouterr()
            answers = [json.loads(line) for line in out.splitlines()]
            assert [(Path(one["image"]).name, one["sequence"]) for one in answers] == [("1.png", 1), ("5.png", 2)]
            faults = [line for line in err.splitlines() if line.startswith("error: ")]
            assert [fault.split(": ")[1] for fault in faults] == [
                str(pictures / f"{number}.png") for number in (0, 2, 3, 4, *missing)
            ]
            assert service.engine.residents.records["a"].seen == 2


@contextlib.contextmanager
def answer(reply: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """The address of a server that answers a method with a status and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = reply(self.command)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("statuses", [{"GET": 400}, {"GET": 422}, {"GET": 404, "POST": 409}, {"GET": 404, "POST": 422}])
def test_a_refused_stream_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statuses: dict[str, int]
) -> None:
    asked: list[str] = []
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(as_picture())

    def refuse(method: str) -> tuple[int, bytes]:
        asked.append(method)
        return statuses[method], b'{"error": "No."}'

    with answer(refuse) as url:
        assert cli.run(["send", url, str(tmp_path), "--stream", "a"]) == 1
    assert asked == list(statuses)
    assert capsys.readouterr().err.splitlines()[-1] == "error: No."


def test_a_500_of_a_proxy_is_asked_again_and_one_of_the_service_is_not(no_waiting: None) -> None:
    answers = [(500, b"Internal Server Error"), (200, b'{"streams": []}'), (500, b'{"error": "It failed."}')]
    with answer(lambda method: answers.pop(0)) as url:
        client = tt.Client(url)
        assert client.list_streams() == []
        with pytest.raises(tt.ServiceError, match="It failed"):
            client.list_streams()
    assert not answers
