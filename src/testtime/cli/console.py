"""What the commands share: errors that count as bad arguments, output, progress, the choice of a device."""

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

# Options for where and how something is run, which do not change what is run.
_MACHINE = ("out", "device", "jobs", "ray", "together", "cache", "data_root")


def name_folder(command: str, options: Mapping[str, Any]) -> Path:
    """The default folder of a run. The same options give the same folder, so that the run is resumed there."""
    given = {name: str(value) for name, value in options.items() if name not in _MACHINE and value is not None}
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    return Path("runs", f"{command}-{digest[:8]}")


@contextlib.contextmanager
def as_bad_arguments(*passing: type[Exception]) -> Iterator[None]:
    """Turn a `ValueError` raised while arguments are checked into a bad argument: exit code 2.

    Args:
        *passing: Subclasses of `ValueError` that are not the arguments' fault, such as `DataError`.
    """
    try:
        yield
    except passing:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def format_command(context: typer.Context) -> str:
    """The command line as it was given, for records."""
    return shlex.join(["testtime", *context.obj])


def echo(*lines: str, err: bool = False) -> None:
    """Print lines; control characters, line breaks among them, are escaped.

    Args:
        *lines: The lines. Runs of spaces are preserved, so that columns stay aligned.
        err: Whether to print to standard error.
    """
    for line in lines:
        typer.echo(re.sub(r"[^ ]+", lambda word: printable(word[0]), line), err=err)


def report_skipped(lines: Iterable[str]) -> None:
    """Print a line for each file that was left out because it cannot be read."""
    for line in dict.fromkeys(lines):
        echo(f"left out: {line}", err=True)


@contextlib.contextmanager
def progress(title: str, every: float = 10.0) -> Iterator[Progress]:
    """Show on standard error how much is done, the rate, and the time left: a live bar, or plain lines in a pipe.

    Args:
        title: What is being done.
        every: Seconds between two lines in a pipe.
    """
    title = printable(title)
    if sys.stderr.isatty():
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[text]}", markup=False),
        )
        clock = _Clock()
        with bars.Progress(*columns, console=Console(stderr=True)) as bar:
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
        parts = [title, f"{done:,}/{total:,}", rate, left, printable(text)]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    yield write


class _Clock:
    """Rate and time left since the first call: a resumed run does not start at zero. Another total restarts it."""

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
    """The device of a `--device` option; one that cannot be used is a bad argument."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise typer.BadParameter(f"cannot use {name!r}: {reason}", param_hint="--device") from None
    return name


def load_network(checkpoint: str | None, device: str) -> tuple[str, YNet]:
    """The network of a `--checkpoint` option on a device, and its name; without one, the default bundled network."""
    from testtime.evaluation.predict_files import default_network
    from testtime.networks import load

    name = checkpoint or default_network()
    net = load(name).to(device)
    if checkpoint is None:
        echo(f"network: {name} (another one: --checkpoint)", err=True)
    return name, net
