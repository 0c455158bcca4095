"""How a command ends: its exit code, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the exit code of Ctrl-C


def run_process(command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with the exit code that it returns.

    The first Ctrl-C raises `KeyboardInterrupt`; a second one, while the command is still stopping, ends the process at
    once. So does the first one inside an import: native code that is being imported may swallow the exception or abort.

    After Ctrl-C the interpreter does not finalize. The interrupt may strike where a pool is starting a thread, which is
    then never joined, and which finalization would stop inside torch; that aborts the process. Files are written whole
    or not at all, so nothing is lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where Ctrl-C is ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)
    code = command()
    if code != INTERRUPTED:
        sys.exit(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the output went away
            stream.flush()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _end)
    if _is_importing(frame):
        _end()
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end(*_: object) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"stopped\n")  # `print` may have been interrupted itself
    os._exit(INTERRUPTED)


def report_interrupt() -> int:
    """Print that Ctrl-C stopped the command; returns the exit code."""
    print("stopped", file=sys.stderr)
    return INTERRUPTED


def was_interrupted(error: BaseException) -> bool:
    """Whether an error is Ctrl-C or was caused by it: inside a lock or a queue it surfaces as another exception.

    A disk that fails while a command is stopping remains an error of its own.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        if isinstance(cause, KeyboardInterrupt):
            return True
        cause = cause.__context__
    return False
