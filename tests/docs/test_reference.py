"""The reference pages: every public name and every command with all its options, made from the code."""

from __future__ import annotations

import re
from pathlib import Path

from generate.reference import fill_reference, find_names, format_commands, list_commands

import testtime as tt

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def test_every_public_name_has_its_place() -> None:
    names = [name for page in REFERENCE.glob("*.md") for name in find_names(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(set(tt.__all__) - {"__version__"})


def test_every_command_is_there_with_its_options() -> None:
    page = fill_reference((REFERENCE / "cli.md").read_text(encoding="utf-8"))
    assert "<!-- commands -->" not in page
    commands = list_commands()
    assert {"train", "eval", "serve", "data get"} <= commands.keys()
    sections = dict(re.findall(r"^## testtime (.+?)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        for parameter in command.params:
            if not parameter.hidden:
                assert all(option in sections[name] for option in parameter.opts if option.startswith("--")), name


def test_text_of_the_help_is_not_markup() -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", format_commands(), flags=re.DOTALL)
    assert re.findall(r"(?<!\\)[<\[]", text) == []


def test_names_become_directives() -> None:
    filled = fill_reference("<!-- api: Online, load,\nFileError -->")
    assert [line for line in filled.splitlines() if line.startswith("..")] == [
        ".. autoclass:: testtime.Online",
        ".. autofunction:: testtime.load",
        ".. autoexception:: testtime.FileError",
    ]
