"""The service on Ray Serve: replicas are killed and paused under load, and every answer is that of an oracle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import testtime as tt
from serving import as_array
from testtime.serve.lease import hash_stream
from testtime.serve.server import listen
from testtime.tensorfile import read_description

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.slow

NAME, EVERY, STREAMS, IMAGES = "digits-resnet8-gn-joint", 3, 6, 60


class Sender(threading.Thread):
    """Sends a stream, repeats what is not answered, and resends what was lost; compares with the oracle.

    Attributes:
        limit: How many images to send for now.
        lost: Number of acknowledged images lost at each takeover.
        repeated: Requests that had to be repeated, by what was answered.
    """

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self.stream, self._url = f"stream-{number}", url
        pictures = tt.data.open("digits").images(slice(IMAGES * STREAMS)).float() / 255
        self._images = pictures[number::STREAMS]
        net = tt.load(NAME)
        online = tt.Online(net, **tt.recommend(net))
        self.expected = [online.predict(image[None]).logits.softmax(-1)[0].tolist() for image in self._images]
        self.limit = 2 * IMAGES // 3
        self.done, self.repeated, self.lost, self.fault = 0, Counter[str](), list[int](), ""

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=10) as client:
                sequence = 1
                while sequence <= len(self._images):
                    while sequence > self.limit:
                        time.sleep(0.01)
                    found = self._send(client, sequence)
                    if found.status_code == 409:
                        expected = found.json()["expected"]
                        assert expected < sequence, found.text
                        self.lost.append(sequence - expected)
                        sequence = expected
                        continue
                    answer = found.json()
                    assert (answer["stream"], answer["sequence"]) == (self.stream, sequence)
                    assert answer["version"] == sequence
                    assert answer["answers"][0]["probabilities"] == self.expected[sequence - 1]
                    self.done = max(self.done, sequence)
                    sequence += 1
        except Exception as error:
            self.fault = f"{self.stream}: {error!r}"

    def _send(self, client: httpx.Client, sequence: int) -> httpx.Response:
        body, deadline = as_array(self._images[sequence - 1]), time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                found = client.post(
                    f"/v1/streams/{self.stream}/predict",
                    params={"sequence": sequence},
                    content=body,
                    headers={"Content-Type": "application/x-npy"},
                )
            except httpx.TransportError:
                found = None
            if found is not None and found.status_code in (200, 409):
                return found
            # A replica that Ray Serve had chosen was killed: its proxy answers 500, and not as the service does.
            assert found is None or found.status_code == 503 or "error" not in found.text, found.text
            self.repeated["none" if found is None else f"{found.status_code} {found.text[:60]}"] += 1
            time.sleep(0.1)
        raise AssertionError("not answered within a minute")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    arguments = ("serve", "-c", NAME, "--state", folder, "--port", port, "--device", "cpu", "--group", 1)
    options = ("--slots", 3, "--checkpoint-every", EVERY, "--ray", "--replicas", 2)
    command = [sys.executable, "-m", "testtime", *map(str, (*arguments, *options))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not (lines and lines[-1].startswith("serving ")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.communicate()


def find_owner(folder: Path, *others: str) -> tuple[str, int]:
    """The replica, none of the others, that owns most streams, and its process."""
    owners = Counter(json.loads(file.read_text())["owner"] for file in (folder / "leases").glob("*.json"))
    for name, _ in owners.most_common():
        file = folder / "replicas" / f"{name}.json"
        if name not in others and file.exists():
            return name, json.loads(file.read_text())["pid"]
    raise AssertionError(f"no owner: {owners}")


def wait_for(senders: list[Sender], images: int) -> None:
    deadline = time.monotonic() + 120
    while sum(sender.done for sender in senders) < images:
        assert time.monotonic() < deadline
        assert not [sender.fault for sender in senders if sender.fault]
        time.sleep(0.02)


def test_killed_and_paused_under_load(service: tuple[str, subprocess.Popen[str]], folder: Path) -> None:
    url, process = service
    senders = [Sender(url, number) for number in range(STREAMS)]
    for sender in senders:
        sender.start()
    total = STREAMS * IMAGES
    wait_for(senders, total // 5)
    killed, pid = find_owner(folder)
    os.kill(pid, signal.SIGKILL)
    wait_for(senders, 2 * total // 3)
    assert killed not in {read_owner(folder, sender.stream) for sender in senders}

    wait_for_two(folder, killed)
    paused, pid = find_owner(folder, killed)
    taken = [sender.stream for sender in senders if read_owner(folder, sender.stream) == paused]
    os.kill(pid, signal.SIGSTOP)
    for sender in senders:
        sender.limit = IMAGES
    try:
        deadline = time.monotonic() + 60
        while all(read_owner(folder, stream) == paused for stream in taken):
            assert time.monotonic() < deadline
            for stream in taken:
                with contextlib.suppress(httpx.TransportError):  # those that Ray Serve brings to the paused one
                    httpx.get(f"{url}/v1/streams/{stream}", timeout=1)
    finally:
        # It finds requests and states of streams that are no longer its own.
        os.kill(pid, signal.SIGCONT)
    for sender in senders:
        sender.join(120)
        assert not sender.fault
        assert sender.done == IMAGES
    lost = [count for sender in senders for count in sender.lost]
    assert all(count <= EVERY for count in lost)

    listed = httpx.get(f"{url}/v1/streams").json()
    assert {row["id"]: row["version"] for row in listed["streams"]} == {s.stream: IMAGES for s in senders}
    restored = [row["restored_version"] for row in listed["streams"] if row["restored_version"]]
    assert restored  # some were taken over
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    for sender in senders:
        state = folder / "streams" / hash_stream(sender.stream) / "state.safetensors"
        about = read_description(state, "testtime-stream")
        assert about is not None
        assert (about["record"]["version"], about["record"]["sequence"]) == (IMAGES, IMAGES)
    assert not list((folder / "leases").glob("*.json"))


def wait_for_two(folder: Path, killed: str) -> None:
    """Wait until Ray Serve has replaced a replica."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        files = [file for file in (folder / "replicas").glob("*.json") if file.stem != killed]
        with contextlib.suppress(httpx.TransportError):
            asked = [httpx.get(f"http://{json.loads(file.read_text())['address']}/", timeout=5) for file in files]
            if [found.status_code for found in asked] == [403, 403]:
                time.sleep(2)  # until its network is ready, and Ray Serve knows
                return
        time.sleep(0.1)
    raise AssertionError("no second replica within 90 seconds")


def read_owner(folder: Path, stream: str) -> Any:
    try:
        return json.loads((folder / "leases" / f"{hash_stream(stream)}.json").read_text())["owner"]
    except FileNotFoundError:
        return None
