"""The commands as one typer application."""

from __future__ import annotations

from typing import Annotated

import typer

from testtime.cli import (
    correlate,
    corrupt,
    data,
    demo,
    diagnose,
    doctor,
    eval,
    fit_branch,
    gradients,
    info,
    methods,
    pack,
    predict,
    report,
    serve,
    train,
    tune,
)
from testtime.cli.flags import Command, Group, RayCommand

app = typer.Typer(
    name="testtime",
    cls=Group,
    help="Test-Time Training: a vision model that learns, without labels, from each image it is about to classify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train.train, predict.predict, info.info, methods.methods):
    app.command(cls=Command)(command)
app.command("eval", cls=RayCommand)(eval.evaluate)
app.command(cls=Command)(tune.tune)
app.command("fit-branch", cls=Command)(fit_branch.fit_branch)
for command in (report.report, diagnose.diagnose, gradients.gradients, correlate.correlate, corrupt.corrupt, demo.demo):
    app.command(cls=Command)(command)
app.command(cls=RayCommand)(serve.serve)
for command in (serve.send, pack.pack, pack.unpack, doctor.doctor):
    app.command(cls=Command)(command)
app.add_typer(data.app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        from testtime import __version__

        typer.echo(f"testtime {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
