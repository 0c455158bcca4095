"""Compiling the C++ kernels: once, stored where nobody else can write, and never a reason to fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from testtime.kernels import Convolution, cpu
from testtime.kernels.cpu import build
from testtime.networks import resnet26
from testtime.networks.replicas import PARTS, Replicas
from testtime.randomness import Draws

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")


def answers() -> Tensor:
    net, images = resnet26(depth=8, size=8, seed=1).eval(), Draws.of(0, torch.arange(6)).uniform(3, 8, 8)
    return Replicas(net, 2, PARTS, images)(images.unflatten(0, (2, 3)))


def cached_libraries() -> list[Path]:
    folder = build.cache_folder()
    assert folder is not None
    return sorted(folder.iterdir())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Functions of the kernels' names that do nothing, which compile in no time."""
    source = tmp_path / "nothing.cpp"
    functions = [f'extern "C" bool {name}() {{ return true; }}\n' for name in build._ARGUMENTS]
    source.write_text("".join(functions))
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "_PARTS", (source,))


def works() -> bool:
    layer = Convolution(torch.zeros(1, 16, 16, 3, 3))
    return cpu.convolve_chain(torch.ones(1, 16, 2, 2), [layer]).shape == (1, 16, 2, 2)


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
def test_kernels_are_compiled_once_and_stored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "testtime.kernels.cpu"):
        assert build.available()
        assert len(caplog.records) == 1
        (stored,) = cached_libraries()
        made = stored.stat().st_mtime_ns
        build._loaded.cache_clear()
        assert build.available()
        assert len(caplog.records) == 1
    assert [(path, path.stat().st_mtime_ns) for path in cached_libraries()] == [(stored, made)]


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "one byte": lambda content: content[:1],
    "empty": lambda content: b"",
    "a flipped bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "another library": lambda content: content.replace(b"chain_forward", b"chain_forwarx"),
}


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_never_loaded_and_compiled_again_once(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.available()
    (stored,) = cached_libraries()
    whole = stored.read_bytes()
    stored.unlink()  # not written over: this process has it in its memory
    stored.write_bytes(DAMAGE[damage](whole))
    stored.chmod(0o700)
    for compilations in (1, 0):
        build._loaded.cache_clear()
        caplog.clear()
        assert build.available()
        assert works()
        assert sum(record.message.startswith("compiling") for record in caplog.records) == compilations
    assert [path.read_bytes() for path in cached_libraries()] == [whole]


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
@pytest.mark.parametrize("weakness", ["folder", "folder above", "file", "link", "owner", "owner of the file"])
def test_code_that_others_could_have_planted_is_not_loaded(
    weakness: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.available()
    (stored,) = cached_libraries()
    loaded: list[Path] = []
    load = build.load
    monkeypatch.setattr(build, "load", lambda path: (loaded.append(path), load(path))[1])
    if weakness == "folder":  # it is ours, so it is closed again, but a file in it may be anybody's
        stored.parent.chmod(0o777)
        stored.chmod(0o777)
    elif weakness == "folder above":
        stored.parent.parent.parent.chmod(0o777)
    elif weakness == "file":
        stored.chmod(0o722)
    elif weakness == "link":
        stored.rename(tmp_path / "elsewhere.so")
        stored.symlink_to(tmp_path / "elsewhere.so")
    else:
        place = stored.parent if weakness == "owner" else stored
        stat, lstat = Path.stat, Path.lstat

        def foreign(real: Any) -> Any:
            def status(path: Path, **options: Any) -> Any:
                found = real(path, **options)
                return found if path != place else os.stat_result((*found[:4], 12345, *found[5:]))

            return status

        monkeypatch.setattr(Path, "stat", foreign(stat))
        monkeypatch.setattr(Path, "lstat", foreign(lstat))
    build._loaded.cache_clear()
    caplog.clear()
    assert build.available()
    assert works()
    (used,) = loaded
    if weakness in ("folder above", "owner"):
        assert stored.parent not in used.parents
        assert str(stored.parent.parent.parent if weakness == "folder above" else stored.parent) in caplog.text
    else:
        assert used == stored
        assert "compiling" in caplog.text  # anew: this is not what lay there
    assert build.cache_folder().stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("fresh")
def test_a_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("cache", "./cache", "../cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert build.cache_folder() == tmp_path / ".cache" / "testtime" / "kernels"


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
@pytest.mark.parametrize("stage", ["defines", "compiling"])
def test_a_compiler_that_hangs_is_ended_with_its_children(
    stage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, child = tmp_path / "hanging-c++", tmp_path / "child"
    waits = f"sleep 600 & echo $! > {child}; wait"
    hanging.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) {waits if stage == "defines" else "exit 0"};; esac\n{waits}\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(build, "_LIMIT", 1.5)
    begin = time.monotonic()
    assert not build.available()
    assert time.monotonic() - begin < 20  # of which it waits for 1.5; the rest is for a busy machine
    assert hanging.name in caplog.text
    for _ in range(100):  # until whoever adopts it has noticed
        if not Path(f"/proc/{child.read_text().strip()}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler's child goes on")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
@pytest.mark.parametrize("place", ["a file", "a full disk", "nowhere"])
def test_without_a_place_to_store_them_kernels_are_compiled_all_the_same(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = Path(os.environ["XDG_CACHE_HOME"])
    if place == "a file":
        cache.write_text("a file where a folder should be")
    elif place == "a full disk":
        full = tmp_path / "full-c++"
        excuse = "echo 'ld: final link failed: No space left on device' >&2; exit 1"
        full.write_text(f'#!/bin/sh\ncase "$*" in *"-o {cache}"*) {excuse};; esac\nexec {build.find_compiler()} "$@"\n')
        full.chmod(0o755)
        monkeypatch.setenv("CXX", str(full))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    assert build.available()
    assert works()


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """The answers of the kernels, compiled before a test has a cache of its own."""
    build._loaded.cache_clear()
    return answers()


@pytest.mark.parametrize("how", ["asked", "no compiler", "failing compiler"])
def test_without_kernels_torch_answers(
    expected: Tensor, fresh: None, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if how == "asked":
        monkeypatch.setenv("TESTTIME_KERNELS", "off")
    elif how == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    else:
        failing = tmp_path / "failing-c++"
        failing.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such luck' >&2\nexit 1\n")
        failing.chmod(0o755)
        monkeypatch.setenv("CXX", str(failing))
    with caplog.at_level(logging.INFO, "testtime.kernels.cpu"):
        caplog.clear()
        assert torch.allclose(answers(), expected, atol=1e-5)
    if how == "asked":
        assert not caplog.messages
        assert build._loaded.cache_info().currsize == 0  # nobody asked for a compiler
    else:
        assert not build.available()
        assert ("no C++ compiler" if how == "no compiler" else "no such luck") in caplog.messages[-1]
        assert all("\n" not in line for line in caplog.messages)


@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("source", ["nothing", pytest.param("kernels", marks=pytest.mark.slow)])
def test_processes_that_begin_at_once_do_not_spoil_each_other(source: str, request: pytest.FixtureRequest) -> None:
    if source == "nothing":
        request.getfixturevalue("quick")
    parts = [str(part) for part in build._PARTS]
    code = f"""from pathlib import Path
from testtime.kernels.cpu import build
build.SOURCE, build._PARTS = Path({str(build.SOURCE)!r}), [Path(part) for part in {parts}]
raise SystemExit(not build.available())"""
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert [path.suffix for path in cached_libraries()] == [".so"]
