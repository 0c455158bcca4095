"""Run the tests that need more than `make test` installs, each after installing what it needs.

    python tests/extras/run.py [NAME ...]

A package that cannot be installed is named at the end and its tests are not run; a test that fails, fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Extra:
    """Some tests and what they need.

    Attributes:
        tests: Arguments of pytest.
        packages: From PyPI.
        program: A program of the system's.
        debian: The package of Debian's that has it.
    """

    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    program: str | None = None
    debian: str | None = None

    def missing(self) -> str | None:
        """Install what is needed; what cannot be had, or None."""
        if self.packages:
            command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
            if subprocess.run([sys.executable, *command, *self.packages], cwd=ROOT).returncode:
                return ", ".join(self.packages)
        if self.program is not None and shutil.which(self.program) is None:
            root = hasattr(os, "geteuid") and os.geteuid() == 0
            if root and self.debian and shutil.which("apt-get"):
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", self.debian]
                if subprocess.run(install, **quiet).returncode:  # type: ignore[call-overload]
                    subprocess.run(["apt-get", "update", "--quiet"], **quiet)  # type: ignore[call-overload]
                    subprocess.run(install, **quiet)  # type: ignore[call-overload]
            if shutil.which(self.program) is None:
                return self.program
        return None


EXTRAS = {
    "sanitizers": Extra(("tests/extras/test_sanitizers.py",)),
    "emulated CUDA": Extra(("tests/extras/test_emulated_kernels.py",)),
    "ray": Extra(("tests/extras/test_ray.py",), packages=("ray",)),
    "browser": Extra(
        ("tests/extras/test_browser.py",), packages=("playwright",), program="chromium", debian="chromium"
    ),
}


def main(names: list[str]) -> int:
    said, failed = [], False
    for name in names or EXTRAS:
        begin = time.monotonic()
        print(f"\n== {name} ==", flush=True)
        missing = EXTRAS[name].missing()
        if missing is not None:
            said.append(f"{name}: NOT RUN, {missing} cannot be installed here")
            continue
        command = [sys.executable, "-m", "pytest", "-q", "--no-skips", *EXTRAS[name].tests]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}).returncode
        failed |= code != 0
        said.append(f"{name}: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - begin:.0f} s")
    print("\n" + "\n".join(said))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
