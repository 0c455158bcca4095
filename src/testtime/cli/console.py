"""What the commands share: errors that are bad arguments, what is printed, progress, the choice of a device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from testtime.storage import printable

# Options that say where and how something is run, and not what.
_MACHINE = ("out", "device", "jobs", "ray", "together", "cache", "data_root")


def name_folder(command: str, options: Mapping[str, Any]) -> Path:
    """A folder for a run that was given none: the same options lead to the same one, so that the run goes on there."""
    told = {name: str(value) for name, value in options.items() if name not in _MACHINE and value is not None}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return Path("runs", f"{command}-{digest[:8]}")


@contextlib.contextmanager
def as_bad_arguments(*passing: type[Exception]) -> Iterator[None]:
    """Let a `ValueError` raised while arguments are checked count as a bad argument: exit code 2.

    Args:
        *passing: Kinds of `ValueError` that are not the arguments' fault, such as `DataError`.
    """
    try:
        yield
    except passing:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def echo(*lines: str, err: bool = False) -> None:
    """Print lines; in each of them anything that would steer the terminal, or begin another line, is made visible.

    Args:
        *lines: The lines; their spaces stay, so that columns do.
        err: Whether to print them on standard error.
    """
    for line in lines:
        typer.echo(re.sub(r"[^ ]+", lambda word: printable(word[0]), line), err=err)


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
    title = printable(title)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        clock = _Clock()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=None, rate="", text="")

            def show(done: int, total: int, text: str = "", /) -> None:
                rate, _ = clock.measure(done, total)
                bar.update(task, completed=done, total=total, rate=rate, text=printable(text))

            yield show
        return

    clock, last = _Clock(), time.monotonic()

    def write(done: int, total: int, text: str = "", /) -> None:
        nonlocal last
        rate, left = clock.measure(done, total)
        if done < max(total, 1) and time.monotonic() - last < every:
            return
        last = time.monotonic()
        parts = [title, f"{done:,}/{total:,}", rate, left, printable(text)]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    yield write


class _Clock:
    """Rate and time left since the first report; a resumed run does not start from zero. Another total starts anew."""

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


Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU if there is one.", rich_help_panel="Machine")
]


def pick_device(name: str) -> str:
    """The device that a `--device` option means; a bad one is a bad argument."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise typer.BadParameter(f"cannot use {name!r}: {reason}", param_hint="--device") from None
    return name
