"""When a stream has failed: the signal that `on_collapse` acts on."""

from __future__ import annotations

from testtime.serve.record import StreamRecord

ROLLED_BACK = 5
"""So many updates in a row undone by the guard are a collapse."""


def find_collapse(record: StreamRecord) -> str | None:
    """Return why a stream counts as collapsed, or None."""
    if record.rolled_back_in_row >= ROLLED_BACK:
        return f"the guard undid {record.rolled_back_in_row} updates in a row"
    return None
