"""Freed memory is reused."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from testtime.heap import reuse_memory
reused = reuse_memory() if "reuse" in sys.argv else False
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    bytearray(64 * 1024**2)  # freed at once
print(reused, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
OWN = {"MALLOC_TOP_PAD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}


def count_faults(*arguments: str, **variables: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    call = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(call, env=clean | variables, capture_output=True, text=True, check=True)
    reused, faults = done.stdout.split()
    return reused == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_pages_of_freed_blocks_are_not_asked_for_again() -> None:
    _, usual = count_faults()
    reused, faults = count_faults("reuse")
    assert reused
    assert faults < usual / 4


@pytest.mark.parametrize("name", OWN)
def test_settings_of_the_user_are_left_alone(name: str) -> None:
    assert not count_faults("reuse", **{name: OWN[name]})[0]


def test_without_the_gnu_library_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from testtime import heap

    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not heap.reuse_memory()
    monkeypatch.setattr("sys.platform", "darwin")
    assert not heap.reuse_memory()
