"""The command line: parses arguments, calls the library, prints results.

One file per command; commands.py assembles them, options.py has shared options. Commands import inside their functions,
so that help and argument errors do not wait for torch, and a command works without the extras of the others. `run`
converts exceptions to one line on standard error and an exit code (2 for bad arguments, 1 for failures, 130 for
Ctrl-C); with `TESTTIME_DEBUG=1` the traceback is shown instead. A warning is one line, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator

from testtime.cli.interrupt import INTERRUPTED, report_interrupt, run_process, was_interrupted
from testtime.heap import reuse_memory

__all__ = ["main", "run"]


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # cp1252 on Windows lacks some characters
    reuse_memory()
    run_process(lambda: run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; errors are reported in one line.

    Args:
        arguments: The command-line arguments, without the program name.

    Returns:
        The exit code.
    """
    try:
        with _one_line_warnings():
            code = _call(arguments)
        sys.stdout.flush()
        return report_interrupt(arguments) if code == INTERRUPTED else code
    except KeyboardInterrupt:
        return report_interrupt(arguments)
    except BrokenPipeError:
        # The reader closed the pipe; Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("TESTTIME_DEBUG"):
            raise
        if was_interrupted(error):
            return report_interrupt(arguments)
        return _report_error(error)


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print each warning once, without its source line."""
    from testtime.storage import printable

    shown: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = printable(str(message))
        if text not in shown:
            shown.add(text)
            print(f"warning: {text}", file=sys.stderr)

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


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

    usage = getattr(error, "format_message", None)  # of typer's exceptions for bad arguments
    text, context = usage() if usage is not None else str(error), getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    print(f"error: {printable(text or type(error).__name__)}{hint}", file=sys.stderr)
    return 1 if usage is None else 2
