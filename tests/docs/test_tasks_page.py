"""docs/tasks.md: it names every task."""

from __future__ import annotations

from pathlib import Path

from testtime import tasks

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")


def test_the_table_has_every_task_and_its_outputs() -> None:
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "| `" in line]
    found = {row[0].lower(): row[3] for row in rows}
    assert found.keys() == tasks.TASKS.keys()
    for name, outputs in found.items():
        assert outputs == str(tasks.make(name).outputs or "a decoder")
