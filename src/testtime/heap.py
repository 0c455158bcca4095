"""The heap of a process that computes on a CPU: freed memory is reused instead of returned to the system.

The C library of Linux returns large blocks, such as the outputs of layers, to the system as soon as they are freed, and
asks for new ones. Linux clears every page of a new block, which can take as long as the layer that fills it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt, see malloc.h


def reuse_memory() -> bool:
    """Let this process reuse freed memory, so that it stays as large as it has ever been.

    Environment variables for the allocator (`MALLOC_*`, `GLIBC_TUNABLES`) override this.

    Returns:
        Whether it does: only with the GNU C library.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if own or not hasattr(library, "gnu_get_libc_version"):
        return False
    assert library is not None
    blocks_stay = library.mallopt(_MMAP_MAX, 0)  # no blocks outside the heap
    return bool(blocks_stay and library.mallopt(_TRIM_THRESHOLD, -1))  # the heap does not shrink
