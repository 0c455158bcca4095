"""The process: killed at any time it comes back with what it had saved; asked to end, it finishes and saves first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import testtime as tt
from testtime.evaluation import predict_files
from testtime.serve.server import listen
from testtime.tensorfile import read_description

NAME = "digits-resnet8-gn-joint"


def start(folder: Path, port: int, *more: str) -> subprocess.Popen[str]:
    arguments = ("serve", "-c", NAME, "--state", folder, "--port", port, "--device", "cpu", "--group", 1, *more)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "testtime", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_until_ready(client: tt.Client, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        try:
            client.fetch("GET", "/readyz")
            return
        except tt.ServiceError:
            time.sleep(0.05)
    raise AssertionError("not ready within two minutes")


def images(count: int) -> Tensor:
    return tt.data.open("digits").images(slice(count)).float() / 255


@pytest.mark.slow
def test_killed_and_ended(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    client, given = tt.Client(f"http://127.0.0.1:{port}", retries=0), images(26)
    online, camera = predict_files.prepare_adapter(tt.load(NAME), online=True), client.stream("camera")
    expected = [online.predict(image[None]).logits.softmax(-1)[0].tolist() for image in given]

    process = start(tmp_path, port, "--checkpoint-every", "3")
    try:
        wait_until_ready(client, process)
        for number in range(9):
            answer = camera.predict(given[number])
            assert list(answer.answers[0].probabilities) == expected[number]
        saved = answer.saved_sequence
    finally:
        process.kill()
        process.communicate()
    assert 9 - 3 <= saved < 9

    process = start(tmp_path, port, "--checkpoint-every", "3")
    try:
        wait_until_ready(client, process)
        about = camera.info()
        assert about["restored_version"] == about["sequence"] == about["version"] == saved
        # The client sees the gap and sends it again.
        assert list(camera.predict(given[9]).answers[0].probabilities) == expected[9]

        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(camera.predict(*given[10:])))
        thread.start()
        while not json.loads(client.fetch("GET", "/readyz"))["waiting"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert [list(one.probabilities) for one in found[0].answers] == expected[10:]
        assert process.wait(60) == 0
        assert re.search(r"restored 1 streams", process.stderr.read() if process.stderr else "")
    finally:
        process.kill()
        process.communicate()
    (state,) = tmp_path.rglob("state.safetensors")
    description = read_description(state, "testtime-stream")
    assert description is not None
    assert (description["record"]["sequence"], description["record"]["seen"]) == (11, 26)
    with pytest.raises(tt.ServiceError, match="cannot be reached"):
        client.list_streams()
