"""How a command ends: its exit code, and what Ctrl-C leaves behind."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

INTERRUPTED = 130  # the exit code of Ctrl-C


def end_process(code: int) -> NoReturn:
    """End the process with an exit code; after Ctrl-C without Python's clean-up.

    Ctrl-C strikes anywhere, also where a pool is starting a thread, which then nobody waits for. The clean-up would
    stop that thread in the midst of torch, which aborts the process. What must be on the disk is there by now.
    """
    if code != INTERRUPTED:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the output went away
            stream.flush()
    os._exit(code)


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
