"""How a command ends: its exit code, and what Ctrl-C leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130  # the exit code of Ctrl-C


def run_process(command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with the exit code that it gives.

    A first Ctrl-C is a `KeyboardInterrupt`; a second one, while the command is still stopping, ends the process there.
    After Ctrl-C there is no clean-up of Python's: it strikes anywhere, also where a pool is starting a thread, which
    then nobody waits for, and which the clean-up would stop in the midst of torch; that aborts the process. What must
    be on the disk is there by now, and files are never half written.
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


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _end(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"stopped\n")  # `print` may have been interrupted itself
    os._exit(INTERRUPTED)


def tell_stopped() -> int:
    """Say that Ctrl-C has stopped a command; gives the exit code."""
    print("stopped", file=sys.stderr)
    return INTERRUPTED


def was_interrupted(error: BaseException) -> bool:
    """Whether an error is Ctrl-C, or the fault of one: inside of a lock or a queue it breaks that instead.

    A disk that fails while a command is stopping stays an error of its own.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        if isinstance(cause, KeyboardInterrupt):
            return True
        cause = cause.__context__
    return False
