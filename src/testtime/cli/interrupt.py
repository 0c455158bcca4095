"""Exit codes and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the exit code of Ctrl-C
_RESUMING = ("train", "eval", "tune", "fit-branch", "demo")  # commands that continue where they were stopped


def run_process(command: Callable[[], int]) -> NoReturn:
    """Run a command and exit with the code that it returns.

    The first Ctrl-C raises `KeyboardInterrupt`, a second one exits immediately. So does the first one during an import,
    since native code may swallow the exception or abort.

    After Ctrl-C the interpreter is not finalized: a pool may have been interrupted while starting a thread, which is
    then never joined, and finalization would abort the process if it stopped that thread inside torch. Files are
    written atomically, so nothing is lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if Ctrl-C is ignored, e.g. by nohup
        signal.signal(signal.SIGINT, _interrupt)
    code = command()
    if code != INTERRUPTED:
        sys.exit(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader closed the pipe
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
        os.write(2, f"{_describe(sys.argv[1:])}\n".encode())  # `print` itself may have been interrupted
    os._exit(INTERRUPTED)


def report_interrupt(arguments: list[str]) -> int:
    """Print that Ctrl-C stopped the command of these arguments; returns the exit code."""
    print(_describe(arguments), file=sys.stderr)
    return INTERRUPTED


def _describe(arguments: list[str]) -> str:
    resumes = bool(arguments) and arguments[0] in _RESUMING
    return "stopped; run the same command again to resume" if resumes else "stopped"


def was_interrupted(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C or was caused by it: locks and queues may convert it to another exception.

    An `OSError` is never attributed to Ctrl-C.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        if isinstance(cause, KeyboardInterrupt):
            return True
        cause = cause.__context__
    return False
