"""The seam: every kernel in the table exists and is offered work, all can be turned off, nobody goes around it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testtime import kernels
from testtime.kernels import Kernel

PACKAGE = Path(kernels.__file__).parent.parent
KERNELS = PACKAGE / "kernels"
ROWS = [(*key, kernel) for key, rows in kernels.TABLE.items() for kernel in rows]
MAY_ASK = {
    "adaptation/inputs.py": {"cuda"},  # moves tensors
    "cli/console.py": {"cuda"},  # chooses a device
    "doctor.py": {"cuda"},  # names the device
    "precision.py": {"cuda"},  # sets what torch computes with
    "provenance.py": {"cuda"},  # names the device
    "serve/ray.py": {"cuda"},  # asks Ray for GPUs
    "training/processes.py": {"cuda"},  # gives each process a device
}


@functools.cache
def modules(folder: Path) -> dict[str, ast.Module]:
    """The syntax trees of the package's modules below a folder, by their paths in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }


def outside() -> dict[str, ast.Module]:
    return {path: tree for path, tree in modules(PACKAGE).items() if not path.startswith("kernels/")}


def imports(tree: ast.Module) -> set[str]:
    """Everything that a module imports anywhere, in full: `from a import b` is `a.b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def find_definition(code: str) -> ast.FunctionDef:
    """The function of a row of the table, from its source: where triton is missing it cannot be imported."""
    module, _, name = code.partition(":")
    path = KERNELS.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name)
    if isinstance(found, ast.FunctionDef):
        return found
    return next(n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")


@pytest.mark.parametrize("operation", sorted({operation for operation, _ in kernels.TABLE}))
def test_kernels_of_an_operation_exist_and_take_the_same(operation: str) -> None:
    taken = []
    for name, _, kernel in ROWS:
        if name == operation:
            arguments = find_definition(kernel.code).args
            names = [argument.arg for argument in arguments.args if argument.arg != "self"]
            assert not arguments.kwonlyargs
            taken.append(names[: len(names) - len(arguments.defaults)])
    assert len({len(names) for names in taken}) == 1, taken


def test_every_operation_is_offered_and_every_offer_has_a_kernel() -> None:
    offers = re.compile(r"kernels\.(?:take_over|find)\(\s*\"(\w+)\"")
    texts = [(PACKAGE / path).read_text(encoding="utf-8") for path in outside()]
    assert {name for text in texts for name in offers.findall(text)} == {operation for operation, _ in kernels.TABLE}


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false", "no"])
def test_everything_can_be_turned_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def works() -> bool:
        asked.append(word)
        return True

    monkeypatch.setattr(kernels, "_load", lambda code: code)
    for operation, device, kernel in ROWS:
        row = Kernel(kernel.code, lambda *_: True, works)
        monkeypatch.setitem(kernels.TABLE, (operation, device), (row,))
        tensor = SimpleNamespace(device=SimpleNamespace(type=device))
        monkeypatch.setenv("TESTTIME_KERNELS", "on")
        assert kernels.find(operation, tensor) == kernel.code
        asked.clear()
        monkeypatch.setenv("TESTTIME_KERNELS", word)
        assert kernels.find(operation, tensor) is None
        assert kernels.take_over(operation, tensor) is None
        assert not asked  # not even whether it could be compiled
    assert not kernels.enabled()
    monkeypatch.delenv("TESTTIME_KERNELS")
    assert kernels.enabled()


def test_the_first_kernel_that_fits_and_works_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTTIME_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_load", lambda code: lambda *arguments: (code, *arguments))
    rows = [("small", lambda x, n: n < 3, True), ("broken", lambda x, n: True, False), ("any", lambda x, n: True, True)]
    table = tuple(Kernel(code, fits, lambda works=works: works) for code, fits, works in rows)
    monkeypatch.setitem(kernels.TABLE, ("count", "cpu"), table)
    x = torch.zeros(1)
    assert kernels.take_over("count", x, 2) == ("small", x, 2)
    assert kernels.take_over("count", x, 5) == ("any", x, 5)
    assert kernels.take_over("something else", x, 2) is None
    assert kernels.take_over("count", x.to("meta"), 2) is None


def find_questions(tree: ast.Module) -> set[str]:
    """What in a module asks for CUDA, Triton or a compiler."""
    found = {name for name in imports(tree) if name.startswith(("triton", "torch.utils.cpp_extension"))}
    for node in ast.walk(tree):
        name: Any = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in ("is_cuda", "is_cpu", "has_triton", "cpp_extension"):
            found.add(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"(cuda|triton)\b", node.value):
            found.add(node.value)
    return found


def test_nobody_else_asks_for_cuda_or_triton() -> None:
    asking = {path: questions for path, tree in outside().items() if (questions := find_questions(tree))}
    assert all(questions <= MAY_ASK.get(path, set()) for path, questions in asking.items()), asking


@pytest.mark.parametrize("room", ["cpu", "cuda"])
def test_nothing_but_its_rows_would_miss_a_folder_of_kernels(room: str) -> None:
    name = f"testtime.kernels.{room}"
    for path, tree in modules(PACKAGE).items():
        if not path.startswith(f"kernels/{room}/"):
            assert not any(one == name or one.startswith(f"{name}.") for one in imports(tree)), path


def test_kernels_import_nothing_else_of_the_package() -> None:
    for path, tree in modules(KERNELS).items():
        ours = {name for name in imports(tree) if name.partition(".")[0] == "testtime"}
        assert all(name.startswith("testtime.kernels") for name in ours), path


def test_tuning_is_that_of_the_device() -> None:
    cpu, cuda = (kernels.tuning(torch.device(name)) for name in ("cpu", "cuda:1"))
    assert (cpu.waits, cuda.waits) == (False, True)
    assert kernels.tuning(torch.device("mps")) == cpu
    assert list(cpu.parallel) == sorted(cpu.parallel)
    assert kernels.possibly_any(torch.tensor([False, True]))
    assert not kernels.possibly_any(torch.tensor([False, False]))


def test_training_uses_replicas_where_kernels_make_them_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("TESTTIME_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_has_compiler", lambda: True)
    assert kernels.trains_faster(cpu, 64, True)
    assert not kernels.trains_faster(cpu, 512, True)
    assert not kernels.trains_faster(cpu, 64, False)
    assert kernels.trains_faster(cuda, 512, False)
    monkeypatch.setattr(kernels, "_has_compiler", lambda: False)
    assert not kernels.trains_faster(cpu, 64, True)
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert not kernels.trains_faster(cuda, 512, False)
