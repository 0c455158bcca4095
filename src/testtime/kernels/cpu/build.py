"""Compile kernels.cpp with the system's C++ compiler, once, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
_PARTS = (SOURCE, *map(SOURCE.with_name, ("norm.h", "strided.h", "winograd.h")))
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_LIMIT = 120.0  # seconds for the compiler
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Norm(ctypes.Structure):
    """`struct Norm` of norm.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("weight", "bias")),
        ("stride", ctypes.c_int64),
        ("moments", _POINTER),
        *((name, _INT) for name in ("pixels", "channels", "groups")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_bool) for name in ("relu", "known")),
    ]


class Layer(ctypes.Structure):
    """`struct Layer` of kernels.cpp."""

    _fields_ = [("norm", Norm), ("w", _POINTER), ("stride", ctypes.c_int64)]


class Chain(ctypes.Structure):
    """`struct Chain` of kernels.cpp."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        *((name, _INT) for name in ("count", "lead", "replicas", "images", "height", "width", "channels", "threads")),
    ]


class Filters(ctypes.Structure):
    """`struct Filters` of strided.h."""

    _fields_ = [
        *((name, _INT) for name in ("replicas", "images", "height", "width", "inputs")),
        *((name, _INT) for name in ("rows", "columns", "outputs", "stride", "padding", "threads")),
        ("apart", ctypes.c_int64),
    ]


_ARGUMENTS = {
    "norm_forward": [ctypes.POINTER(Norm), *[_POINTER] * 2, *[_INT] * 3],
    "norm_backward": [ctypes.POINTER(Norm), *[_POINTER] * 4, *[_INT] * 3],
    "strided_forward": [ctypes.POINTER(Filters), *[_POINTER] * 3],
    "strided_backward": [ctypes.POINTER(Filters), *[_POINTER] * 3],
    "strided_filters": [ctypes.POINTER(Filters), *[_POINTER] * 3],
    "chain_forward": [ctypes.POINTER(Chain), *[_POINTER] * 4],
    "chain_backward": [ctypes.POINTER(Chain), *[_POINTER] * 7],
}


def available() -> bool:
    """Whether the kernels can be used on this machine; the first call may compile them."""
    return _loaded() is not None


def kernels() -> ctypes.CDLL:
    """Return the library of kernels.cpp."""
    library = _loaded()
    assert library is not None
    return library


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler found, using torch's layers; with one, adaptation is about twice as fast")
        return None
    deadline, folder = time.monotonic() + _LIMIT, cache_folder()
    fault: object = "there is no home folder" if folder is None else find_fault(folder)
    try:
        if folder is not None and not fault:
            try:
                return load(build(compiler, folder, deadline))
            except (OSError, RuntimeError) as error:  # the disk is full, or mounted noexec
                fault = error
        log.warning("cannot cache the CPU kernels: %s", fault)
        with tempfile.TemporaryDirectory(prefix="testtime-") as private:
            return load(build(compiler, Path(private), deadline))
    except (OSError, RuntimeError) as error:
        log.warning("cannot compile the CPU kernels, using torch's layers: %s", error)
        return None


def find_compiler() -> str | None:
    """Return the C++ compiler: `$CXX`, else the first of the usual names."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def cache_folder() -> Path | None:
    """Return the folder that caches compiled kernels, in the user's cache folder; None if there is no such folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # unset, or relative, which is invalid
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "testtime" / "kernels"


def find_fault(folder: Path) -> str | None:
    """Create a folder that only its owner can enter; return why code must not be loaded from it, or None.

    Anyone who can write to the folder, or rename one of its parents, could place code there that runs as this user.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if os.name != "posix":
            return None
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)
        for parent in (folder, *folder.parents):
            status = parent.stat()
            if status.st_uid not in (os.getuid(), 0):
                return f"{parent} belongs to another user"
            writable = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != os.getgid())
            if writable and not status.st_mode & stat.S_ISVTX:
                return f"{parent} is writable by others"
        if folder.stat().st_uid != os.getuid():
            return f"{folder} belongs to another user"
        if not os.access(folder, os.W_OK):
            return f"{folder} is not writable"
    except OSError as error:
        return str(error)
    return None


def build(compiler: str, folder: Path, deadline: float) -> Path:
    """Compile the kernels, unless they are cached for this source, compiler and processor.

    A cached library is used only if its hash is that of the compiled file; otherwise it is compiled again.

    Args:
        compiler: Path of the compiler.
        folder: The cache folder.
        deadline: When to give up, in the time of `time.monotonic`.

    Returns:
        Path of the library.

    Raises:
        RuntimeError: Compilation failed or timed out.
        OSError: The folder cannot be written.
    """
    # The predefined macros identify the compiler's version and the processor's instruction set.
    defines = _run([compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull], deadline)
    texts = [_FLAGS, defines, *(part.read_text(encoding="utf-8") for part in _PARTS)]
    key = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    for cached in sorted(folder.glob(f"{key}-*.so")):
        if _is_intact(cached):
            return cached
        log.warning("%s is damaged and will be compiled again", cached)
        cached.unlink()
    log.warning("compiling the CPU kernels, once per machine; this takes about ten seconds")
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as room:
        made = Path(room) / "kernels.so"
        _run([compiler, *_FLAGS, str(SOURCE), "-o", str(made)], deadline)
        made.chmod(0o700)
        return made.replace(folder / f"{key}-{_hash(made)}.so")


def _is_intact(library: Path) -> bool:
    """Whether a cached library is a regular file owned by this user whose name ends with its hash."""
    status = library.lstat()
    ours = os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISREG(status.st_mode) and ours and library.stem.endswith(_hash(library))


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def load(path: Path) -> ctypes.CDLL:
    """Load a compiled library and declare its functions."""
    library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is None:
            raise RuntimeError(f"{path} has no function {name}")
        function.argtypes, function.restype, function.errcheck = arguments, ctypes.c_bool, _check
    return library


def _check(enough: bool, *call: object) -> None:
    if not enough:
        raise MemoryError("not enough memory for the kernels of testtime.kernels.cpu")


def _run(command: list[str], deadline: float) -> str:
    """Run a program and return its output; it and its children are killed at the deadline, or on an interrupt."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(str(error)) from None
    try:
        output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not finish within {_LIMIT} seconds") from None
    finally:
        _end_group(process)
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
        raise RuntimeError(lines[0] if lines else f"{command[0]} failed with code {process.returncode}")
    return output


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads its own session, and its children, unless it has finished."""
    if process.poll() is None:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
