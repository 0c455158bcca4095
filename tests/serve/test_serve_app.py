"""The service over HTTP: what goes in and comes out of each route, who may ask, what is refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from serving import METHOD, TOKEN, as_array, as_picture, image, make_online, network, open_client, send
from testtime import Episodic
from testtime.data.pictures import fit_picture
from testtime.serve.service import Service


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Service]]:
    with open_client(tmp_path_factory.mktemp("state"), slots=3, max_upload=100_000, max_pixels=100_000) as both:
        yield both


@pytest.fixture
def client(opened: tuple[httpx.Client, Service]) -> httpx.Client:
    return opened[0]


def close(found: list[float], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), expected, atol=1e-6)


def test_a_stream_over_http_is_an_online_adapter(client: httpx.Client) -> None:
    online = make_online()
    for number in range(3):
        response = send(client, "camera-7", image(number), sequence=number + 1)
        expected = online.predict(image(number)[None])
        (answer,) = response.json()["answers"]
        assert answer["probabilities"] == expected.logits.softmax(-1)[0].tolist()
        assert answer["before"]["probabilities"] == expected.logits_before.softmax(-1)[0].tolist()
        assert answer["class"] == int(expected.classes)
        assert answer["name"] == str(int(expected.classes))
        assert answer["loss_before"] == float(expected.loss_before)
        assert answer["loss_after"] == float(expected.loss_after)
        assert (answer["adapted"], answer["rolled_back"]) == (True, False)
        assert (response.headers["x-testtime-version"], response.headers["x-testtime-sample"]) == (
            str(number + 1),
            str(number),
        )
    again = send(client, "camera-7", image(2), sequence=3)
    assert again.json() == response.json() | {"repeated": True}
    assert send(client, "camera-7", image(2), sequence=9).status_code == 409
    about = client.get("/v1/streams/camera-7").json()
    assert (about["seen"], about["version"], about["sequence"], about["adapted"]) == (3, 3, 3, 3)
    assert about["resident"]
    assert not about["frozen"]
    assert [point["seen"] for point in about["history"]] == [1, 2, 3]
    exported = client.get("/v1/streams/camera-7/export")
    learned = online.network().state_dict()
    assert all(torch.equal(tensor, learned[name]) for name, tensor in load(exported.content).items())


@pytest.mark.parametrize(("form", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")])
def test_pictures_are_fitted_like_files(client: httpx.Client, tmp_path: Path, form: str, kind: str) -> None:
    content = as_picture(form)
    (tmp_path / "file").write_bytes(content)
    fitted = fit_picture(tmp_path / "file", 16, resize=16)
    response = client.post("/v1/predict", content=content, headers={"Content-Type": kind})
    expected = Episodic(network(), method=METHOD).predict(fitted[None], torch.zeros(1, dtype=torch.int64))
    (answer,) = response.json()["answers"]
    assert close(answer["probabilities"], expected.logits.softmax(-1)[0])
    assert response.headers["x-testtime-version"] == "0"


def test_several_images_in_one_request_are_a_stream(client: httpx.Client) -> None:
    files = [
        ("a", ("a.npy", as_array(image(0)), "application/x-npy")),
        ("b", ("b.npy", as_array(image(1), image(2)), "application/x-npy")),
    ]
    parts = client.post("/v1/streams/parts/predict", files=files).json()
    whole = send(client, "whole", *(image(seed) for seed in range(3))).json()
    alone = [send(client, "alone", image(seed)).json()["answers"][0] for seed in range(3)]
    assert parts["answers"] == whole["answers"] == alone
    mixed = [("a", ("a.png", as_picture(), "image/png")), ("b", ("b.npy", as_array(image(1)), "application/x-npy"))]
    assert len(client.post("/v1/streams/parts/predict", files=mixed).json()["answers"]) == 2


def test_streams_are_listed_changed_and_deleted(client: httpx.Client) -> None:
    before = client.get("/v1/streams").json()["total"]
    send(client, "x", image(0))
    listed = client.get("/v1/streams").json()
    assert listed["total"] == before + 1
    assert listed["streams"][0]["id"] == "x"
    assert (listed["service"]["network"], listed["service"]["slots"]) == ("small", 3)
    assert len(client.get("/v1/streams", params={"limit": 1, "offset": 1}).json()["streams"]) == min(1, before)
    assert client.post("/v1/streams/x/freeze").json()["frozen"]
    assert send(client, "x", image(1)).json()["version"] == 1
    assert not client.post("/v1/streams/x/unfreeze").json()["frozen"]
    assert client.post("/v1/streams/x/pin").json()["pinned"]
    assert not client.post("/v1/streams/x/unpin").json()["pinned"]
    assert client.post("/v1/streams/x/reset").json()["version"] == 2
    assert client.get("/v1/streams/x").json()["versions"] == [1]
    assert client.post("/v1/streams/x/rollback", params={"version": 1}).json()["version"] == 3
    assert client.post("/v1/streams/x/rollback", params={"version": 7}).status_code == 404
    assert client.delete("/v1/streams/x").json() == {"stream": "x", "deleted": True}
    for call in (client.get, client.delete):
        assert call("/v1/streams/x").status_code == 404
    for name in ("reset", "rollback", "freeze", "unfreeze", "pin", "unpin"):
        assert client.post(f"/v1/streams/x/{name}").status_code == 404
    assert client.get("/v1/streams/x/export").status_code == 404


def test_health_metrics_and_documentation(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"alive": True}
    ready = client.get("/readyz").json()
    assert (ready["ready"], ready["disk"]) == (True, "ok")
    send(client, "metrics", image(0))
    lines = client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['testtime_images_total{mode="online"}']) >= 1
    assert float(values['testtime_batch_images_bucket{le="+Inf"}']) == float(values["testtime_batch_images_count"])
    assert values["testtime_slots"] == "3"
    paths = client.get("/openapi.json").json()["paths"]
    page = client.get("/docs").text
    assert all(path in page for path in paths)
    assert "http://" not in page
    assert "https://" not in page
    assert {"/v1/streams/{stream}/predict", "/v1/predict", "/v1/streams", "/v1/events", "/metrics"} <= paths.keys()


def test_events_report_answers_and_changes(client: httpx.Client) -> None:
    found: list[tuple[str, Any]] = []
    with client.stream("GET", "/v1/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = events.iter_lines()
        next(lines)
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            send(other, "watched", image(0))
            other.post("/v1/streams/watched/freeze")
        kind = ""
        for line in lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((kind, json.loads(line.removeprefix("data: "))))
                if kind == "freeze":
                    break
    own = [(kind, data) for kind, data in found if data["stream"] == "watched"]
    assert [kind for kind, _ in own] == ["created", "answer", "freeze"]
    assert own[1][1]["version"] == 1
    assert {"class", "confidence", "loss_before", "loss_after", "adapted", "rolled_back", "before"} <= own[1][1].keys()


def test_a_token_is_needed_where_there_is_one(tmp_path: Path) -> None:
    with open_client(tmp_path, token=TOKEN, client_streams=2, max_streams=3) as (client, _):
        assert send(client, "a", image(0)).status_code == 200
        for given in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {TOKEN}x"}):
            bare = httpx.Client(base_url=client.base_url, headers=given)
            for path in ("/v1/streams", "/metrics", "/v1/streams/a", "/v1/events", "/v1/streams/a/export"):
                response = bare.get(path)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                assert TOKEN not in response.text
            assert bare.post("/v1/streams/a/reset").status_code == 401
            assert bare.get("/healthz").status_code == bare.get("/readyz").status_code == 200
            bare.close()
        assert send(client, "b", image(0)).status_code == 200
        refused = send(client, "c", image(0))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")


def test_pages_of_other_sites_are_refused(client: httpx.Client) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
        response = client.get("/v1/streams", headers=headers)
        assert response.status_code == 403
        assert response.json()["error"]
    own = str(client.base_url).rstrip("/")
    assert client.get("/v1/streams", headers={"Origin": own}).status_code == 200


def test_too_many_streams_are_refused(tmp_path: Path) -> None:
    with open_client(tmp_path, max_streams=1) as (client, _):
        assert send(client, "a", image(0)).status_code == 200
        refused = send(client, "b", image(0))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert send(client, "a", image(0)).status_code == 200


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    with open_client(tmp_path, rate=0.1) as (client, _):
        first, second = (client.get("/v1/streams") for _ in range(2))
        assert (first.status_code, second.status_code) == (200, 429)
        assert int(second.headers["retry-after"]) > 5
        assert client.get("/readyz").status_code == 200


def test_a_body_that_never_ends_is_cut_off(client: httpx.Client) -> None:
    host, port = client.base_url.host, client.base_url.port
    assert port is not None
    head = f"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: image/png\r\n"
    with socket.create_connection((host, port), timeout=10) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with pytest.raises(OSError, match=r"reset|Broken"):  # the service closes the connection
            raw.sendall((b"1000\r\n" + b"x" * 4096 + b"\r\n") * 10_000)
    with socket.create_connection((host, port), timeout=10) as raw:
        raw.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
