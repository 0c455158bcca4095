"""The client: typed answers, repeated requests, refusals, and `testtime send`."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import testtime as tt
from serving import TOKEN, as_picture, image, make_online, open_client
from testtime import cli
from testtime.serve.client import find_files


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


def test_files_and_folders_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "c.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert find_files([tmp_path, tmp_path / "c.txt"]) == [tmp_path / name for name in ("a.JPG", "b.png", "c.txt")]
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "empty", "contains no PNG"), (tmp_path / "none", "no such file")):
        with pytest.raises(tt.FileError, match=said):
            find_files([path])


def test_a_500_of_a_proxy_is_asked_again_and_one_of_the_service_is_not(no_waiting: None) -> None:
    answers = [(500, b"Internal Server Error"), (200, b'{"streams": []}'), (500, b'{"error": "It failed."}')]

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = tt.Client(f"http://127.0.0.1:{server.server_address[1]}")
        try:
            assert client.list_streams() == []
            with pytest.raises(tt.ServiceError, match="It failed"):
                client.list_streams()
        finally:
            server.shutdown()
            thread.join()
    assert not answers
