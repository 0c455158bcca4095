"""Shared by the commands: argument errors, output, progress, the choice of a device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from testtime.progress import Progress
from testtime.storage import printable

if TYPE_CHECKING:
    from testtime.networks import YNet

_WIDE = 90  # columns of a terminal, from which a progress bar fits
# Options that do not affect the results.
_MACHINE = ("out", "device", "jobs", "ray", "together", "cache", "data_root")


def name_folder(command: str, options: Mapping[str, Any]) -> Path:
    """Return the default folder of a run; it depends on the options only, so that repeating a command resumes."""
    given = {name: str(value) for name, value in options.items() if name not in _MACHINE and value is not None}
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    return Path("runs", f"{command}-{digest[:8]}")


@contextlib.contextmanager
def as_bad_arguments(*passing: type[Exception]) -> Iterator[None]:
    """Convert a `ValueError` to a usage error, exit code 2.

    Args:
        *passing: Subclasses of `ValueError` to let through, e.g. `DataError`.
    """
    try:
        yield
    except passing:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def format_command(context: typer.Context) -> str:
    """Return the command line, for records."""
    return shlex.join(["testtime", *context.obj])


def echo(*lines: str, err: bool = False) -> None:
    """Print lines; control characters, including line breaks, are escaped.

    Args:
        *lines: The lines. Runs of spaces are preserved.
        err: Whether to print to standard error.
    """
    for line in lines:
        typer.echo(re.sub(r"[^ ]+", lambda word: printable(word[0]), line), err=err)


def report_skipped(lines: Iterable[str]) -> None:
    """Print a line for each unreadable file that was left out."""
    for line in dict.fromkeys(lines):
        echo(f"left out: {line}", err=True)


@contextlib.contextmanager
def progress(title: str, every: float = 10.0, percent: bool = False) -> Iterator[Progress]:
    """Show progress, rate and remaining time on standard error: a progress bar, or lines if it is not a terminal.

    Args:
        title: The title.
        every: Seconds between lines.
        percent: Show a percentage instead of counts, which mean little to a user if they are of unequal things.
    """
    title = printable(title)
    if sys.stderr.isatty():
        from rich import progress as bars
        from rich.console import Console
        from rich.table import Column

        console = Console(stderr=True)
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # cut first, on a narrow terminal
        wide = console.width >= _WIDE
        columns = (
            bars.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            *([bars.BarColumn(20)] if wide else []),
            bars.TaskProgressColumn() if percent else bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *([bars.TextColumn("{task.fields[rate]}")] if wide and not percent else []),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[text]}", markup=False, table_column=rest),
        )
        clock = _Clock()
        with bars.Progress(*columns, console=console, expand=True) as bar:
            task = bar.add_task(title, total=None, rate="", text="")

            def show(done: int, total: int, text: str) -> None:
                rate, _ = clock.measure(done, total)
                bar.update(task, completed=done, total=total, rate=rate, text=printable(text))

            yield show
        return

    clock, last = _Clock(), time.monotonic()

    def write(done: int, total: int, text: str) -> None:
        nonlocal last
        rate, left = clock.measure(done, total)
        if done < max(total, 1) and time.monotonic() - last < every:
            return
        last = time.monotonic()
        counts = [f"{done / max(total, 1):.0%}"] if percent else [f"{done:,}/{total:,}", rate]
        parts = [title, *counts, left, printable(text)]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    yield write


class _Clock:
    """Rate and remaining time since the first call, which may not be at zero in a resumed run; a new total restarts."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None
        self.total = 0

    def measure(self, done: int, total: int) -> tuple[str, str]:
        now = time.monotonic()
        if self.first is None or total != self.total:
            self.first, self.total = (now, done), total
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


def pick_device(name: str) -> str:
    """Return the device of a `--device` option; one that cannot be used is a usage error."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise typer.BadParameter(f"cannot use {name!r}: {reason}", param_hint="--device") from None
    return name


def load_network(checkpoint: str | None, device: str, silent: bool = False) -> tuple[str, YNet]:
    """Load the network of a `--checkpoint` option, by default a bundled one; returns its name and the network."""
    from testtime.evaluation.predict_files import default_network
    from testtime.networks import load

    name = checkpoint or default_network()
    net = load(name).to(device)
    if checkpoint is None and not silent:
        echo(f"network: {name} (choose another with --checkpoint)", err=True)
    return name, net
