"""The command line: arguments in, library calls, results out. No logic lives here.

Every command imports what it needs inside itself, so that one works where another's extras are missing. A command lets
exceptions pass: `main` turns them into one line on standard error and an exit code (2 for bad arguments, 1 for what
failed, 130 for Ctrl-C); `TESTTIME_DEBUG=1` shows the stack instead. Long work reports through `progress`.
"""

from __future__ import annotations

import io
import os
import sys

try:
    import rich  # noqa: F401  (progress and help need it; better to know now)
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: the command line needs {missing.name}: pip install 'testtime[cli]'") from None

from testtime.cli import corrupt, data, demo, diagnose, evaluate, networks
from testtime.cli.console import progress
from testtime.ending import INTERRUPTED, run_process, tell_stopped, was_interrupted
from testtime.storage import printable

__all__ = ["app", "main", "progress", "run"]

app = typer.Typer(
    name="testtime",
    help="Test-Time Training: a vision model that learns, without labels, from each image it is about to classify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (networks.train, networks.predict, networks.info):
    app.command()(command)
app.command("eval", cls=evaluate.EvaluateCommand)(evaluate.evaluate)
app.command()(evaluate.report)
for command in (diagnose.diagnose, diagnose.correlate):
    app.command()(command)
app.command()(corrupt.corrupt)
app.command()(demo.demo)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line; ends the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where Windows writes cp1252, an arrow must not cost the answer
    run_process(lambda: run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and say what went wrong, if anything, in one line.

    Args:
        arguments: What follows the program's name.

    Returns:
        The exit code.
    """
    try:
        code = app(args=arguments or ["--help"], prog_name="testtime", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
        if code == INTERRUPTED:
            return tell_stopped()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return tell_stopped()
    except BrokenPipeError:
        # The reader of the output went away; Python must not try to flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("TESTTIME_DEBUG"):
            raise
        if was_interrupted(error):
            return tell_stopped()
        usage = getattr(error, "format_message", None)  # what typer raises for bad arguments
        if usage is not None:
            text, context = usage(), getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context is not None else ""
            print(f"error: {printable(text)}{hint}", file=sys.stderr)
            return 2
        print(f"error: {printable(str(error) or type(error).__name__)}", file=sys.stderr)
        return 1


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"testtime {version('testtime')}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass
