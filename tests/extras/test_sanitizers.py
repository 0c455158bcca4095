"""The compiled code of the package under AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testtime.kernels.cpu import build

CASES = 500


def runtime(name: str) -> str:
    """A library of the compiler's own."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found.strip()


def test_kernels_for_the_cpu(tmp_path: Path) -> None:
    libraries = " ".join(runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so"))
    environment = os.environ | {
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python keeps memory until its end
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    script = Path(__file__).with_name("sanitized_kernels.py")
    done = subprocess.run([sys.executable, script, str(CASES)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "runtime error" not in done.stderr
    assert done.stdout.split()[-1] == str(CASES)
