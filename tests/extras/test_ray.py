"""Evaluation runs over Ray: the same records as in one process, also when a worker dies in the middle of a job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from testtime import resnet26
from testtime.evaluation import Run, make_plan, open_run, run_plan
from testtime.evaluation import ray as cluster

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def all_columns(run: Run) -> dict[str, dict[str, list[Any]]]:
    return {u.title: {name: column.tolist() for name, column in u.columns().items()} for u in run.units}


def test_a_run_over_ray_with_a_worker_killed_is_the_run_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = resnet26(depth=8, channels=1, size=8)
    net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
    net.save(tmp_path / "net.safetensors")
    for name, seed in (("digits", 1), ("digits-c/fog/5", 2)):
        own = resnet26(depth=8, channels=1, size=8, seed=seed)
        own.card = net.card
        own.save(tmp_path / "own" / f"{name}.safetensors")
    plan = make_plan(
        checkpoint=tmp_path / "net.safetensors",
        networks={"uda": tmp_path / "own" / "{set}.safetensors"},
        data=["digits", "digits-c/fog/5"],
        limit=75,
        shuffle=True,
        copies=["2"],
        steps=["1"],
        lr=["0.05"],
        threshold=["episodic=60%"],
    )
    monkeypatch.setattr(cluster, "SHARD", 32)  # three shards to a unit
    victim = cluster.Job((("episodic", "digits-c/fog/5", 0),), 32, 64)
    tries = tmp_path / "tries"
    tries.mkdir()
    kill = signal.SIGKILL

    def do_job_or_die(shared: Any, job: Any) -> Any:
        # Defined here, so that it travels by value: workers cannot import this file.
        import testtime.evaluation.ray as there

        (tries / f"{job.units[0][0]}-{job.units[0][1].replace('/', '-')}-{job.start}-{os.getpid()}").touch()
        if (job.units, job.start) == (victim.units, victim.start) and len(
            list(tries.glob("episodic-digits-c-fog-5-32-*"))
        ) == 1:
            os.kill(os.getpid(), kill)
        return there.do_job(shared, job)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "do_job", do_job_or_die)
        reported: list[tuple[int, int, str]] = []
        spread = run_plan(plan, tmp_path / "spread", ray="local", progress=lambda *given: reported.append(given))
    alone = run_plan(plan, tmp_path / "alone", together=1)
    assert all_columns(spread) == all_columns(alone)
    assert len(spread.units) == 8
    assert [u.about.get("threshold") for u in spread.units] == [u.about.get("threshold") for u in alone.units]
    assert sum("threshold" in unit.about for unit in spread.units) == 2
    shards = {unit.title: unit.about["shards"] for unit in spread.units}
    assert shards == {u.title: 1 if u.method == "online" else 3 for u in alone.units}
    # The job was begun by two workers, and every other job by one.
    assert len({file.name.rsplit("-", 1)[1] for file in tries.glob("episodic-digits-c-fog-5-32-*")}) == 2
    assert len(list(tries.iterdir())) == 20 + 1
    assert reported[-1][0] == reported[-1][1]
    assert open_run(tmp_path / "spread").configuration == alone.configuration


def test_an_address_where_nothing_is_fails_at_once() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1"):
        cluster.start_ray("127.0.0.1:1")
