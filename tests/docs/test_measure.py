"""The commands of results/measure.py are commands of this version."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import typer

from testtime.cli.commands import app
from testtime.evaluation.method_specs import find_spec

SCRIPT = Path(__file__).parents[2] / "results/measure.py"


def test_every_step_can_be_run() -> None:
    specification = importlib.util.spec_from_file_location("measure", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    measure: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(measure)
    commands: Any = typer.main.get_command(app)
    for name in measure.list_steps():
        command, *arguments = shlex.split(measure.command(name))
        given = commands.commands[command].make_context(command, arguments).params  # parses, and runs nothing
        for method in (given.get("methods") or "").split(","):
            known = {"", "plain", "alp", "uda", "fast", "below-20%", "fixed-mirrored"}  # of networks and studies
            assert method in known or find_spec(method) is not None, f"{name}: {method}"
