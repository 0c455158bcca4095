"""`testtime serve` before it serves: what it refuses, in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from testtime.serve.server import listen

NET = ("-c", "digits-resnet8-gn-joint", "--device", "cpu")


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (("--host", "0.0.0.0"), 2, "needs a token"),
        (("--method", "unknown"), 2, "`method` must be one of"),
        (("--slots", "0"), 2, "--slots"),
        (("--ttl", "-1"), 2, "`ttl` must be a positive number"),
        (("--on-collapse", "panic"), 2, "--on-collapse"),
        (("--method", "rotta", "--no-image-memory"), 2, "stores recent images"),
        (("--method", "best", "--no-image-memory"), 2, "'best' stores recent images"),
        (("--token-file", "none"), 1, "none: no such file"),
        (("-c", "unknown"), 1, "unknown"),
    ],
)
def test_what_is_refused(run: Run, tmp_path: Path, given: Any, code: int, said: str) -> None:
    arguments = ("serve", *NET, "--state", tmp_path / "state", "--port", 0, *given)
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_short_token_is_refused_and_not_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    code, _, err = run("serve", *NET, "--state", tmp_path / "state", "--token-file", tmp_path / "token")
    assert (code, "at least 16" in err, "secret" in err) == (2, True, False)


def test_a_port_in_use_is_an_error(run: Run, tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("serve", *NET, "--state", tmp_path, "--port", port)
    assert (code, f"cannot listen on 127.0.0.1:{port}" in err) == (1, True)


def test_a_missing_package_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("testtime.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = run("serve", *NET, "--state", tmp_path)
    assert code == 1
    assert "the service needs uvicorn: pip install 'testtime[serve]'" in err


def test_an_address_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("send", "127.0.0.1", tmp_path, "--stream", "a")
    assert (code, "`url` must be like" in err) == (2, True)


def test_several_replicas_need_ray(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")  # set by the command; restored at the end
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run("serve", *NET, "--state", tmp_path / "state", "--ray", "--replicas", 2)
    assert code == 1
    assert "Several replicas need Ray Serve" in err
    assert "pip install 'testtime[ray]'" in err
    assert not (tmp_path / "state").exists()


def test_the_demo_has_one_process(run: Run) -> None:
    code, _, err = run("serve", "--demo", "--ray")
    assert (code, "one process" in err) == (2, True)
