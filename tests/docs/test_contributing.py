"""CONTRIBUTING.md: its recipes run, and are short; its rooms are those of the package. Links of the project's files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_rooms import ROOMS
from testtime import METHODS, tasks
from testtime.data.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (Add .*?)\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
TABLES: dict[str, dict] = {"Add a method": METHODS, "Add a task": tasks.TASKS, "Add a data set": FAMILIES}


@pytest.fixture
def unchanged_tables() -> Iterator[None]:
    copies = [(table, dict(table)) for table in TABLES.values()]
    yield
    for table, copy in copies:
        table.clear()
        table.update(copy)


@pytest.mark.usefixtures("unchanged_tables")
@pytest.mark.parametrize("title", TABLES)
def test_a_recipe_runs_and_adds_one_entry(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(TABLES[title])
    exec(compile(RECIPES[title], "CONTRIBUTING.md", "exec"), {})
    assert len(TABLES[title]) == before + 1
    assert capsys.readouterr().out.strip()


def test_recipes_are_short() -> None:
    assert RECIPES.keys() == TABLES.keys()
    for title, code in RECIPES.items():
        lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from", "print"))]
        assert len(lines) <= 12, title


def test_the_rooms_exist() -> None:
    table = PAGE.split("## The rooms")[1].split("\n## ")[0]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named <= set(ROOMS)
    assert set(ROOMS) - named == {"tensorfile", "provenance", "progress", "bundle", "__main__"}  # under "…"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [to for to in re.findall(r"\]\(([^)#]+)", text) if "://" not in to and not (ROOT / to).exists()] == []
