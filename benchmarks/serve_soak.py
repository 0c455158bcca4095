"""Whether the service loses, mixes up or leaks anything: mixed load while its process is killed again and again.

    python benchmarks/serve_soak.py --minutes 10 --out soak.json

Many streams share few slots and are evicted all the time. Requests are numbered, have one to four
images as arrays or pictures, and differ from stream to stream. At random times the service is killed (SIGKILL) and
started again, with another `--checkpoint-every`; in the last third of the time it is not, to watch its memory and file
handles. Meanwhile other requests come: lists, exports, pins, streams that are created and deleted, malformed ones.

Checked, and reported as faults:
- after a kill a stream has lost at most as many acknowledged images as stated, and nothing that was said to be saved;
- its version and count are those of the requests that it still knows;
- every answer, also of a request that is sent again, is bit for bit that of an `Online` adapter that sees the images of
  that stream one after another, computed afterwards (the service runs with `--group 1`);
- no error of the service, no process left behind, no growth of memory or file handles.

Rates are of no interest: the load, the service and the checks share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import io
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import testtime as tt
from testtime.evaluation import predict_files
from testtime.provenance import describe_machine
from testtime.serve.server import listen

NETWORK = "digits-resnet8-gn-joint"
INTERVALS = (0, 4, 16)  # of --checkpoint-every, in turn
THREADS = 12
GROWTH_MB, GROWTH_FILES = 48, 8  # allowed in the last third

Answer = list[list[float]]


@functools.cache
def load_images() -> np.ndarray:
    """The test digits, uint8 `(N, 1, 16, 16)`."""
    return tt.data.open("digits").images(slice(None)).numpy()


def plan_request(stream: int, number: int) -> tuple[list[int], bool]:
    """The images of a request, and whether they are sent as pictures."""
    rng = random.Random(1_000_003 * stream + number)
    return [rng.randrange(len(load_images())) for _ in range(rng.choice([1, 1, 1, 2, 4]))], rng.random() < 0.25


def encode(indices: Sequence[int], as_pictures: bool) -> tuple[str, bytes]:
    """Content type and body."""
    if not as_pictures:
        file = io.BytesIO()
        np.save(file, load_images()[list(indices)])
        return "application/x-npy", file.getvalue()
    parts = []
    for index in indices:
        file = io.BytesIO()
        Image.fromarray(load_images()[index, 0]).save(file, "PNG")
        parts.append(b"--part\r\nContent-Type: image/png\r\n\r\n" + file.getvalue() + b"\r\n")
    return "multipart/form-data; boundary=part", b"".join(parts) + b"--part--"


@dataclass
class Server:
    """The service, which is killed and started again; a life is what lies between."""

    folder: str
    slots: int
    port: int
    lives: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        interval = INTERVALS[len(self.lives) % len(INTERVALS)]
        given = ("--state", self.folder, "--port", self.port, "--slots", self.slots, "--checkpoint-every", interval)
        command = [sys.executable, "-m", "testtime", "serve", "-c", NETWORK, "--device", "cpu", "--group", "1"]
        self.lives.append({"interval": interval, "begun": time.monotonic(), "evictions": 0, "samples": []})
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(f"{self.folder}.log", "ab") as log:
            self.process = subprocess.Popen([*command, *map(str, given)], stderr=log, env=environment)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """End it as one should; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def sample(self, connection: Connection) -> None:
        """Note evictions, memory and file handles."""
        assert self.process is not None
        life = self.lives[-1]
        status, content = connection.send("GET", "/metrics")
        if status != 200:
            return
        for line in content.decode().splitlines():
            if line.startswith("testtime_evictions_total "):
                life["evictions"] = int(float(line.split()[1]))
        with contextlib.suppress(OSError):  # it may just have ended
            process = Path("/proc", str(self.process.pid))
            pages = int((process / "statm").read_text().split()[1])
            files = len(list((process / "fd").iterdir()))
            mb = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
            life["samples"].append([round(time.monotonic() - life["begun"], 1), round(mb, 1), files])


@dataclass
class Connection:
    """Requests over one connection, opened again when it broke."""

    port: int
    _open: http.client.HTTPConnection | None = None

    def send(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> tuple[int, bytes]:
        """Return status and body; status 0 if there is no answer."""
        try:
            self._open = self._open or http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            self._open.request(method, path, body, {"Content-Type": kind} if kind else {})
            response = self._open.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            if self._open is not None:
                self._open.close()
            self._open = None
            return 0, b""


@dataclass
class Soak:
    """What all threads share."""

    server: Server
    until: float
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    """The most acknowledged images that a stream lost by a kill, by the interval stated."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, text: str) -> None:
        print(f"fault: {text}", flush=True)
        self.faults.append(text)

    def count(self, name: str, amount: int = 1) -> None:
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + amount


class Stream:
    """A stream as its client knows it."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak, self.number, self.name = soak, number, f"camera-{number}"
        self.acked = 0
        """Number of the last request that was answered."""
        self.answers: dict[int, Answer] = {}
        self._interval = 0  # stated when that answer came
        self._saved = 0  # number of the last request that cannot be lost
        self._next, self._life = 1, 0  # the life of the service that this is certain of; 0: none

    def send_next(self, connection: Connection) -> None:
        """Send a request and check its answer; after a kill, first look what the service still knows."""
        lives = self.soak.server.lives
        if self._life != len(lives) and not self._recover(connection):
            return
        interval, number = lives[-1]["interval"], len(lives)
        kind, body = encode(*plan_request(self.number, self._next))
        url = f"/v1/streams/{self.name}/predict?sequence={self._next}"
        status, content = connection.send("POST", url, body, kind)
        if status in (0, 503):
            self._life = 0
            self.soak.count("unanswered")
            time.sleep(0.2)
        elif status != 200:
            self._life = 0
            if len(lives) == number:  # it was not killed meanwhile
                self.soak.fail(f"{self.name}, request {self._next}: status {status}, {content[:200]!r}")
        else:
            self._check(json.loads(content), interval)

    def _check(self, payload: dict[str, Any], interval: int) -> None:
        number, indices = self._next, plan_request(self.number, self._next)[0]
        answer: Answer = [one["probabilities"] for one in payload["answers"]]
        first = self.count_images(number - 1)
        samples = [one["sample"] for one in payload["answers"]]
        if (payload["stream"], payload["sequence"]) != (self.name, number):
            self.soak.fail(f"{self.name}, request {number}: the answer to {payload['stream']}, {payload['sequence']}")
        if samples != list(range(first, first + len(indices))):
            self.soak.fail(f"{self.name}, request {number}: images {samples}, expected from {first}")
        if self.answers.setdefault(number, answer) != answer:
            self.soak.fail(f"{self.name}, request {number}: another answer when it was sent again")
        self.soak.count("requests")
        self.soak.count("images", len(indices))
        self.soak.count("repeated", payload["repeated"])
        self._next, self._saved = number + 1, max(self._saved, payload["saved_sequence"])
        if number >= self.acked:
            self.acked, self._interval = number, interval

    def _recover(self, connection: Connection) -> bool:
        """Go on from the request after the last that the service knows; returns False if it is not ready."""
        life = len(self.soak.server.lives)
        status, content = connection.send("GET", f"/v1/streams/{self.name}")
        if status not in (200, 404) or connection.send("GET", "/readyz")[0] != 200:
            time.sleep(0.2)
            return False
        about = json.loads(content) if status == 200 else {"sequence": 0, "version": 0, "seen": 0}
        known = about["sequence"]
        lost = self.count_images(self.acked) - self.count_images(min(known, self.acked))
        with self.soak.lock:
            self.soak.lost[self._interval] = max(lost, self.soak.lost.get(self._interval, 0))
        if lost > self._interval:
            self.soak.fail(f"{self.name}: {lost} acknowledged images lost, {self._interval} were stated")
        if known < self._saved:
            self.soak.fail(f"{self.name}: request {self._saved} was said to be saved, {known} is")
        if not known <= self.acked + 1:
            self.soak.fail(f"{self.name}: request {known} was never sent")
        if about["version"] != self.count_images(known) or about["seen"] != self.count_images(known):
            self.soak.fail(f"{self.name}: version {about['version']} after request {known}")
        self.soak.count("sent again", max(0, self.acked - known))
        self._next, self._life = known + 1, life
        return True

    def count_images(self, number: int) -> int:
        """Images of the requests up to one."""
        while len(self._totals) <= number:
            self._totals.append(self._totals[-1] + len(plan_request(self.number, len(self._totals))[0]))
        return self._totals[number]

    @functools.cached_property
    def _totals(self) -> list[int]:
        return [0]


def work(soak: Soak, streams: Sequence[Stream], seed: int) -> None:
    """Send requests of some streams, one or several of each in turn, until the time is over."""
    rng, connection = random.Random(seed), Connection(soak.server.port)
    try:
        while time.monotonic() < soak.until:
            stream = rng.choice(streams)
            for _ in range(rng.choice([1, 1, 1, 1, 2, 6])):
                stream.send_next(connection)
    except Exception as error:
        soak.fail(f"{type(error).__name__}: {error}")


def disturb(soak: Soak, streams: Sequence[Stream]) -> None:
    """Send other requests, until the time is over."""
    rng, connection = random.Random(0), Connection(soak.server.port)
    kind, body = encode([3], False)
    alone: list[bytes] = []

    def check(what: str, expected: tuple[int, ...], status: int, content: bytes) -> bytes:
        soak.count("others")
        if status not in (0, 503, *expected):
            soak.fail(f"{what}: status {status}, {content[:200]!r}")
        return content if status == 200 else b""

    while time.monotonic() < soak.until:
        stream = f"/v1/streams/{rng.choice(streams).name}"
        choice = rng.randrange(7)
        if choice == 0:
            for path in ("/v1/streams", "/readyz", "/", "/openapi.json", stream):
                check(path, (200, 404), *connection.send("GET", path))
        elif choice == 1:
            check("export", (200, 404), *connection.send("GET", f"{stream}/export"))
        elif choice == 2:
            for name in ("pin", "unpin"):
                check(name, (200, 404, 409), *connection.send("POST", f"{stream}/{name}"))
        elif choice == 3:
            other = f"/v1/streams/scratch-{rng.randrange(4)}"
            check("new", (200,), *connection.send("POST", f"{other}/predict", body, kind))
            check("delete", (200, 404), *connection.send("DELETE", other))
        elif choice == 4:
            content = check("alone", (200,), *connection.send("POST", "/v1/predict", body, kind))
            alone += [content] if content else []
            if alone and alone[0] != alone[-1]:
                soak.fail("the same image without a stream had another answer")
        elif choice == 5:
            for given, wrong in ((kind, body[:-1]), ("image/png", b"\x89PNG\r\n\x1a\n" + body), ("text/plain", body)):
                check("malformed", (400, 415), *connection.send("POST", f"{stream}/predict", wrong, given))
        else:
            check("order", (404, 409), *connection.send("POST", f"{stream}/predict?sequence=999999", body, kind))
        time.sleep(rng.uniform(0.0, 2.0))


def run_load(soak: Soak, streams: Sequence[Stream], calm: float) -> int:
    """Load, samples and kills until the time is over; returns the number of kills.

    Args:
        soak: What all share.
        streams: The streams.
        calm: Seconds at the end without kills.
    """
    rng, kills, connection = random.Random(1), 0, Connection(soak.server.port)
    groups = [streams[first::THREADS] for first in range(min(THREADS, len(streams)))]
    threads = [threading.Thread(target=work, args=(soak, group, seed)) for seed, group in enumerate(groups)]
    threads.append(threading.Thread(target=disturb, args=(soak, streams)))
    for thread in threads:
        thread.start()
    next_kill: float | None = None
    ended = time.monotonic()
    while time.monotonic() < soak.until:
        time.sleep(1.0)
        soak.server.sample(connection)
        now = time.monotonic()
        if next_kill is None and soak.server.lives[-1]["samples"]:  # it answers
            soak.until += now - ended  # starting does not count
            next_kill = now + rng.uniform(2.0, 40.0)
        if soak.server.process is not None and soak.server.process.poll() is not None:
            soak.fail(f"the service ended by itself, exit code {soak.server.process.returncode}")
            soak.server.start()
        elif next_kill is not None and next_kill < now < soak.until - calm:
            soak.server.kill()
            soak.server.start()
            kills, next_kill, ended = kills + 1, None, now
    for thread in threads:
        thread.join()
    return kills


def compute_oracle(stream: int, requests: int) -> list[Answer]:
    """The answers of an `Online` adapter to the first requests of a stream."""
    torch.set_num_threads(1)
    online = predict_files.prepare_adapter(tt.load(NETWORK), online=True)
    answers = []
    for number in range(1, requests + 1):
        images = torch.from_numpy(load_images()[plan_request(stream, number)[0]])
        rows = [online.predict(image[None].float() / 255).logits.softmax(-1)[0].tolist() for image in images]
        answers.append(rows)
    return answers


def check_answers(soak: Soak, streams: Sequence[Stream]) -> int:
    """Compare all answers with the oracle; returns the number of images compared."""
    compared, streams = 0, [stream for stream in streams if stream.answers]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        lasts = [max(stream.answers, default=0) for stream in streams]
        everything = pool.map(compute_oracle, [stream.number for stream in streams], lasts)
        for done, (stream, expected) in enumerate(zip(streams, everything, strict=True), 1):
            for number, answer in sorted(stream.answers.items()):
                compared += len(answer)
                if answer != expected[number - 1]:
                    soak.fail(f"{stream.name}, request {number}: another answer than that of the stream alone")
                    break
            print(f"\rcompared {done} of {len(streams)} streams", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return compared


def check_growth(soak: Soak, samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Compare the second with the last quarter of the samples of the last life: seconds, MB, files."""
    quarter = len(samples) // 4
    if quarter < 2:
        return {}
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    grown: dict[str, Any] = {"seconds": samples[-1][0] - samples[0][0]}
    for column, name, most in ((1, "mb", GROWTH_MB), (2, "files", GROWTH_FILES)):
        first, last = (float(np.median([row[column] for row in part])) for part in (early, late))
        grown[name] = [first, last]
        if last - first > most:
            soak.fail(f"{name} grew from {first:.0f} to {last:.0f}")
    return grown


def find_left_behind(folder: str) -> list[int]:
    """Processes of the service that run although it has ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            started = (path.parent / "environ").read_bytes()
            if b"testtime.serve.decode_worker" in words and f"SOAK={folder}".encode() in started:
                found.append(int(path.parent.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load; the comparison comes on top")
    parser.add_argument("--streams", type=int, default=96)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--evictions", type=int, default=1000, help="fewer are reported as a fault")
    parser.add_argument("--out", type=Path, help="write the findings to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
        free.close()
        os.environ["SOAK"] = folder  # by which its processes are found
        server = Server(f"{folder}/state", arguments.slots, port)
        server.start()
        while Connection(port).send("GET", "/readyz")[0] != 200:
            assert server.process is not None
            assert server.process.poll() is None, "the service ended"
            time.sleep(0.1)
        seconds = arguments.minutes * 60
        soak = Soak(server, time.monotonic() + seconds)
        streams = [Stream(soak, number) for number in range(arguments.streams)]
        try:
            kills = run_load(soak, streams, seconds / 3)
            code = server.end()
        finally:
            server.kill()
        if code:
            soak.fail(f"exit code {code} after SIGTERM")
        time.sleep(2.0)
        if left := find_left_behind(folder):
            soak.fail(f"processes left behind: {left}")
        compared = check_answers(soak, streams)
        grown = check_growth(soak, server.lives[-1]["samples"])
        log = Path(f"{folder}/state.log").read_text(errors="replace")
        if "Traceback" in log:
            soak.fail("the log of the service has a traceback: " + log[log.index("Traceback") :][:2000])
    evictions = sum(life["evictions"] for life in server.lives)
    if evictions < arguments.evictions:
        soak.fail(f"only {evictions} evictions: the run was too short to tell")
    content: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(torch.device("cpu")),
        "cores": os.cpu_count(),
        "minutes": arguments.minutes,
        "streams": arguments.streams,
        "slots": arguments.slots,
        "kills": kills,
        "evictions": evictions,
        **dict(sorted(soak.counts.items())),
        "compared_images": compared,
        "most_lost_by_interval": {str(key): value for key, value in sorted(soak.lost.items())},
        "last_life": grown,
        "faults": soak.faults,
    }
    print(json.dumps(content, indent=1))
    if arguments.out is not None:
        lives = [{key: life[key] for key in ("interval", "evictions", "samples")} for life in server.lives]
        arguments.out.write_text(json.dumps(content | {"lives": lives}, indent=1) + "\n")
    return int(bool(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
