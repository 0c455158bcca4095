"""How fast the service answers, against the bare step of `Streams`; what a stream takes; what leaving and coming costs.

    python benchmarks/serve.py --quick                               # two CPU cores, about a minute
    python benchmarks/serve.py --out results/serve-cpu.json          # about five minutes
    python benchmarks/serve.py --device cuda --network cifar10-resnet26-gn-joint --out results/serve-h200.json

The service runs as a process of its own, the load comes from this one over loopback: one connection a stream, the next
request as soon as the last is answered; with `ahead` 2, two connections, so that the next request already waits.
Latency is from the first byte of a request to the last of its answer. The bare rate is that of `Streams.predict` with
as many streams, in this process, without a service; both use the settings that the network's card recommends. Images
are arrays of bytes. Load generator and service share the machine's cores. Memory of a resident stream is the size of
its tensors, of a stored one that of its file. Eviction, reload and write are means, with four times as many streams as
slots; an eviction hands the state to a thread that writes it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import testtime as tt
from testtime.adaptation.methods import Method, find_method
from testtime.evaluation.recommended import make_recommended
from testtime.provenance import describe_machine

Row = dict[str, Any]


@contextlib.contextmanager
def serve(arguments: argparse.Namespace, folder: str, *more: str) -> Iterator[tt.Client]:
    """A service in a process of its own."""
    given = ["-c", arguments.network, "--method", arguments.method, "--device", arguments.device, "--port", "0"]
    given += ["--checkpoint-every", str(arguments.checkpoint_every)]
    command = [sys.executable, "-m", "testtime", "serve", *given, "--state", folder, *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            found = re.search(r"on (http://\S+)", line)
            if found:
                url = found[1]
                break
        client = tt.Client(url, retries=0)
        while True:
            with contextlib.suppress(tt.ServiceError):
                client.fetch("GET", "/readyz")
                break
            assert process.poll() is None, "the service ended"
            time.sleep(0.1)
        yield client
    finally:
        process.terminate()
        process.stderr.read()
        process.stderr.close()
        assert process.wait(60) == 0, "the service did not end as it should"


def encode(image: np.ndarray, images: int) -> bytes:
    """The body of a request: an image several times."""
    file = io.BytesIO()
    np.save(file, np.broadcast_to(image, (images, *image.shape)))
    return file.getvalue()


async def send_all(
    client: tt.Client, body: bytes, streams: int, seconds: float, prefix: str, ahead: int = 1
) -> tuple[list[float], int]:
    """Let each stream send one request after another, at least one.

    Returns:
        The latencies of all, in seconds, and how many were answered in time.
    """
    host, port = client.url.removeprefix("http://").split(":")
    latencies: list[float] = []
    in_time = 0
    end = time.perf_counter() + seconds

    async def work(name: str) -> None:
        nonlocal in_time
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/streams/{name}/predict HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/x-npy\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            begin = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer.lower())
            assert length is not None, answer
            await reader.readexactly(int(length[1]))
            assert answer.startswith(b"HTTP/1.1 200"), answer
            latencies.append(time.perf_counter() - begin)
            if time.perf_counter() > end:
                break
            in_time += 1
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(work(f"{prefix}-{number % streams}") for number in range(streams * ahead)))
    return latencies, in_time


def measure_service(client: tt.Client, body: bytes, streams: int, images: int, seconds: float, ahead: int) -> Row:
    asyncio.run(send_all(client, body, streams, seconds / 10, f"n{streams}"))  # creates the streams, and warms up
    latencies, in_time = asyncio.run(send_all(client, body, streams, seconds, f"n{streams}", ahead))
    percentiles = dict(zip(("p50_ms", "p95_ms", "p99_ms"), np.percentile(latencies, [50, 95, 99]) * 1000, strict=True))
    row: Row = {"streams": streams, "images": images, "ahead": ahead, "requests": len(latencies)}
    row |= {"requests_per_s": in_time / seconds, "images_per_s": images * in_time / seconds}
    return row | {name: float(value) for name, value in percentiles.items()}


def measure_bare(net: tt.YNet, method: Method, streams: int, seconds: float, image: np.ndarray) -> float:
    """Images per second of the bare step of as many streams."""
    adapter = tt.Streams(net, streams, method=method)
    batch, every = torch.from_numpy(image).expand(streams, *image.shape), torch.arange(streams)
    for _ in range(2):
        adapter.predict(batch, streams=every).logits.cpu()
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds or done < 2:
        adapter.predict(batch, streams=every).logits.cpu()
        done += 1
    return done * streams / (time.perf_counter() - begin)


def measure_memory(net: tt.YNet, method: Method, folder: Path, image: np.ndarray) -> Row:
    """Bytes of a resident stream, and the mean of the stored ones."""
    adapter = tt.Streams(net, 2, method=method)
    adapter.predict(torch.from_numpy(image)[None].expand(2, *image.shape))
    state = adapter.export_streams(torch.tensor([0]))
    files = [path.stat().st_size for path in folder.rglob("state.safetensors")]
    resident = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return {"resident_bytes": resident, "stored_bytes": sum(files) / max(1, len(files))}


def measure_evictions(client: tt.Client, body: bytes, seconds: float) -> Row:
    """Mean seconds of evicting and of loading, with four times as many streams as slots."""
    asyncio.run(send_all(client, body, 16, seconds, "evicted"))
    text = client.fetch("GET", "/metrics").decode()
    row: Row = {}
    for stage in ("evict", "load", "write"):
        total, count = (
            float(re.search(rf'testtime_stage_seconds_{part}{{stage="{stage}"}} (\S+)', text)[1])  # type: ignore[index]
            for part in ("sum", "count")
        )
        row |= {f"{stage}_ms": 1000 * total / count, f"{stage}s": int(count)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer streams and seconds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", default="digits-resnet8-gn-joint")
    parser.add_argument("--method", default="ttt")
    parser.add_argument("--streams", type=int, nargs="+", default=None, help="default: 1 16 64 256")
    parser.add_argument("--images", type=int, nargs="+", default=None, help="of a request; default: 1 16, quick 1")
    parser.add_argument("--ahead", type=int, nargs="+", default=[1, 2], help="requests of a stream at once")
    parser.add_argument("--checkpoint-every", type=int, default=16, help="see `testtime serve --help`")
    parser.add_argument("--seconds", type=float, default=None, help="of each row; default: 10, quick 2")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    counts = arguments.streams or ([1, 16] if arguments.quick else [1, 16, 64, 256])
    seconds = arguments.seconds or (2.0 if arguments.quick else 10.0)
    sizes = arguments.images or ([1] if arguments.quick else [1, 16])
    net = tt.load(arguments.network).to(arguments.device)
    method = make_recommended(find_method(arguments.method), net.card.settings)
    assert net.card.size is not None
    shape = (net.channels or 3, net.card.size, net.card.size)
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    machine = describe_machine(torch.device(arguments.device))
    content: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "machine": machine}
    content |= {"cores": os.cpu_count(), "network": arguments.network, "method": arguments.method}
    content |= {"checkpoint_every": arguments.checkpoint_every, "seconds": seconds, "rows": []}

    def store(shown: Row, **more: Any) -> None:  # after every row: what was measured outlives whatever comes then
        print(json.dumps({name: _round(value) for name, value in shown.items()}), flush=True)
        content.update(more)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")

    rows: list[Row] = content["rows"]
    with tempfile.TemporaryDirectory() as folder:
        room = ["--slots", str(max(counts)), "--max-queue", str(max(counts) * max(sizes) * max(arguments.ahead))]
        with serve(arguments, f"{folder}/a", *room) as client:
            for images, ahead in itertools.product(sizes, arguments.ahead):
                body = encode(image, images)
                for streams in counts:
                    rows.append(measure_service(client, body, streams, images, seconds, ahead))
                    store(rows[-1])
        bare = {streams: measure_bare(net, method, streams, seconds, image) for streams in counts}
        for row in rows:
            row["bare_images_per_s"] = bare[row["streams"]]
            row["share_of_bare"] = row["images_per_s"] / row["bare_images_per_s"]
        store({f"bare, {count} streams": rate for count, rate in bare.items()})
        memory = measure_memory(net, method, Path(folder, "a"), image)
        store(memory, memory=memory)
        with serve(arguments, f"{folder}/b", "--slots", "4") as client:
            evictions = measure_evictions(client, encode(image, 1), seconds)
        store(evictions, evictions=evictions)


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
