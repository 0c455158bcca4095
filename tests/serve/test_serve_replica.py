"""Replicas in one process: any of them answers for any stream, and a former owner can neither write nor answer."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from serving import METHOD, as_array, image, make_online, network
from testtime.serve.decode import Decoder
from testtime.serve.lease import Beats, LeaseLost
from testtime.serve.peers import Call, merge_metrics
from testtime.serve.replica import STOP, Replica
from testtime.serve.server import listen
from testtime.serve.settings import ServeSettings
from testtime.serve.waiting import Job

SECRET = "known-to-replicas"
CLIENTS: dict[str, httpx.Client] = {}  # by the names of replicas


@contextlib.contextmanager
def open_replicas(folder: Path, count: int = 2, **given: Any) -> Iterator[list[Replica]]:
    settings = ServeSettings(folder, **{"slots": 2, "group": 1, "max_wait_ms": 0.0, "checkpoint_every": 2} | given)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(Decoder, "start", lambda self: None)  # when first needed
        made = [Replica(network(), METHOD, settings, "small", None, "127.0.0.1", SECRET, ttl=60) for _ in range(count)]
        for replica in made:
            replica.start()
            stack.enter_context(serve(replica))
        try:
            yield made
        finally:
            for replica in made:
                replica.stop()


def open_client(replica: Replica) -> httpx.Client:
    return CLIENTS[replica.name]


@contextlib.contextmanager
def serve(replica: Replica) -> Iterator[None]:
    """What Ray Serve does: bring requests to a replica."""
    with listen("127.0.0.1", 0) as listening:
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(replica.app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as client:
                CLIENTS[replica.name] = client
                yield
        finally:
            server.should_exit = True
            thread.join()


def send(client: httpx.Client, stream: str, seed: int, **query: Any) -> Any:
    headers = {"Content-Type": "application/x-npy"}
    return client.post(f"/v1/streams/{stream}/predict", content=as_array(image(seed)), params=query, headers=headers)


def expect(*seeds: int) -> list[list[float]]:
    online = make_online()
    return [online.predict(image(seed)[None]).logits.softmax(-1)[0].tolist() for seed in seeds]


def found(answer: Any) -> list[float]:
    assert answer.status_code == 200, answer.text
    return answer.json()["answers"][0]["probabilities"]


def owner_of(replica: Replica, stream: str) -> str:
    leases = replica.service.engine.residents.leases
    assert leases is not None
    lease = leases.find(stream)
    assert lease is not None
    return lease.owner


def take_for_dead(replica: Replica, other: Replica, patch: pytest.MonkeyPatch) -> None:
    """Let another replica take one to be lost, as when it is paused."""
    alive, dead = Beats.is_alive, replica.name
    patch.setattr(Beats, "is_alive", lambda self, name: name != dead and alive(self, name))
    patch.setattr(other.service.engine.residents.leases, "_is_alive", lambda name: name != dead)


def test_any_replica_answers_for_any_stream(tmp_path: Path) -> None:
    with open_replicas(tmp_path) as replicas:
        clients = [open_client(replica) for replica in replicas]
        for position, seed in enumerate((3, 1, 4, 1, 5)):
            for number, stream in enumerate("abc"):
                asked = clients[(position * 3 + number * number) % 2]
                expected = expect(*(3, 1, 4, 1, 5)[: position + 1])[-1] if number == 0 else None
                answer = send(asked, stream, seed, sequence=position + 1)
                assert answer.json()["version"] == position + 1
                assert answer.headers["x-testtime-version"] == str(position + 1)
                assert expected is None or found(answer) == expected
        first, second = ([row["id"] for row in one.get("/v1/streams").json()["streams"]] for one in clients)
        assert first == second == ["c", "b", "a"]
        owned = [sorted(replica.service.engine.residents.records) for replica in replicas]
        assert sorted(owned[0] + owned[1]) == ["a", "b", "c"]
        assert min(map(len, owned)) > 0
        for client in clients:
            assert client.get("/v1/streams/a").json()["seen"] == 5
            assert client.post("/v1/streams/a/freeze").json()["frozen"]
            assert client.get("/v1/streams/none").status_code == 404
            assert client.delete("/v1/streams/none").status_code == 404
            assert client.get("/readyz").json()["replicas"] == 2
            text = client.get("/metrics").text
            assert all(f'testtime_streams{{replica="{replica.name}"}}' in text for replica in replicas)
        assert clients[0].delete("/v1/streams/c").json()["deleted"]
        assert clients[1].get("/v1/streams/c").status_code == 404
        assert send(clients[1], "c", 7).json()["version"] == 1
    assert not list((tmp_path / "leases").glob("*.json"))
    assert not list((tmp_path / "replicas").iterdir())


def test_a_stream_not_created_leaves_no_lease_and_streams_are_limited_together(tmp_path: Path) -> None:
    with open_replicas(tmp_path, max_streams=2) as replicas:
        clients = [open_client(replica) for replica in replicas]
        bad = clients[0].post("/v1/streams/a/predict", content=b"x", headers={"Content-Type": "application/x-npy"})
        assert bad.status_code == 400
        deadline = time.monotonic() + 10
        while list((tmp_path / "leases").glob("*.json")):
            assert time.monotonic() < deadline
        for client, stream in zip(clients, "ab", strict=True):
            assert send(client, stream, 0).status_code == 200
        for client in clients:
            assert send(client, "c", 0).status_code == 429
        assert len(list((tmp_path / "leases").glob("*.json"))) == 2


def test_a_former_owner_neither_answers_nor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_replicas(tmp_path) as replicas:
        old, new = replicas
        clients, seeds = [open_client(replica) for replica in replicas], list(range(9))
        expected = expect(*seeds)
        for position in range(4):  # a checkpoint after 2 images, two more are acknowledged
            assert found(send(clients[0], "a", seeds[position], sequence=position + 1)) == expected[position]
        assert owner_of(new, "a") == old.name
        with monkeypatch.context() as patch:
            take_for_dead(old, new, patch)
            behind = send(clients[1], "a", seeds[4], sequence=5)
            assert (behind.status_code, behind.json()["expected"]) == (409, 3)  # from the last checkpoint
            assert clients[1].get("/v1/streams/a").json()["restored_version"] == 2
            for position in (2, 3, 4):
                assert found(send(clients[1], "a", seeds[position], sequence=position + 1)) == expected[position]
        # The old owner wakes up. What it has in hand is refused, with and without a write.
        (state,) = tmp_path.glob("streams/*/state.safetensors")
        before = state.read_bytes()
        for _ in range(4):
            job = Job("a", [image(8)], create=True)
            with pytest.raises(LeaseLost):
                old.service.batcher.submit(job).result(60)
        assert old.service.metrics.read("testtime_lost_leases_total") > 0
        assert old.service.engine.residents.writer.fault is None
        assert state.read_bytes() == before
        # Asked by a client, it forgets what it knew and asks the new owner.
        for position in (5, 6):
            assert found(send(clients[0], "a", seeds[position], sequence=position + 1)) == expected[position]
        assert owner_of(old, "a") == new.name
        # And back: the lost state does not come back with it.
        with monkeypatch.context() as patch:
            take_for_dead(new, old, patch)
            lost = send(clients[0], "a", seeds[7], sequence=8)
            start = lost.json().get("expected", 8)
            assert start >= 8 - 2
            for position in range(start - 1, 9):
                assert found(send(clients[0], "a", seeds[position], sequence=position + 1)) == expected[position]


def test_with_a_checkpoint_before_every_answer_a_takeover_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_replicas(tmp_path, checkpoint_every=0) as replicas:
        clients, expected = [open_client(replica) for replica in replicas], expect(0, 1, 2)
        assert [found(send(clients[0], "a", seed)) for seed in (0, 1)] == expected[:2]
        take_for_dead(*replicas, monkeypatch)
        assert found(send(clients[1], "a", 2)) == expected[2]


def test_stored_streams_are_listed_and_taken_by_whoever_is_asked(tmp_path: Path) -> None:
    with open_replicas(tmp_path) as replicas:
        client = open_client(replicas[0])
        first = [found(send(client, "a", seed)) for seed in (0, 1)]
    with open_replicas(tmp_path) as replicas:
        client = open_client(replicas[1])
        (row,) = client.get("/v1/streams").json()["streams"]
        assert (row["id"], row["seen"], row["resident"]) == ("a", 2, False)
        assert [*first, found(send(client, "a", 2))] == expect(0, 1, 2)
        assert owner_of(replicas[0], "a") == replicas[1].name


def test_a_replica_that_stops_hands_its_streams_over(tmp_path: Path) -> None:
    with open_replicas(tmp_path) as replicas:
        clients, expected = [open_client(replica) for replica in replicas], expect(0, 1)
        assert found(send(clients[0], "a", 0)) == expected[0]
        address = json.loads((tmp_path / "replicas" / f"{replicas[0].name}.json").read_text())["address"]
        assert Call(address, "another").send("POST", STOP).status == 403
        assert json.loads(Call(address, SECRET).send("POST", STOP).body) == {"whole": True}
        assert found(send(clients[1], "a", 1)) == expected[1]
        assert send(clients[0], "a", 2).status_code == 503


def test_unused_streams_expire_wherever_they_are(tmp_path: Path) -> None:
    with open_replicas(tmp_path) as replicas:
        send(open_client(replicas[0]), "a", 0)
    assert list((tmp_path / "streams").iterdir())
    with open_replicas(tmp_path, count=1, ttl=0.3):
        deadline = time.monotonic() + 60
        while list((tmp_path / "streams").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_metrics_of_replicas_are_told_apart() -> None:
    texts = {
        "x": '# HELP a_total Some.\n# TYPE a_total counter\na_total{k="v"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n',
        "y": "# HELP a_total Some.\n# TYPE a_total counter\na_total 3\n",
    }
    assert merge_metrics(texts).splitlines() == [
        "# HELP a_total Some.",
        "# TYPE a_total counter",
        'a_total{replica="x",k="v"} 1',
        'a_total{replica="y"} 3',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{replica="x"} 2',
    ]


def test_images_without_a_stream_are_answered_anywhere(tmp_path: Path) -> None:
    with open_replicas(tmp_path) as replicas:
        headers = {"Content-Type": "application/x-npy"}
        rows = [open_client(r).post("/v1/predict", content=as_array(image(0)), headers=headers) for r in replicas]
        assert torch.allclose(torch.tensor(found(rows[0])), torch.tensor(found(rows[1])))
