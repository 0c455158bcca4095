"""Build the sdist and the wheel, check them where users will install them, and say what to upload. Uploads nothing.

    python tools/release.py [PART ...] [--python 3.12] [-- PYTEST ARGUMENTS]

Parts, all of them by default, in this order:

    tree     the git tree is clean; the version and the changelog agree
    build    sdist and wheel in dist/; their metadata, contents and sizes
    lowest   the wheel on the lowest supported Python, with the lowest supported versions of its dependencies
    newest   the wheel on the newest supported Python, with the newest versions
    tests    the test suite, from the unpacked sdist against the wheel, on every supported Python found

Environments are made one after another in a temporary folder and removed. On Linux, pip installs a CUDA build of torch,
which runs on the CPU too: 8 GB of disk space for a while. Nothing but pip uses the network.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PARTS = ("tree", "build", "lowest", "newest", "tests")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = "cli,report,serve"
TEST_PACKAGES = ("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "httpx>=0.27")
WHEEL_LIMIT = 40e6  # bytes
GIGABYTES = 8
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
_IN_WHEEL = ("testtime/__init__.py", "testtime/py.typed", "testtime/weights/digits-resnet8-gn-joint.safetensors")
_IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py", "docs/generate/build.py")


class ReleaseError(Exception):
    """Something that must not be released."""


def read_version(root: Path = ROOT) -> str:
    """Return the version in pyproject.toml."""
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ReleaseError("pyproject.toml: there is no version")
    return found[1]


def read_lowest(root: Path = ROOT) -> list[str]:
    """Return the dependencies, also of the extras that are installed, at their lower bounds: `torch==2.6`, …."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    lines = [re.search(rf"^{name} = \[(.*)\]$", text, re.MULTILINE) for name in ("dependencies", *EXTRAS.split(","))]
    pairs = [re.findall(r'"([\w-]+)>=([\d.]+)(?:;[^"]*)?"', line[1]) for line in lines if line is not None]
    return [f"{name}=={bound}" for found in pairs for name, bound in found]


def check_tree(root: Path = ROOT) -> list[str]:
    """Check the git tree and the changelog; returns what is left to do before an upload."""
    status = subprocess.run(["git", "status", "--porcelain"], cwd=root, check=True, capture_output=True, text=True)
    if status.stdout:
        raise ReleaseError(f"the tree has changes that are not committed:\n{status.stdout.rstrip()}")
    return check_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), read_version(root))


def check_changelog(text: str, version: str) -> list[str]:
    """Check that a changelog begins with a version; returns what is left to do before an upload."""
    found = re.search(r"^## (\S+)(?: \((.*)\))?", text, re.MULTILINE)
    if found is None or found[1] != version:
        raise ReleaseError(f"CHANGELOG.md begins with {found and found[1]}, pyproject.toml says {version}")
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d", found[2] or "")
    return [] if dated else [f"put the date of the release into CHANGELOG.md: `## {version} (YYYY-MM-DD)`"]


def build() -> tuple[Path, Path]:
    """Build the sdist and, from it, the wheel; returns both after checking them."""
    with tempfile.TemporaryDirectory(prefix="testtime-build-") as folder:
        python = make_environment(sys.executable, Path(folder), ["build", "twine"])
        made = Path(folder) / "dist"
        run([python, "-m", "build", "--outdir", str(made), str(ROOT)], quiet=True)
        (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
        run([python, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
        check_wheel(wheel, read_version())
        check_sdist(sdist, wheel)
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        return Path(shutil.copy2(sdist, DIST)), Path(shutil.copy2(wheel, DIST))


def check_wheel(wheel: Path, version: str) -> None:
    """Check contents, size and metadata of a wheel."""
    size = wheel.stat().st_size
    if size > WHEEL_LIMIT:
        raise ReleaseError(f"{wheel.name} has {size / 1e6:.1f} MB; the limit is {WHEEL_LIMIT / 1e6:.0f} MB")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    info = about.partition("/")[0]
    foreign = sorted(name for name in names if name.split("/")[0] not in ("testtime", info))
    caches = sorted(name for name in names if "__pycache__" in name or name.endswith((".pyc", ".so")))
    missing = sorted(set(_IN_WHEEL) - names)
    if foreign or caches or missing:
        raise ReleaseError(f"{wheel.name}: foreign {foreign[:3]}, compiled {caches[:3]}, missing {missing}")
    if metadata["Version"] != version or metadata["Requires-Python"] != f">={PYTHONS[0]}":
        raise ReleaseError(f"{wheel.name}: version {metadata['Version']}, Python {metadata['Requires-Python']}")
    print(f"{wheel.name}: {len(names)} files, {size / 1e6:.1f} MB")


def check_sdist(sdist: Path, wheel: Path) -> None:
    """Check that an sdist has the sources of the wheel and what the tests read, and nothing git ignores."""
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(wheel) as packed:
        sources = {f"src/{name}" for name in packed.namelist() if name.startswith("testtime/")}
    missing = sorted((set(_IN_SDIST) | sources) - files)
    ignored = sorted(name for name in files if name.startswith((".venv", "dist/", "demo/", ".git/")))
    if missing or ignored:
        raise ReleaseError(f"{sdist.name}: missing {missing[:3]}, must not have {ignored[:3]}")
    print(f"{sdist.name}: {len(files)} files, {sdist.stat().st_size / 1e6:.1f} MB")


def find_pythons(wanted: Sequence[str] = ()) -> dict[str, str]:
    """Return the interpreters found, in the path or among pyenv's: version → program."""
    found = {}
    for version in wanted or PYTHONS:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
        for program in filter(None, candidates):
            ask = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(ask, capture_output=True, text=True)  # a shim of pyenv's may not run
            if answer.stdout.strip() == version:
                found[version] = program
                break
    return found


def make_environment(python: str, folder: Path, packages: Sequence[str]) -> str:
    """Make a virtual environment in a folder and install packages; returns its interpreter."""
    run([python, "-m", "venv", str(folder / "venv")])
    made = str(folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    run([made, *_PIP, *packages])
    return made


@contextmanager
def environment(python: str, packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the interpreter of a clean environment with packages, and an empty folder; both are removed afterwards."""
    free = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    if free < GIGABYTES:
        raise ReleaseError(f"an environment needs {GIGABYTES} GB, {free:.1f} GB are free")
    with tempfile.TemporaryDirectory(prefix="testtime-release-") as name:
        folder = Path(name) / "work"
        folder.mkdir()
        yield make_environment(python, Path(name), packages), folder


def smoke(python: str, packages: Sequence[str]) -> None:
    """Install packages and try them as a user would, outside the source tree."""
    with environment(python, packages) as (made, folder):
        run([made, str(ROOT / "tools/smoke.py"), read_version()], cwd=folder)


def test(python: str, sdist: Path, wheel: Path, arguments: Sequence[str]) -> None:
    """Run the tests of the sdist against the wheel. Only Python 3.11 has constraints."""
    with environment(python, [f"{wheel}[{EXTRAS}]", *TEST_PACKAGES]) as (made, folder):
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = folder.iterdir()
        shutil.rmtree(tree / "src")  # so that nothing but the wheel can be imported
        chosen = list(arguments) or ["-n", "2", "--dist", "worksteal", "-m", "not slow"]
        run([made, "-m", "pytest", "-q", *chosen], cwd=tree)


def run(command: Sequence[str], cwd: Path = ROOT, quiet: bool = False) -> None:
    """Run a program without our own packages in its path; its failure is one of the release."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    output = subprocess.DEVNULL if quiet else None
    code = subprocess.run(command, cwd=cwd, env=inherited, stdout=output).returncode
    if code:
        raise ReleaseError(f"`{' '.join(command)}` failed with code {code}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, prog="release.py")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--skip-tests", action="store_true", help="all parts but `tests`")
    parser.add_argument(
        "--python", action="append", choices=PYTHONS, metavar="VERSION", help="only this Python; may be repeated"
    )
    given, rest = list(sys.argv[1:] if arguments is None else arguments), []
    if "--" in given:
        given, rest = given[: given.index("--")], given[given.index("--") + 1 :]
    options = parser.parse_args(given)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    parts = options.parts or PARTS
    options.parts = [part for part in PARTS if part in parts and not (options.skip_tests and part == "tests")]
    options.pytest = rest
    return options


def find_built() -> tuple[Path, Path]:
    """Return the sdist and the wheel of this version in dist/."""
    version = read_version()
    found = [*DIST.glob(f"testtime-{version}.tar.gz"), *DIST.glob(f"testtime-{version}-*.whl")]
    if len(found) != 2:
        raise ReleaseError(f"dist/ has no build of version {version}: run the part `build` first")
    return found[0], found[1]


def release(options: argparse.Namespace, report: list[str]) -> list[str]:
    """Run the parts; adds a line a part to the report, and returns what is left to do."""
    left: list[str] = []
    failed: list[str] = []
    pythons = find_pythons(options.python or ())
    missing = sorted(set(options.python or PYTHONS) - set(pythons))
    if not pythons:
        raise ReleaseError(f"there is no Python {' or '.join(missing)}")

    def note(part: str, begin: float) -> None:
        report.append(f"{part}: passed in {time.monotonic() - begin:.0f} s")
        print(f"== {report[-1]}", flush=True)

    begin = time.monotonic()
    if "tree" in options.parts:
        left = check_tree()
        note("tree", begin)
    if "build" in options.parts:
        begin = time.monotonic()
        build()
        note("build", begin)
    sdist, wheel = find_built() if set(options.parts) - {"tree", "build"} else (None, None)
    first, *_, last = (*pythons, *pythons)
    for part, version, pins in (("lowest", first, read_lowest()), ("newest", last, [])):
        if part in options.parts:
            begin = time.monotonic()
            smoke(pythons[version], [f"{wheel}[{EXTRAS}]", *pins])
            note(f"{part} on Python {version}" + (f" with {', '.join(pins)}" if pins else ""), begin)
    if "tests" in options.parts and sdist is not None and wheel is not None:
        for version, program in pythons.items():
            begin = time.monotonic()
            try:
                test(program, sdist, wheel, options.pytest)
                note(f"tests on Python {version}", begin)
            except ReleaseError as error:  # the other interpreters are tested all the same
                failed.append(f"tests on Python {version}: {error}")
        if failed:
            raise ReleaseError("; ".join(failed))
        left += [f"run the tests on Python {version}, which was not found here" for version in missing]
    return left + [f"run the part `{part}`" for part in PARTS if part not in options.parts]


def main(arguments: Sequence[str] | None = None) -> int:
    options, report = parse(arguments), []
    try:
        left = release(options, report)
    except ReleaseError as error:
        print("\n".join(report))
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    print("\n" + "\n".join(report))
    if left:
        print("left to do:\n" + "\n".join(f"  {one}" for one in left))
        return 0
    print("upload these two files, and tag the commit:")
    for file in find_built():
        print(f"  {file.relative_to(ROOT)}")
    print(f"  git tag -a v{read_version()} -m 'testtime {read_version()}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
