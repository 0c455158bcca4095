"""The floor plan: each room imports only from rooms above it, also inside functions; no module imports itself again."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import testtime

ROOT = Path(testtime.__file__).parent
ROOMS = (
    "threads", "heap", "kernels", "randomness", "precision", "storage", "checks", "tensorfile", "provenance",
    "progress", "bundle", "augment", "tasks", "corruptions", "data", "networks", "adaptation", "training", "evaluation",
    "diagnosis", "report", "serve", "demo", "quick_demo", "doctor", "integrations", "cli", "__main__",
)  # fmt: skip
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def read_imports(name: str, path: Path) -> Iterator[str]:
    """The modules of ours that a file's import statements name, wherever they stand."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "testtime")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            assert node.module is not None
            if node.module.split(".")[0] != "testtime":
                continue
            for alias in node.names:
                if alias.name == "__version__":
                    continue
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


IMPORTS = {name: set(read_imports(name, path)) for name, path in MODULES.items() if name != "testtime"}


def room(module: str) -> int:
    return ROOMS.index(module.split(".")[1])


def test_every_room_is_in_the_plan() -> None:
    assert {name.split(".")[1] for name in IMPORTS} == set(ROOMS)


@pytest.mark.parametrize("name", IMPORTS)
def test_a_room_imports_only_from_rooms_above_it(name: str) -> None:
    for other in IMPORTS[name]:
        assert other in MODULES
        assert other != "testtime", f"{name} imports a public name from the package's own front door"
        assert room(other) <= room(name), f"{name} imports {other}"


def test_no_module_leads_back_to_itself() -> None:
    own = {name: {other for other in found if other != name} for name, found in IMPORTS.items()}
    list(graphlib.TopologicalSorter(own).static_order())  # raises CycleError


def test_no_public_function_shares_the_dotted_name_of_a_module() -> None:
    for name in testtime.__all__:
        if f"testtime.{name}" in MODULES:
            assert getattr(testtime, name).__name__ == f"testtime.{name}", name
    assert [name for name in dir(testtime) if name.startswith("_")] == ["__version__"]


def test_kernels_are_known_by_their_seam_alone() -> None:
    for name, found in IMPORTS.items():
        if not name.startswith("testtime.kernels"):
            assert {other for other in found if other.startswith("testtime.kernels")} <= {
                "testtime.kernels",
                "testtime.kernels.graphs",
            }, name


def test_every_public_name_is_declared_for_type_checkers_too() -> None:
    source = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = (node for node in source.body if isinstance(node, ast.If))
    statements = [node for node in ast.walk(checked) if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname or alias.name for node in statements for alias in node.names}
    assert declared == set(testtime.__all__) - {"__version__"}
    for name in testtime.__all__:
        assert getattr(testtime, name) is not None
