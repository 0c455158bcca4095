"""Run the tests that need more than `make test` installs, each after installing what it needs.

    python tests/extras/run.py [NAME ...]

A package that cannot be installed is named at the end and its tests are not run; a test that fails, fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EXTRAS_FOLDER = Path(__file__).parent
ROOT = EXTRAS_FOLDER.parent.parent


@dataclass(frozen=True)
class Extra:
    """Some tests and what they need.

    Attributes:
        tests: Arguments of pytest.
        packages: From PyPI.
        apart: Whether the packages go to a folder of their own, since the package runs otherwise where they are.
        program: A program of the system's.
        debian: The package of Debian's that has it.
        environment: Variables to set.
    """

    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    apart: bool = False
    program: str | None = None
    debian: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def install(self, folder: str) -> str | None:
        """Install what is needed; what cannot be had, or None.

        Args:
            folder: For packages that go to a folder of their own.
        """
        if self.packages:
            command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
            command += ["--no-deps", "--target", folder] if self.apart else []
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

    def run(self, folder: str) -> bool:
        """Run the tests; whether all passed. None may be skipped."""
        paths = [folder, str(EXTRAS_FOLDER), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | self.environment
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no_skips", *self.tests]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


TRITON_TESTS = [f"tests/kernels/{path.name}" for path in sorted((ROOT / "tests/kernels").glob("test_cuda_*.py"))]
EXTRAS = {
    "kernels off": Extra(("-n", "2", "tests/contracts"), environment={"TESTTIME_KERNELS": "off"}),
    "sanitizers": Extra(("tests/extras/test_sanitizers.py",)),
    "emulated CUDA": Extra(("tests/extras/test_emulated_kernels.py",)),
    "interpreted Triton": Extra(
        ("-n", "2", *TRITON_TESTS),
        packages=("triton==3.9.0",),
        apart=True,
        environment={"TRITON_INTERPRET": "1"},
    ),
    "LaTeX": Extra(("tests/extras/test_latex.py",), program="pdflatex", debian="texlive-latex-recommended"),
    "ray": Extra(("tests/extras/test_ray.py",), packages=("ray",), environment={"RAY_USAGE_STATS_ENABLED": "0"}),
    "browser": Extra(
        ("tests/extras/test_browser.py",), packages=("playwright",), program="chromium", debian="chromium"
    ),
}


def main(names: list[str]) -> int:
    report, failed = [], False
    for name in names or EXTRAS:
        begin, extra = time.monotonic(), EXTRAS[name]
        print(f"\n== {name} ==", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            missing = extra.install(folder)
            if missing is not None:
                report.append(f"{name}: NOT RUN, {missing} cannot be installed here")
                continue
            passed = extra.run(folder)
        failed |= not passed
        report.append(f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - begin:.0f} s")
    print("\n" + "\n".join(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
