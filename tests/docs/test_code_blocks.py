"""Every code block of the documents: Python is run, commands are parsed and, where marked, run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from code_blocks import PAGES, ROOT, is_run, is_slow, read_blocks, run_page
from testtime.cli.commands import app
from testtime.evaluation import make_plan
from testtime.networks.sources import open_network

BLOCKS = [block for page in (ROOT / "README.md", *PAGES) for block in read_blocks(page)]
OTHERS = {"cd", "curl", "docker", "export", "git", "make", "pip", "python", "source", "torchrun"}
"""Programs other than ours that the documents may call."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUN = [pytest.param(page, marks=[pytest.mark.slow] * is_slow(page), id=name(page)) for page in PAGES if is_run(page)]


@pytest.mark.filterwarnings("ignore:The method 'tent' needs several images")
@pytest.mark.parametrize("page", RUN)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_the_documented_file_of_a_model_opens(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "python" and block.code.startswith("# model.py\n")]
    (tmp_path / "model.py").write_text(block.code, encoding="utf-8")
    net = open_network(f"{tmp_path / 'model.py'}:make", branch=True)
    assert (net.card.size, len(net.card.mean), net.ssl is None) == (32, 3, False)


def test_no_block_is_left_out() -> None:
    """Each is in a language that some test checks; fences inside lists or quotes would be overlooked."""
    languages = {"python", "sh", "text", "bibtex", "toml"}
    unknown = [(name(block.page), block.language) for block in BLOCKS if block.language not in languages]
    assert [(page, language) for page, language in unknown if not language.startswith("{")] == []
    for page in (ROOT / "README.md", *PAGES):
        fences = len(re.findall(r"^\s*(?:> *)?```", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert fences == 2 * len(read_blocks(page)), page


def test_studies_can_be_planned(tmp_path: Path) -> None:
    texts = [block.code for block in BLOCKS if block.language == "toml"]
    assert texts
    for text in texts:
        (tmp_path / "study.toml").write_text(text)
        plan = make_plan(tmp_path / "study.toml", checkpoint="digits-resnet8-gn-joint")
        assert len(plan.methods) == text.count("[methods.")


def test_blocks_that_run_elsewhere_do() -> None:
    elsewhere = [block for block in BLOCKS if block.is_elsewhere]
    assert any(block.mark == "models" for block in elsewhere)
    for block in elsewhere:
        test = "tests/extras/test_documented_models.py" if block.mark == "models" else block.mark
        assert block.page.name in (ROOT / str(test)).read_text(encoding="utf-8"), block


def find_commands() -> list[tuple[str, list[str]]]:
    found = [(name(block.page), words) for block in BLOCKS if block.language == "sh" for words in block.commands()]
    for page in PAGES:
        lines = re.findall(r"\| `(testtime .*?)` \|", page.read_text(encoding="utf-8"))
        found += [(name(page), shlex.split(line)) for line in lines]
    return found


@pytest.mark.parametrize("page", sorted({page for page, _ in find_commands()}))
def test_commands_can_be_parsed(page: str) -> None:
    group: Any = typer.main.get_command(app)
    for words in (words for own, words in find_commands() if own == page):
        if words[0] == "torchrun":
            words = ["testtime", *words[words.index("testtime") + 1 :]]
        if words[0] != "testtime":
            check_other(words)
            continue
        command, arguments = group, words[1:]
        while hasattr(command, "commands") and not arguments[0].startswith("-"):
            title, *arguments = arguments
            command = command.commands[title]
        if "--help" not in arguments and "--version" not in arguments:
            command.make_context("testtime", arguments)  # parses, and runs nothing


def check_other(words: list[str]) -> None:
    """A command of another program names what exists here."""
    assert words[0] in OTHERS, words
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), words
    if words[0] == "python" and words[1] != "-m":
        assert (ROOT / words[1]).exists(), words
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
        known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(re.search(rf"^{extra} = ", known, re.MULTILINE) for each in extras for extra in each.split(",")), (
            words
        )
