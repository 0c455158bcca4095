"""The small parts: slots, metrics, limits, settings, bodies with several parts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from testtime.serve.bodies import split_body
from testtime.serve.limits import Rates, check_stream_id, check_token
from testtime.serve.metrics import Metrics
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.server import listen
from testtime.serve.settings import ServeSettings, is_loopback
from testtime.serve.slots import Slots


def test_the_least_recently_used_stream_goes_unless_it_is_pinned_or_needed() -> None:
    slots = Slots(3)
    taken = [slots.take(name) for name in "abc"]
    assert sorted(taken) == [0, 1, 2]
    assert slots.find_evicted(["a", "b"]) == []
    assert slots.find_evicted(["d"]) == ["a"]
    slots.touch("a")
    assert slots.find_evicted(["d"]) == ["b"]
    slots.pinned.add("b")
    assert slots.find_evicted(["d"]) == ["c"]
    assert slots.find_evicted(["d", "c"]) == ["a"]
    assert slots.fit(["d", "e", "f"]) == ["d", "e"]
    assert slots.fit(["b", "d", "e", "f"]) == ["b", "d", "e"]
    slots.release("c")
    slots.release("unknown")
    assert slots.take("d") == taken[2]
    assert slots.list_resident() == ["b", "a", "d"]


def test_a_record_comes_back_and_malformed_ones_do_not() -> None:
    record = StreamRecord("a")
    answer = {"class": 1, "before": {"class": 2}, "loss_before": 1.0, "loss_after": 0.5, "confidence": 0.9}
    for number in range(300):
        record.count(answer | {"adapted": number % 2 == 0, "rolled_back": number % 2 == 1}, True, None)
        record.remember(number + 1, {"number": number})
    assert (record.seen, record.version, record.sample, record.adapted, record.rolled_back) == (300, 300, 300, 150, 150)
    assert (record.changed, record.unsaved) == (1.0, 300)
    assert list(record.answers) == [str(number) for number in range(293, 301)]
    table = record.describe()
    again = StreamRecord.parse(table)
    assert again.describe() == table
    assert (again.saved_sequence, again.unsaved) == (300, 0)
    record.shrink()
    assert (record.answers, len(record.history)) == ({}, 32)
    for name, value in {"version": -1, "id": 3, "loss": "x", "frozen": 1, "answers": [], "sequence": 1.5}.items():
        with pytest.raises(ValueError, match=name):
            StreamRecord.parse(table | {name: value})
        with pytest.raises(ValueError, match=f"`{name}` is missing"):
            StreamRecord.parse({key: value for key, value in table.items() if key != name})


def test_metrics_are_in_the_text_format_of_prometheus() -> None:
    metrics = Metrics()
    metrics.add_counter("c_total", "Counted.")
    metrics.add_gauge("g", "Gauged.", lambda: 2.5)
    metrics.add_histogram("h", "Observed.", (1, 10))
    metrics.count("c_total", kind='a"b\\c\n')
    metrics.count("c_total", 2, kind="x")
    for value in (0.5, 1, 5, 50):
        metrics.observe("h", value, stage="s")
    assert metrics.read("c_total", kind="x") == 2
    assert metrics.format().splitlines() == [
        "# HELP c_total Counted.",
        "# TYPE c_total counter",
        'c_total{kind="a\\"b\\\\c\\n"} 1',
        'c_total{kind="x"} 2',
        "# HELP g Gauged.",
        "# TYPE g gauge",
        "g 2.5",
        "# HELP h Observed.",
        "# TYPE h histogram",
        'h_bucket{stage="s",le="1"} 2',
        'h_bucket{stage="s",le="10"} 3',
        'h_bucket{stage="s",le="+Inf"} 4',
        'h_sum{stage="s"} 56.5',
        'h_count{stage="s"} 4',
    ]


def test_rates_are_those_of_each_client() -> None:
    now = 0.0
    rates = Rates(2.0, lambda: now)
    for _ in range(2):
        rates.count("a")
    with pytest.raises(Refusal, match="More than 2 requests per second") as caught:
        rates.count("a")
    assert caught.value.retry_after == 1
    rates.count("b")
    now = 0.5
    rates.count("a")
    with pytest.raises(Refusal):
        rates.count("a")
    Rates(None).count("a")


@pytest.mark.parametrize("name", ["a", "camera-7", "A.b_c-9", "0", "a" * 64])
def test_names_that_are_valid(name: str) -> None:
    assert check_stream_id(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a\n", "a" * 65, "ä", "a b", "\0"])
def test_names_that_are_not(name: str) -> None:
    with pytest.raises(Refusal, match="1 to 64 letters"):
        check_stream_id(name)


def test_tokens() -> None:
    check_token(None, None)
    check_token("Bearer abc", "abc")
    for given in (None, "", "abc", "Bearer ab", "bearer abc", "Bearer abc ", "Bearer äöü"):
        with pytest.raises(Refusal) as caught:
            check_token(given, "abc")
        assert caught.value.status == 401


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slots": 0}, "`slots` must be an integer of at least 1, got 0"),
        ({"group": 0}, "`group`"),
        ({"checkpoint_every": -1}, "`checkpoint_every`"),
        ({"ttl": 0}, "`ttl` must be a positive number"),
        ({"rate": float("nan")}, "`rate`"),
        ({"max_wait_ms": -1}, "`max_wait_ms`"),
        ({"on_collapse": "panic"}, "`on_collapse` must be one of guard, report, reset"),
        ({"port": 70000}, "`port`"),
        ({"host": "0.0.0.0"}, "needs a token"),
        ({"host": "example.org"}, "needs a token"),
        ({"token": "short"}, "at least 16"),
        ({"token": "ä" * 20}, "ASCII"),
    ],
)
def test_settings_that_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeSettings(Path("x"), **given)


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]")))
    others = ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.example.org")
    assert not any(map(is_loopback, others))
    assert "secret" not in repr(ServeSettings(Path("x"), host="0.0.0.0", token="secret-secret-secret"))


def test_parts_of_a_body_are_taken_out_byte_by_byte() -> None:
    contents = [b"", b"\r\n", b"--x", b"\r\n--", b"a\r\n\r\nb", bytes(range(256))]
    body = b"".join(b"--x\r\nContent-Type: image/png\r\n\r\n" + content + b"\r\n" for content in contents[:2])
    body += b"".join(b"--xy\r\nContent-Type: image/png\r\n\r\n" + content + b"\r\n" for content in contents)
    assert split_body("multipart/form-data; boundary=xy", body[body.index(b"--xy") :] + b"--xy--") == [
        ("image/png", content) for content in contents
    ]
    assert split_body("image/png; charset=x", b"abc") == [("image/png", b"abc")]


def test_answers_are_sent_without_delay() -> None:
    async def connect() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            delay = await found
            writer.close()
            return delay

    assert asyncio.run(connect())
