"""Compile kernels.cpp with the machine's C++ compiler, once, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from testtime.storage import whole_file

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
_PARTS = (SOURCE, *map(SOURCE.with_name, ("norm.h", "strided.h", "winograd.h")))
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_LIMIT = 120  # seconds for the compiler
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Norm(ctypes.Structure):
    """`struct Norm` of norm.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("weight", "bias")),
        ("stride", ctypes.c_int64),
        ("moments", _POINTER),
        *((name, _INT) for name in ("pixels", "channels", "groups")),
        ("eps", ctypes.c_float),
        ("relu", ctypes.c_bool),
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
    """Whether the kernels can be used here; the first call may have to compile them."""
    return os.environ.get("TESTTIME_COMPILE") != "0" and _loaded() is not None


def kernels() -> ctypes.CDLL:
    """The functions of kernels.cpp."""
    library = _loaded()
    assert library is not None
    return library


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler is here, so torch's own layers are used; with one, learning is about twice as fast")
        return None
    try:
        try:
            return load(build(compiler, cache_folder()))
        except (OSError, RuntimeError):  # there is no such folder, it is full, or nothing can be run from there
            with tempfile.TemporaryDirectory(prefix="testtime-") as folder:
                return load(build(compiler, Path(folder)))
    except (OSError, RuntimeError) as error:
        log.info("%s cannot be compiled, so torch's own layers are used: %s", SOURCE.name, error)
        return None


def find_compiler() -> str | None:
    """The C++ compiler: `$CXX`, else the first of the usual names."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `testtime` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "testtime" / "kernels"


def build(compiler: str, folder: Path) -> Path:
    """Compile the kernels, unless that was done before for this source, compiler and processor.

    Args:
        compiler: The compiler's path.
        folder: Where to keep the result.

    Returns:
        The library's file.

    Raises:
        RuntimeError: They do not compile.
        OSError: The folder cannot be written.
    """
    # What the compiler defines names its version and every instruction that the processor has.
    defines = _run([compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    texts = [_FLAGS, defines, *(part.read_text(encoding="utf-8") for part in _PARTS)]
    key = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    path = folder / f"{key}.so"
    if path.exists():
        return path
    begin = time.perf_counter()
    with whole_file(path) as temporary:
        _run([compiler, *_FLAGS, str(SOURCE), "-o", str(temporary)])
    log.info("compiled %s in %.1f s; kept as %s", SOURCE.name, time.perf_counter() - begin, path)
    return path


def load(path: Path) -> ctypes.CDLL:
    """The compiled functions, with the types of their arguments."""
    library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = arguments, ctypes.c_bool, _check
    return library


def _check(enough: bool, *call: object) -> None:
    if not enough:
        raise MemoryError("there is not enough memory for the kernels of testtime.cpu")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise RuntimeError(lines[0] if lines else f"{command[0]} ended with code {done.returncode}")
    return done.stdout
