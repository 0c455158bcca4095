"""The command line: arguments in, library calls, results out. No logic lives here.

Every command imports what it needs inside itself, so that `testtime --help` does not wait for torch. A command lets
exceptions pass: `main` turns them into one line on standard error and an exit code (2 for bad arguments, 1 for what
failed, 130 for Ctrl-C); `TESTTIME_DEBUG=1` shows the stack instead. Long work reports through `progress`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Protocol

try:
    import rich  # noqa: F401  (progress and help need it; better to know now)
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: the command line needs {missing.name}: pip install 'testtime[cli]'") from None

app = typer.Typer(
    name="testtime",
    help="Test-Time Training: a vision model that learns, without labels, from each image it is about to classify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; ends the process with the exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and say what went wrong, if anything, in one line.

    Args:
        arguments: What follows the program's name.

    Returns:
        The exit code.
    """
    try:
        code = app(args=arguments or ["--help"], prog_name="testtime", standalone_mode=False)
        if code == 130:
            print("stopped", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output went away; Python must not try to flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("TESTTIME_DEBUG"):
            raise
        usage = getattr(error, "format_message", None)  # what typer raises for bad arguments
        if usage is not None:
            text, context = usage(), getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context is not None else ""
            print(f"error: {_one_line(text)}{hint}", file=sys.stderr)
            return 2
        print(f"error: {_one_line(str(error) or type(error).__name__)}", file=sys.stderr)
        return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def as_bad_arguments() -> Iterator[None]:
    """Let a `ValueError` raised while arguments are checked count as a bad argument: exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class Report(Protocol):
    """What `progress` yields; it fits every progress callback of the library."""

    def __call__(self, done: int, total: int, text: str = "", /) -> None:
        """Say that `done` of `total` things are done, with a word on how it goes."""
        ...


@contextlib.contextmanager
def progress(title: str, every: float = 10.0) -> Iterator[Report]:
    """Show how far some work is, at which rate, and the time left, on standard error.

    A terminal gets a live bar; a pipe gets a plain line now and then.

    Args:
        title: What is going on.
        every: Seconds between two lines in a pipe.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        clock = _Clock()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=None, rate="", text="")

            def show(done: int, total: int, text: str = "", /) -> None:
                rate, _ = clock.measure(done, total)
                bar.update(task, completed=done, total=total, rate=rate, text=text)

            yield show
        return

    clock, last = _Clock(), time.monotonic()

    def write(done: int, total: int, text: str = "", /) -> None:
        nonlocal last
        rate, left = clock.measure(done, total)
        if done < total and time.monotonic() - last < every:
            return
        last = time.monotonic()
        parts = [title, f"{done:,}/{total:,}", rate, left, text]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    yield write


class _Clock:
    """Rate and time left since the first report; a resumed run does not start from zero."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def measure(self, done: int, total: int) -> tuple[str, str]:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        seconds, count = now - self.first[0], done - self.first[1]
        if seconds <= 0 or count <= 0:
            return "", ""
        rate = count / seconds
        left = f"{_duration((total - done) / rate)} left" if done < total else f"in {_duration(seconds)}"
        return (f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"), left


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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


data_app = typer.Typer(help="Data sets: what there is, where it is, getting and checking it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

_DATA_ROOT = typer.Option(
    None, "--data-root", help="Folder of the data sets; else TESTTIME_DATA, else the user's cache folder."
)


@data_app.command("list")
def list_data(data_root: str | None = _DATA_ROOT) -> None:
    """List the known data sets: what they are, where they are looked for, and whether they are there."""
    from testtime import data

    for found in data.describe_all(data_root):
        typer.echo(f"{found.name:17} {found.state:11} {found.what}")
        if found.place is not None:
            typer.echo(f"{'':29} {found.place}")
        if found.detail:
            typer.echo(f"{'':29} {found.detail}")


@data_app.command("get")
def get_data(
    name: str = typer.Argument(help="cifar10, cifar10-c or cifar10.1."), data_root: str | None = _DATA_ROOT
) -> None:
    """Download a data set from its official place; a transfer that broke off goes on."""
    from testtime import data
    from testtime.data.download import remotes

    with as_bad_arguments():
        remotes(name, data_root)
    with progress(f"bytes of {name}") as report:
        place = data.get(name, data_root, report)
    typer.echo(f"{name} is in {place}")


@data_app.command("check")
def check_data(
    name: str = typer.Argument(help="A data set, or a part of one such as imagenet-c/fog/5."),
    data_root: str | None = _DATA_ROOT,
) -> None:
    """Read a data set through and name every fault; exit code 1 if there are any."""
    from testtime import data

    with as_bad_arguments(), progress(f"checking {name}") as report:
        faults = data.check(name, data_root, report)
    for fault in faults:
        typer.echo(fault)
    if faults:
        raise typer.Exit(1)
    typer.echo(f"{name} is sound")
