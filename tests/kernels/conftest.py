"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testtime.kernels.cpu import build


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if nothing had been compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TESTTIME_KERNELS", raising=False)
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()
