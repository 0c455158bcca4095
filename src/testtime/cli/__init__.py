"""The command line: arguments in, library calls, results out. No logic lives here.

One file a command; commands.py puts them together, options.py has the options they share. A command imports what it
needs inside its function, so that help and bad arguments are answered before torch is imported, and one command works
where another's extras are missing. Exceptions pass through a command: `run` turns them into one line on standard error
and an exit code (2 for bad arguments, 1 for failures, 130 for Ctrl-C); `TESTTIME_DEBUG=1` shows the stack instead.
"""

from __future__ import annotations

import io
import os
import sys

from testtime.cli.interrupt import INTERRUPTED, report_interrupt, run_process, was_interrupted

__all__ = ["main", "run"]


def main() -> None:
    """Run the command line; ends the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Windows may write cp1252, which has no arrow
    run_process(lambda: run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; report what went wrong, if anything, in one line.

    Args:
        arguments: The words after the program's name.

    Returns:
        The exit code.
    """
    try:
        code = _call(arguments)
        sys.stdout.flush()
        return report_interrupt() if code == INTERRUPTED else code
    except KeyboardInterrupt:
        return report_interrupt()
    except BrokenPipeError:
        # The reader of the output went away; Python must not try to flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("TESTTIME_DEBUG"):
            raise
        if was_interrupted(error):
            return report_interrupt()
        return _report_error(error)


def _call(arguments: list[str]) -> int:
    try:
        import rich  # noqa: F401  (help and progress need it)
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        message = f"the command line needs {missing.name}: pip install 'testtime[cli]'"
        raise ModuleNotFoundError(message, name=missing.name) from None
    from testtime.cli.commands import app

    code = app(args=arguments or ["--help"], prog_name="testtime", standalone_mode=False, obj=arguments)
    return code if isinstance(code, int) else 0


def _report_error(error: Exception) -> int:
    from testtime.storage import printable

    usage = getattr(error, "format_message", None)  # typer's exceptions for bad arguments have it
    text, context = usage() if usage is not None else str(error), getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    print(f"error: {printable(text or type(error).__name__)}{hint}", file=sys.stderr)
    return 1 if usage is None else 2
