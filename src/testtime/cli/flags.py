"""Commands whose flags have no type in the help (`--json`, not `--json <bool>`), and whose `--ray` may have a value."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types(super().get_params(ctx))


class RayCommand(Command):
    """A command whose `--ray` takes an optional value, "local" by default."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        whole: list[str] = []
        for index, word in enumerate(args):
            whole.append(word)
            if word == "--ray" and (index + 1 == len(args) or args[index + 1].startswith("-")):
                whole.append("local")
        return super().parse_args(ctx, whole)


class Group(TyperGroup):
    """A group of commands whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types(super().get_params(ctx))


def _hide_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
