"""The live page without a browser: what it may load, what it never contains, who may see pictures; the demo."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import serving
from testtime import cli
from testtime.data import digits
from testtime.serve import demo
from testtime.serve.page import load_page
from testtime.serve.record import StreamRecord
from testtime.serve.thumbnails import LAST, describe_thumbnails, make_thumbnail

URLS = ("href", "src", "action", "srcset", "poster", "data", "formaction")


class Parts(HTMLParser):
    """The elements of a page, and the text of its script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.text[self._inside] = self.text.get(self._inside, "") + data


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving.open_client(tmp_path_factory.mktemp("state")) as (client, _):
        yield client


def make_answer(number: int, before: int) -> dict[str, Any]:
    after, was = ({"class": one, "name": f"<b>{one}", "probability": 0.5} for one in (number, before))
    values = {"loss_before": 1.0, "loss_after": 0.5, "confidence": 0.5, "adapted": True, "rolled_back": False}
    return after | {"before": was, "probabilities": [0.5]} | values


def test_the_page_may_load_and_run_nothing_but_itself() -> None:
    text, headers = load_page()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    parts = Parts(text)
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parts.text[name].encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    for _, attributes in parts.elements:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in URLS:
            assert not re.match(r"[a-z]+:(?!,$)|//", attributes.get(name) or "")
    assert {tag for tag, _ in parts.elements}.isdisjoint({"iframe", "object", "embed", "base"})
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(", parts.text["style"])


def test_text_is_never_parsed_as_html() -> None:
    script = Parts(load_page()[0]).text["script"]
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|ContextualFragment"
    assert not re.search(sinks, script)
    assert 'setAttribute("on' not in script


def test_every_id_that_the_script_asks_for_exists_once() -> None:
    parts = Parts(load_page()[0])
    ids = [attributes["id"] for _, attributes in parts.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"find\(\"([\w-]+)\"\)", parts.text["script"])) <= set(ids)
    labelled = {attributes["aria-labelledby"] for _, attributes in parts.elements if "aria-labelledby" in attributes}
    assert labelled <= set(ids)


def test_the_page_needs_no_token_and_all_it_fetches_does(tmp_path: Path) -> None:
    with serving.open_client(tmp_path, token=serving.TOKEN, thumbnails=True) as (client, _):
        assert serving.send(client, "camera", serving.image(0)).status_code == 200
        with httpx.Client(base_url=client.base_url) as stranger:
            page = stranger.get("/")
            assert page.status_code == 200
            assert page.headers["Content-Security-Policy"] == load_page()[1]["Content-Security-Policy"]
            assert "camera" not in page.text
            for path in ("/v1/streams", "/v1/streams/camera", "/v1/streams/camera/thumbnails", "/v1/events"):
                assert stranger.get(path).status_code == 401, path
        assert len(client.get("/v1/streams/camera/thumbnails").json()["thumbnails"]) == 1


def test_nothing_of_an_image_is_held_unless_asked_for(tmp_path: Path) -> None:
    with serving.open_client(tmp_path) as (client, service):
        serving.send(client, "camera", serving.image(0))
        answer = client.get("/v1/streams/camera/thumbnails")
        assert answer.status_code == 404
        assert "--thumbnails" in answer.json()["error"]
        assert not service.engine.residents.records["camera"].thumbnails
        assert client.get("/v1/streams").json()["service"]["thumbnails"] is False


def test_thumbnails_are_the_last_images_and_go_with_eviction_and_never_to_disk(tmp_path: Path) -> None:
    images = [serving.image(seed) for seed in range(LAST + 2)]
    with serving.open_client(tmp_path, thumbnails=True, slots=1) as (client, service):
        answers = [one for image in images for one in serving.send(client, "camera", image).json()["answers"]]
        shown = client.get("/v1/streams/camera/thumbnails").json()["thumbnails"]
        assert [one["seen"] for one in shown] == list(range(3, LAST + 3))
        for one, image, answer in zip(shown, images[2:], answers[2:], strict=True):
            pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(one["png"]))))
            assert np.array_equal(pixels, (image * 255).round().byte().permute(1, 2, 0).numpy())
            assert (one["class"], one["before"]["class"]) == (answer["class"], answer["before"]["class"])
        newer = client.get("/v1/streams/camera/thumbnails", params={"after": LAST}).json()["thumbnails"]
        assert [one["seen"] for one in newer] == [LAST + 1, LAST + 2]
        assert client.get("/v1/streams/camera/thumbnails", params={"after": -1}).status_code == 422
        assert client.get("/v1/streams/nobody/thumbnails").status_code == 404
        serving.send(client, "other", images[0])
        assert client.get("/v1/streams/camera/thumbnails").json() == {"thumbnails": []}
        assert "thumbnails" not in service.engine.residents.records["other"].describe()


def test_large_images_become_small_and_names_stay_text() -> None:
    image = torch.zeros(3, 224, 112)
    image[0] = 1
    (one,) = describe_thumbnails([make_thumbnail(7, image, make_answer(3, 2))])
    picture = Image.open(io.BytesIO(base64.b64decode(one["png"])))
    assert picture.size == (24, 48)
    assert picture.getpixel((5, 5)) == (255, 0, 0)
    assert (one["seen"], one["name"], one["before"]["name"]) == (7, "<b>3", "<b>2")
    assert "probabilities" not in one
    gray = describe_thumbnails([make_thumbnail(1, torch.full((1, 4, 4), 0.5), make_answer(0, 0))])[0]["png"]
    assert Image.open(io.BytesIO(base64.b64decode(gray))).mode == "L"


def test_drift_without_a_reference_is_against_the_first_images(tmp_path: Path) -> None:
    record = StreamRecord("camera")
    losses = [1.0, 3.0, *[2.0] * 30, *[5.0] * 100]
    for loss in losses:
        record.count(make_answer(1, 1) | {"loss_before": loss}, True, None)
    assert record.first_loss == pytest.approx(np.mean(losses[:32]))
    service = serving.make_service(tmp_path)
    try:
        shown = service.describe_stream(record)
        assert shown["drift"] == pytest.approx(record.loss - record.first_loss)  # type: ignore[operator]
        assert shown["drift_from"] == "first images"
        service._reference = 4.0
        assert service.describe_stream(record)["drift"] == pytest.approx(record.loss - 4.0)  # type: ignore[operator]
    finally:
        service.stop()


@pytest.mark.parametrize("name", ["<img src=x>", "a b", "'", '"onload=1', "...", "a/b", "%3Cb%3E", "ä"])
def test_hostile_names_of_streams_are_refused(name: str, client: httpx.Client) -> None:
    for path in ("predict", "freeze", "thumbnails"):
        answer = client.request("GET" if path == "thumbnails" else "POST", f"/v1/streams/{quote(name, safe='')}/{path}")
        assert answer.status_code in (404, 405, 422)
        assert answer.headers["Content-Type"] == "application/json"
    assert client.get("/v1/streams").json()["streams"] == []


def test_the_light_fades_evenly_and_then_holds() -> None:
    lights = [demo.find_light(number) for number in range(demo.FADE + 100)]
    assert lights[0] == 1
    ratios = np.divide(lights[1 : demo.FADE + 1], lights[: demo.FADE])
    assert np.allclose(ratios, ratios[0])
    assert lights[demo.FADE :] == pytest.approx([demo.LIGHT] * 100)


def test_the_demo_shows_each_test_digit_once_a_pass() -> None:
    source = digits.load("test")
    shown = list(islice(demo.iterate_digits(), 2 * len(source)))
    images = source.images(slice(None))
    passes = shown[: len(source)], shown[len(source) :]
    for one in passes:
        assert sorted(label for _, label in one) == sorted(source.labels.tolist())  # type: ignore[union-attr]
    assert [label for _, label in passes[0]] != [label for _, label in passes[1]]
    first = shown[0][0]
    index = next(index for index, image in enumerate(images) if torch.equal(image, first))
    assert int(source.labels[index]) == shown[0][1]  # type: ignore[index]
    assert max(int(image.max()) for image, _ in passes[1][-50:]) <= round(255 * demo.LIGHT)


def test_the_demo_feeds_a_frozen_and_an_adapting_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([(serving.image(seed), seed % 3) for seed in range(9)])
    monkeypatch.setattr(demo, "iterate_digits", lambda: seen)
    with serving.open_client(tmp_path) as (client, service):
        with demo.Demo(service, str(client.base_url), pace=1000) as running:
            running._thread.join(60)
        frozen, adapting = (client.get(f"/v1/streams/{name}").json() for name in (demo.FROZEN, demo.ADAPTING))
        assert frozen["seen"] == adapting["seen"] == 9
        assert (frozen["frozen"], adapting["frozen"]) == (True, False)
        assert (frozen["version"], adapting["version"]) == (2, 10)  # an image and the reset; eight images more
        for shown in (frozen, adapting):
            wrong = [point["class"] != seed % 3 for seed, point in enumerate(shown["history"])][1:]
            assert [note["seen"] for note in shown["notes"]] == list(range(2, 10))
            assert [note["error"] for note in shown["notes"]] == pytest.approx(np.cumsum(wrong) / np.arange(1, 9))
            assert [note["label"] for note in shown["notes"]] == [seed % 3 for seed in range(1, 9)]
        assert frozen["history"][-1]["adapted"] is False
        about = client.get("/v1/streams").json()["service"]["demo"]
        assert (about["frozen"], about["adapting"]) == (demo.FROZEN, demo.ADAPTING)
        assert "label" not in json.dumps(service.engine.residents.records[demo.ADAPTING].describe())


@pytest.mark.parametrize("more", [["-c", "other"], ["--method", "best"], ["--shadow"]])
def test_the_demo_has_its_own_network_and_method(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--demo", *more]) == 2
    assert "--demo" in capsys.readouterr().err
