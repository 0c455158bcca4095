"""The reference of the command line and of the public names, made from the code while the site is built."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

import testtime
from testtime import _MODULE_OF
from testtime.cli.commands import app

_NAMES = re.compile(r"<!-- api: (.*?) -->", re.DOTALL)
_COMMANDS = "<!-- commands -->"


def fill_reference(page: str) -> str:
    """A page in which the marks `<!-- commands -->` and `<!-- api: NAME, … -->` are replaced."""
    page = page.replace(_COMMANDS, format_commands()) if _COMMANDS in page else page
    return _NAMES.sub(lambda found: format_names(_split(found[1])), page)


def find_names(page: str) -> list[str]:
    """The public names that a page documents."""
    return [name for found in _NAMES.finditer(page) for name in _split(found[1])]


def format_names(names: list[str]) -> str:
    """Directives of autodoc for public names of the package."""
    return "\n\n".join(f"```{{eval-rst}}\n{_direct(name)}\n```" for name in names)


def _direct(name: str) -> str:
    value = getattr(testtime, name)
    if inspect.ismodule(value):  # without what has a section of its own
        return f".. automodule:: testtime.{name}\n   :exclude-members: {', '.join(testtime.__all__)}"
    if value is testtime.Adapter:  # what adapters have in common is shown here, and only here
        return f".. autoclass:: testtime.{name}\n   :inherited-members: Module"
    if inspect.isclass(value):
        return f".. auto{'exception' if issubclass(value, Exception) else 'class'}:: testtime.{name}"
    if callable(value):
        return f".. autofunction:: testtime.{name}"
    from sphinx.pycode import ModuleAnalyzer  # pyright: ignore[reportMissingImports]  # tests read this without Sphinx

    about = ModuleAnalyzer.for_module(f"testtime.{_MODULE_OF[name]}").find_attr_docs()["", name]
    return "\n   ".join([f".. py:data:: testtime.{name}\n", *about])


def list_commands() -> dict[str, Any]:
    """The commands by their full names, e.g. `data get`, in the order of the help."""
    return dict(_walk(typer.main.get_command(app), ""))


def format_commands() -> str:
    """A section for each command: its usage, its help, its examples and all its options."""
    return "\n\n".join(_format_command(name, command) for name, command in list_commands().items())


def _walk(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _walk(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _format_command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"testtime {name}")
    text, *examples = re.split(r"^Examples?:\n", inspect.cleandoc(command.help or ""), flags=re.MULTILINE)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## testtime {name}", _mark_options(text.strip()), f"```sh\ntesttime {name} {usage}\n```"]
    parts += [f"Examples:\n\n```sh\n{textwrap.dedent(lines).strip()}\n```" for lines in examples]
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        record = None if parameter.hidden else parameter.get_help_record(context)
        if record is not None:
            signature, about = record
            panels.setdefault(parameter.rich_help_panel or "", []).append(f"- `{signature}`: {_escape(about)}")
    for panel, lines in panels.items():
        parts.append(f"**{panel or 'Arguments and options'}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _escape(text: str) -> str:
    return _mark_options(re.sub(r"([<>*_\[\]|$])", r"\\\1", text))


def _mark_options(text: str) -> str:
    return re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", text)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]
