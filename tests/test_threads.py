"""CPU quotas of containers, and what is set before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from testtime import Online, load, threads
from testtime.adaptation import recorder


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert threads.find_quota(tmp_path / "none", tmp_path / "none") is None
    write(tmp_path, cpu__max="max 100000")
    assert threads.find_quota(tmp_path, tmp_path / "none") is None


def test_version_2_the_smallest_quota_of_all_groups_counts(tmp_path: Path) -> None:
    process = tmp_path / "process"
    process.write_text("0::/outer/inner\n")
    write(tmp_path / "outer", cpu__max="150000 100000")
    write(tmp_path / "outer" / "inner", cpu__max="max 100000")
    assert threads.find_quota(tmp_path, process) == 1.5
    write(tmp_path, cpu__max="50000 100000")  # a container sees its own group as the root
    assert threads.find_quota(tmp_path, process) == 0.5


def test_version_1(tmp_path: Path) -> None:
    process = tmp_path / "process"
    process.write_text("5:memory:/box\n4:cpu,cpuacct:/box\n")
    write(tmp_path / "cpu,cpuacct" / "box", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert threads.find_quota(tmp_path, process) == 3
    write(tmp_path / "cpu,cpuacct" / "box", cpu__cfs_quota_us="-1")
    assert threads.find_quota(tmp_path, process) is None


def test_what_is_not_a_quota_is_none(tmp_path: Path) -> None:
    for text in ("", "a b", "100 0", "7", "\x00"):
        write(tmp_path, cpu__max=text)
        assert threads.find_quota(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.5, 1), (2.2, 3), (20.0, 8)])
def test_cpus_are_cores_or_the_quota_rounded_up(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(threads, "count_cores", lambda: 8)
    monkeypatch.setattr(threads, "find_quota", lambda: quota)
    assert threads.count_cpus() == expected


_SHOW = (
    "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('OMP', 'GOMP', 'KMP'))}))"
)


def variables(program: str, **given: str) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith(("OMP", "GOMP", "KMP"))}
    command = [sys.executable, "-c", f"{program}; {_SHOW}"]
    done = subprocess.run(command, capture_output=True, text=True, env=own | given, check=True, timeout=60)
    return json.loads(done.stdout)


def test_threads_wait_without_spinning_unless_the_user_said_how() -> None:
    assert variables("import testtime").items() >= threads.WAITING.items()
    assert variables("import testtime", OMP_WAIT_POLICY="active") == {"OMP_WAIT_POLICY": "active"}
    assert variables("import testtime", GOMP_SPINCOUNT="5") == {"GOMP_SPINCOUNT": "5"}


def test_nothing_is_set_after_torch_where_it_would_have_no_effect() -> None:
    assert variables("import sys; sys.modules['torch'] = sys; import testtime") == {}


def test_a_quota_limits_the_threads(tmp_path: Path) -> None:
    limit = (
        "import os, testtime.threads as t; os.environ.clear(); t.find_quota = lambda: 0.5; t.count_cores = lambda: 4"
    )
    assert variables(f"{limit}; t.prepare()") == {**threads.WAITING, "OMP_NUM_THREADS": "1"}
    given = f"{limit}; os.environ['OMP_NUM_THREADS'] = '3'; t.prepare()"
    assert variables(given)["OMP_NUM_THREADS"] == "3"


def test_few_pixels_are_computed_on_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads.limit_threads(threads.SMALL):
            assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="inside"), threads.limit_threads(1):
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
        with threads.limit_threads(threads.SMALL + 1):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("copies", "expected"), [(8, 1), (32, 2)])
def test_a_step_on_few_pixels_takes_one_thread(copies: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    learn = recorder.episode

    def episode(*given: Any) -> Any:
        used.append(torch.get_num_threads())
        return learn(*given)

    monkeypatch.setattr(recorder, "episode", episode)
    before, images = torch.get_num_threads(), torch.rand(2, 1, 16, 16)
    torch.set_num_threads(2)
    try:
        adapter = Online(load("digits-resnet8-gn-joint"), copies=copies)
        adapter.predict(images)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {*used} == {expected}
