"""Run the tests that take longer, or need more, than `make test`, each after installing what it needs.

    python tests/extras/run.py [NAME ...]

Tests whose packages cannot be installed are not run; they are listed at the end. A test that fails, fails.
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
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True)
class Venv:
    """A virtual environment apart from `.venv`, for packages that need another version of torch.

    Attributes:
        name: Its folder, in the root of the repository; it remains for later runs.
        packages: From PyPI, the latest versions.
        gigabytes: Free disk space needed to install them.
    """

    name: str
    packages: tuple[str, ...]
    gigabytes: int

    @property
    def python(self) -> str:
        return str(ROOT / self.name / "bin" / "python")

    def install(self) -> str | None:
        """Install the packages and, editable, this one, unless done before; returns why that failed, or None."""
        done, packages = ROOT / self.name / ".installed", "\n".join(self.packages)
        if done.exists() and done.read_text() == packages:
            return None
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < self.gigabytes:
            return f"{self.name} needs {self.gigabytes} GB of disk space, {free:.1f} GB are free"
        steps = (
            (sys.executable, "-m", "venv", self.name),
            (self.python, *PIP, *self.packages),
            (self.python, *PIP, "--no-deps", "--editable", "."),
        )
        if any(subprocess.run(step, cwd=ROOT).returncode for step in steps):
            return f"{', '.join(self.packages)} cannot be installed in {self.name}"
        done.write_text(packages)
        return None


@dataclass(frozen=True)
class Extra:
    """Some tests and what they need.

    Attributes:
        tests: Arguments of pytest.
        packages: From PyPI.
        apart: Whether the packages go to a folder of their own, since the package runs otherwise where they are.
        venv: The environment to run in, if not the current one.
        program: A program of the system's.
        debian: The package of Debian's that has it.
        environment: Variables to set.
    """

    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    apart: bool = False
    venv: Venv | None = None
    program: str | None = None
    debian: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def install(self, folder: str) -> str | None:
        """Install what is needed; returns why that failed, or None.

        Args:
            folder: For packages that go to a folder of their own.
        """
        if self.packages:
            command = [*PIP, "-c", "constraints.txt", *(("--no-deps", "--target", folder) if self.apart else ())]
            if subprocess.run([sys.executable, *command, *self.packages], cwd=ROOT).returncode:
                return f"{', '.join(self.packages)} cannot be installed here"
        if self.program is not None and shutil.which(self.program) is None:
            root = hasattr(os, "geteuid") and os.geteuid() == 0
            if root and self.debian and shutil.which("apt-get"):
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", self.debian]
                if subprocess.run(install, **quiet).returncode:  # type: ignore[call-overload]
                    subprocess.run(["apt-get", "update", "--quiet"], **quiet)  # type: ignore[call-overload]
                    subprocess.run(install, **quiet)  # type: ignore[call-overload]
            if shutil.which(self.program) is None:
                return f"{self.program} cannot be installed here"
        return None if self.venv is None else self.venv.install()

    def run(self, folder: str) -> bool:
        """Run the tests; returns whether all passed. None may be skipped."""
        paths = [folder, str(EXTRAS_FOLDER), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | self.environment
        python = sys.executable if self.venv is None else self.venv.python
        command = [python, "-m", "pytest", "-q", "-p", "no_skips", *self.tests]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


TRITON_TESTS = [f"tests/kernels/{path.name}" for path in sorted((ROOT / "tests/kernels").glob("test_cuda_*.py"))]
MODELS = Venv(
    ".venv-models",
    ("torch", "torchvision", "timm", "transformers", "pytest", "pytest-xdist", "hypothesis", "safetensors", "pillow"),
    gigabytes=8,
)
EXTRAS = {
    "slow": Extra(("-n", "2", "-m", "slow and not gpu")),
    "models": Extra(("-n", "2", "tests/extras/test_models.py", "tests/extras/test_model_sources.py"), venv=MODELS),
    "documented models": Extra(("tests/extras/test_documented_models.py",), venv=MODELS),
    "notebooks": Extra(("tests/extras/test_notebooks.py",), packages=("nbclient", "ipykernel")),
    "site": Extra(
        ("tests/extras/test_site.py",),
        packages=("sphinx", "myst-parser", "furo", "playwright"),
        program="chromium",
        debian="chromium",
    ),
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
    "ray": Extra(
        ("tests/extras/test_ray.py", "tests/extras/test_ray_serve.py"),
        packages=("ray[serve]",),
        environment={"RAY_USAGE_STATS_ENABLED": "0"},
    ),
    "integrations": Extra(
        ("tests/extras/test_integrations.py",),
        packages=("torchmetrics", "lightning", "tensorboard", "huggingface_hub", "onnx", "onnxscript", "onnxruntime"),
    ),
    "project files": Extra(("tests/extras/test_project_files.py",), packages=("check-jsonschema",)),
    "schemathesis": Extra(("tests/extras/test_schemathesis.py",), packages=("schemathesis",)),
    "browser": Extra(
        ("tests/extras/test_browser.py", "tests/extras/test_serve_page.py"),
        packages=("playwright",),
        program="chromium",
        debian="chromium",
    ),
}


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(EXTRAS))
    if unknown:
        print(f"There are no tests {unknown[0]!r}; there are {', '.join(EXTRAS)}.", file=sys.stderr)
        return 2
    report, failed = [], False
    for name in names or EXTRAS:
        begin, extra = time.monotonic(), EXTRAS[name]
        print(f"\n== {name} ==", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            fault = extra.install(folder)
            if fault is not None:
                report.append(f"{name}: NOT RUN, {fault}")
                continue
            passed = extra.run(folder)
        failed |= not passed
        report.append(f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - begin:.0f} s")
    print("\n" + "\n".join(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
