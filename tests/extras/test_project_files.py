"""The files that GitHub and others read, against their published schemas, which check-jsonschema contains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    "github-workflows": sorted((ROOT / ".github/workflows").glob("*.yml")),
    "github-issue-forms": sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")),
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_their_schema(schema: str, tmp_path: Path) -> None:
    files = SCHEMAS[schema]
    assert files
    found = check(schema, *files)
    assert found.returncode == 0, found.stdout + found.stderr
    wrong = tmp_path / files[0].name
    wrong.write_text(files[0].read_text(encoding="utf-8") + "\nunknown_key: 1\n", encoding="utf-8")
    assert check(schema, wrong).returncode == 1


def test_hooks_are_programs_of_the_project() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith("entry:")]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert entries
    for entry in entries:
        folder, _, program = entry.split()[0].rpartition("/")
        assert folder == ".venv/bin"
        assert f'"{program}' in project  # a dependency of dev
