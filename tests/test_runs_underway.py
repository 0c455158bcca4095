"""Online units that advance together and are stopped: they go on where they were last kept, bit for bit."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testtime import resnet26
from testtime.runs import Plan, make_plan, open_run, run_plan, underway, workshop
from testtime.runs import run as running
from testtime.streams import Streams

IMAGES = 40


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    net = resnet26(depth=8, channels=1, size=8)
    net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
    file = tmp_path_factory.mktemp("network") / "net.safetensors"
    net.save(file)
    return make_plan(
        checkpoint=file,
        data=["digits-c/*_noise/5"],
        methods="online",
        limit=IMAGES,
        shuffle=True,
        copies=["2"],
        lr=["0.05"],
    )


@pytest.fixture(scope="module")
def undisturbed(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_plan(plan, out)
    assert not (out / underway.FOLDER).exists()
    return all_columns(out)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of streams was given; they are kept as often as can be."""
    monkeypatch.setattr(workshop, "KEEP_SECONDS", 0.0)
    calls: list[int] = []
    real = Streams.predict

    def predict(streams: Streams, images: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(len(images))
        return real(streams, images, *arguments, **named)

    monkeypatch.setattr(Streams, "predict", predict)
    return calls


def all_columns(folder: Path) -> dict[str, Any]:
    run = open_run(folder)
    assert not run.damaged
    return {unit.title: {n: c.tolist() for n, c in unit.columns().items()} for unit in run.units}


def stop_late(done: int, total: int, text: str) -> None:
    if done > 0.7 * total:
        raise KeyboardInterrupt


def kept(folder: Path) -> list[Path]:
    return list((folder / underway.FOLDER).iterdir())


@pytest.mark.parametrize("jobs", [1, 2])
def test_streams_that_are_stopped_go_on_where_they_were(
    plan: Plan, undisturbed: dict[str, Any], tmp_path: Path, seen: list[int], jobs: int
) -> None:
    options: dict[str, Any] = {"jobs": jobs, "together": 3}
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path, progress=stop_late, **options)
    assert open_run(tmp_path).units == []
    assert len(kept(tmp_path)) == 1
    seen.clear()
    told: list[tuple[int, int, str]] = []
    run = run_plan(plan, tmp_path, progress=lambda *said: told.append(said), **options)
    assert 0 < len(seen) < IMAGES
    assert set(seen) == {3}
    assert all_columns(tmp_path) == undisturbed
    assert told[-1][0] == told[-1][1]
    assert not (tmp_path / underway.FOLDER).exists()
    assert all(unit.about["counts"]["images"] == IMAGES for unit in run.units)


def test_how_long_it_took_counts_both_parts(
    plan: Plan, tmp_path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path, progress=stop_late)
    taken: list[float] = []
    real = underway.Shelf.take

    def take(*arguments: Any) -> Any:
        found = real(*arguments)
        assert found is not None
        taken.append(found.seconds)
        return found._replace(seconds=3000.0)

    monkeypatch.setattr(underway.Shelf, "take", take)
    run = run_plan(plan, tmp_path)
    assert 0 < taken[0] < 600
    assert all(1000 < unit.seconds < 1200 for unit in run.units)


def test_units_of_a_group_that_was_stopped_while_it_was_written(
    plan: Plan, undisturbed: dict[str, Any], tmp_path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = running.write_unit, []

    def write(*arguments: Any, **named: Any) -> Any:
        if written:
            raise OSError("No space left on device")
        written.append(real(*arguments, **named))

    with monkeypatch.context() as patch:
        patch.setattr(running, "write_unit", write)
        with pytest.raises(OSError, match="No space left"):
            run_plan(plan, tmp_path)
    assert len(open_run(tmp_path).units) == 1
    seen.clear()
    run_plan(plan, tmp_path)
    assert len(seen) < IMAGES
    assert all_columns(tmp_path) == undisturbed


def flip_last_bit(held: bytes) -> bytes:
    return held[:-1] + bytes([held[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_last_bit, "it was altered"),
        (lambda held: held[: len(held) // 2], "not what is left of streams"),
        (lambda held: b"", "not what is left of streams"),
        (lambda held: held.replace(b'\\"device\\": \\"cpu\\"', b'\\"device\\": \\"abc\\"'), ""),
    ],
    ids=["a bit", "half", "empty", "another device"],
)
def test_what_cannot_go_on_begins_anew(
    plan: Plan,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    seen: list[int],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    said: str,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path, progress=stop_late)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    seen.clear()
    with caplog.at_level(logging.WARNING):
        run_plan(plan, tmp_path)
    assert len(seen) == IMAGES
    assert all_columns(tmp_path) == undisturbed
    assert (said in caplog.text) if said else not caplog.text


def test_a_full_disk_does_not_stop_streams(
    plan: Plan,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    seen: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(underway, "write_whole", full)
    run_plan(plan, tmp_path)
    assert "cannot be written ([Errno 28] No space left on device). A kill would cost" in caplog.text
    assert all_columns(tmp_path) == undisturbed


KILLED = """
import os, signal, sys
from testtime.runs import Plan, run_plan, underway, workshop
workshop.KEEP_SECONDS = 0.0
usual = underway.Shelf.keep

def keep(*arguments):
    usual(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

underway.Shelf.keep = keep
run_plan(Plan.from_json(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_streams_that_are_killed_go_on_where_they_were(
    plan: Plan, undisturbed: dict[str, Any], tmp_path: Path, seen: list[int]
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED, plan.to_json(), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert open_run(tmp_path).units == []
    run_plan(plan, tmp_path)
    assert 0 < len(seen) < IMAGES
    assert all_columns(tmp_path) == undisturbed
    assert not [file for file in tmp_path.rglob("*") if file.suffix == ".part"]
