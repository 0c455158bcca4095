"""`make release`: what it reads, finds and refuses. Builds and environments are its own business."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[2]

METADATA = "Metadata-Version: 2.4\nName: testtime\nVersion: 1.0\nRequires-Python: >=3.10\n"
SOUND = {**dict.fromkeys(release._IN_WHEEL, ""), "testtime-1.0.dist-info/METADATA": METADATA}


def make_wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "testtime-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def make_sdist(folder: Path, files: list[str]) -> Path:
    path = folder / "testtime-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in files:
            archive.addfile(tarfile.TarInfo(f"testtime-1.0/{name}"), io.BytesIO())
    return path


def test_lower_bounds_are_those_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        'version = "1.0"\ndependencies = ["torch>=2.6", "numpy>=1.26"]\n'
        'cli = ["typer>=0.19", "tomli>=2; python_version < \'3.11\'"]\nray = ["ray>=2"]\n'
    )
    assert release.read_lowest(tmp_path) == ["torch==2.6", "numpy==1.26", "typer==0.19", "tomli==2"]
    assert release.read_version(tmp_path) == "1.0"
    ours = [name.split("==")[0] for name in release.read_lowest()]
    assert {"torch", "numpy", "pillow", "safetensors", "typer", "matplotlib", "fastapi"} <= set(ours)


def test_the_changelog_must_begin_with_the_version() -> None:
    assert release.check_changelog("# Changelog\n\n## 1.0 (2027-01-31)\n\n## 0.9 (2026-01-01)\n", "1.0") == []
    (left,) = release.check_changelog("## 1.0 (unreleased)\n", "1.0")
    assert "date" in left
    for text in ("## 0.9 (2026-01-01)\n\n## 1.0\n", "no versions"):
        with pytest.raises(release.ReleaseError, match=r"CHANGELOG\.md"):
            release.check_changelog(text, "1.0")


def test_changes_that_are_not_committed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('version = "1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.0 (2027-01-31)\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert release.check_tree(tmp_path) == []
    (tmp_path / "new.py").touch()
    with pytest.raises(release.ReleaseError, match=r"new\.py"):
        release.check_tree(tmp_path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tests/test_a.py": ""}, r"tests/test_a\.py"),
        ({"docs/generate/build.py": ""}, r"docs/generate"),
        ({"testtime/__pycache__/a.pyc": ""}, "pycache"),
        ({"testtime-1.0.dist-info/METADATA": METADATA.replace("1.0", "1.1")}, r"version 1\.1"),
        ({"testtime-1.0.dist-info/METADATA": METADATA.replace("3.10", "3.9")}, r"3\.9"),
    ],
)
def test_a_wheel_with_a_fault_is_refused(changes: dict[str, str], fault: str, tmp_path: Path) -> None:
    release.check_wheel(make_wheel(tmp_path, SOUND), "1.0")
    with pytest.raises(release.ReleaseError, match=fault):
        release.check_wheel(make_wheel(tmp_path, SOUND | changes), "1.0")


def test_a_wheel_without_weights_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(release.ReleaseError, match="safetensors"):
        release.check_wheel(make_wheel(tmp_path, {n: t for n, t in SOUND.items() if "weights" not in n}), "1.0")
    monkeypatch.setattr(release, "WHEEL_LIMIT", 10)
    with pytest.raises(release.ReleaseError, match="MB"):
        release.check_wheel(make_wheel(tmp_path, SOUND), "1.0")


def test_an_sdist_has_the_sources_of_the_wheel_and_nothing_ignored(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, SOUND)
    whole = [*release._IN_SDIST, *(f"src/{name}" for name in release._IN_WHEEL)]
    release.check_sdist(make_sdist(tmp_path, whole), wheel)
    for files, fault in ((whole[:-1], "missing"), ([*whole, ".venv/bin/python"], "venv")):
        with pytest.raises(release.ReleaseError, match=fault):
            release.check_sdist(make_sdist(tmp_path, files), wheel)


def test_interpreters_are_found_in_the_path_and_under_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for place, answer in (("bin/python3.12", "false"), ("versions/3.12.1/bin/python", "3.12"), ("bin/python3.13", "")):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        body = f"echo {answer}" if answer != "false" else "exit 127"  # a shim of pyenv's that does not run
        (tmp_path / place).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / place).chmod(0o755)
    assert release.find_pythons() == {"3.12": str(tmp_path / "versions/3.12.1/bin/python")}
    assert release.find_pythons(["3.13"]) == {}


def test_parts_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.parse([]).parts == list(release.PARTS)
    assert release.parse(["--skip-tests"]).parts == list(release.PARTS[:-1])
    chosen = release.parse(["tests", "build", "--python", "3.12", "--", "-n", "1", "tests/cli"])
    assert (chosen.parts, chosen.python, chosen.pytest) == (["build", "tests"], ["3.12"], ["-n", "1", "tests/cli"])
    for wrong in (["upload"], ["--python", "3.9"]):
        with pytest.raises(SystemExit):
            release.parse(wrong)
    assert "upload" in capsys.readouterr().err


def test_workflow_citation_and_release_agree_with_the_project() -> None:
    workflow = (ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"python: \[(.*)\]", workflow)
    assert tuple(re.findall(r"[\d.]+", listed)) == release.PYTHONS
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [release.read_version()]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={release.PYTHONS[0]}"' in project
    (dev,) = re.findall(r"^dev = \[(.*)\]$", project, re.MULTILINE)
    assert set(release.TEST_PACKAGES) <= set(re.findall(r'"([^"]+)"', dev))
