"""The notebooks run from the first cell to the last, and show that learning helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
CHECKS = {
    "your-model": 'assert errors["Online"] < errors["Fixed"] - 0.1, errors',
    "drifting-stream": 'assert sum(wrong["online"]) < 0.7 * sum(wrong["fixed"]), wrong',
}


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells; the first that fails raises."""
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.ipynb")))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    execute(notebook, tmp_path)


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, tmp_path)
