"""Online units that advance together and are stopped: they go on where they were last kept, bit for bit."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from testtime import resnet26
from testtime.adaptation.streams import Streams
from testtime.evaluation import MethodSpec, Plan, Unit, make_plan, open_run, run_plan, stream_checkpoints, worker
from testtime.evaluation import run as running
from testtime.networks import load

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
    assert not (out / stream_checkpoints.FOLDER).exists()
    return all_columns(out)


@pytest.fixture(scope="module")
def stopped(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped late, with its stream checkpoint; to be copied."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, out, progress=stop_late)
    return out


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of streams was given; they are kept as often as can be."""
    monkeypatch.setattr(worker, "CHECKPOINT_SECONDS", 0.0)
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
    return list((folder / stream_checkpoints.FOLDER).iterdir())


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
    assert not (tmp_path / stream_checkpoints.FOLDER).exists()
    assert all(unit.about["counts"]["images"] == IMAGES for unit in run.units)


def test_how_long_it_took_counts_both_parts(
    plan: Plan, tmp_path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path, progress=stop_late)
    taken: list[float] = []
    real = stream_checkpoints.StreamCheckpoints.load

    def take(*arguments: Any) -> Any:
        found = real(*arguments)
        assert found is not None
        taken.append(found.seconds)
        return found._replace(seconds=3000.0)

    monkeypatch.setattr(stream_checkpoints.StreamCheckpoints, "load", take)
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
        (flip_last_bit, "damaged"),
        (lambda held: held[: len(held) // 2], "not a complete safetensors file"),
        (lambda held: b"", "an empty file"),
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


def seal(about: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """A file as the first version wrote it, whatever its content."""
    text = json.dumps(about)
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return save(tensors, {"testtime-underway": text, "sha256": digest.hexdigest()})


def unseal(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(file, framework="pt") as held:
        about = json.loads(held.metadata()["testtime-underway"])
        return about, {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118


def shorten(tensors: dict[str, Tensor], which: Callable[[str], bool]) -> None:
    tensors.update({name: tensor[:-1].clone() for name, tensor in tensors.items() if which(name)})


def drop(tensors: dict[str, Tensor], which: Callable[[str], bool]) -> None:
    for name in [name for name in tensors if which(name)]:
        del tensors[name]


MALFORMED: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], Any]] = {
    "a shorter column": lambda about, tensors: shorten(tensors, lambda name: name == "1/label"),
    "a shorter unit": lambda about, tensors: shorten(tensors, lambda name: name.startswith("1/")),
    "other images": lambda about, tensors: tensors.update({"0/sample": tensors["0/sample"] + 1}),
    "a column of another type": lambda about, tensors: tensors.update({"0/label": tensors["0/label"].long()}),
    "a missing column": lambda about, tensors: drop(tensors, lambda name: name == "2/adapted"),
    "no state": lambda about, tensors: drop(tensors, lambda name: name.startswith("state/")),
    "a shorter state": lambda about, tensors: shorten(tensors, lambda name: name.startswith("state/")),
    "seconds that are text": lambda about, tensors: about.update(seconds="x"),
    "seconds without end": lambda about, tensors: about.update(seconds=10**400),
    "units that are numbers": lambda about, tensors: about.update(units=[1, 2, 3]),
    "a unit without a set": lambda about, tensors: about.update(units=[["online"]]),
    "a unit whose set is a number": lambda about, tensors: about.update(units=[["online", 1, 0]]),
    "a unit that leads out": lambda about, tensors: about.update(units=[["../..", "digits", 0]]),
    "half a character": lambda about, tensors: about.update(units=[["\ud800", "digits", 0]]),
}


@pytest.mark.parametrize("name", ["as it was", "without a checksum", "a pipe", "a folder", *MALFORMED])
def test_files_that_were_sealed_by_somebody_else(
    plan: Plan,
    undisturbed: dict[str, Any],
    stopped: Path,
    tmp_path: Path,
    seen: list[int],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    (file,) = kept(tmp_path)
    about, tensors = unseal(file)
    file.unlink()
    if name in ("a pipe", "a folder"):
        os.mkfifo(file) if name == "a pipe" else file.mkdir()
    elif name == "without a checksum":
        file.write_bytes(save(tensors, {"testtime-underway": json.dumps(about)}))
    else:
        MALFORMED.get(name, lambda about, tensors: None)(about, tensors)
        file.write_bytes(seal(about, tensors))
    with caplog.at_level(logging.WARNING):
        run = run_plan(plan, tmp_path)
    goes_on = name in ("as it was", "without a checksum")
    assert len(seen) < IMAGES if goes_on else len(seen) == IMAGES
    assert (file.name in caplog.text) != goes_on
    assert all(line.isprintable() for line in caplog.messages)
    assert all_columns(tmp_path) == undisturbed
    assert all(unit.seconds < 100 for unit in run.units)
    assert not (tmp_path / stream_checkpoints.FOLDER).exists()


def test_units_that_do_not_belong_together_begin_anew(
    plan: Plan, undisturbed: dict[str, Any], tmp_path: Path, seen: list[int]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path, progress=stop_late)
    (file,) = kept(tmp_path)
    about, tensors = unseal(file)
    units = [Unit.of(*key) for key in about["units"]]
    for wrong in ([*units, units[0]], [units[0], Unit.of("fixed", units[1].set_name, 0), units[2]]):
        about["units"] = [[unit.method, unit.set_name, unit.seed] for unit in wrong]
        shelf = stream_checkpoints.StreamCheckpoints(tmp_path)
        shelf._path(wrong).write_bytes(seal(about, tensors))
    both = Plan(**vars(plan) | {"methods": (MethodSpec("fixed", "fixed"), *plan.methods)})
    prepare_folder_of(both, tmp_path)
    run = run_plan(both, tmp_path)
    assert {title: found for title, found in all_columns(tmp_path).items() if title in undisturbed} == undisturbed
    assert all(unit.about["counts"]["adapted"] == 0 for unit in run.units if unit.method == "fixed")


def prepare_folder_of(plan: Plan, folder: Path) -> None:
    """Make a run's folder that of another plan, whatever was begun there."""
    path = folder / "run.json"
    held = json.loads(path.read_text())
    held["configuration"]["methods"] = {
        method.name: method.describe(load(plan.networks["joint"])) for method in plan.methods
    }
    path.write_text(json.dumps(held))


def test_a_full_disk_does_not_stop_streams(
    plan: Plan,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    seen: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream_checkpoints, "write_tensors", full)
    run_plan(plan, tmp_path)
    assert "cannot be written (No space left on device)" in caplog.text
    assert all_columns(tmp_path) == undisturbed


KILLED = """
import os, signal, sys
from testtime.evaluation import Plan, run_plan, stream_checkpoints, worker
worker.CHECKPOINT_SECONDS = 0.0
usual = stream_checkpoints.StreamCheckpoints.save

def keep(*arguments):
    usual(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

stream_checkpoints.StreamCheckpoints.save = keep
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
