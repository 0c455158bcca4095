"""The streams stored in a folder that other processes write to as well."""

from __future__ import annotations

import os
from pathlib import Path

from testtime.serve.folder import StateFolder
from testtime.serve.record import StreamRecord
from testtime.serve.stream_files import StreamFiles


class Stored:
    """Reads what is stored of all streams, files that have changed only.

    Args:
        folder: The state folder.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, int], StreamRecord]] = {}  # name of a folder → its file's identity

    def list_records(self) -> list[StreamRecord]:
        """Return the records of all stored streams."""
        found: dict[str, tuple[tuple[int, int], StreamRecord]] = {}
        with os.scandir(self._folder.path / "streams") as entries:
            for entry in entries:
                try:
                    status = os.stat(Path(entry.path, "state.safetensors"))
                except OSError:
                    continue
                identity, known = (status.st_ino, status.st_mtime_ns), self._known.get(entry.name)
                if known is not None and known[0] == identity:
                    found[entry.name] = known
                elif (record := StreamFiles(Path(entry.path)).read_record()) is not None:
                    record.answers = {}
                    found[entry.name] = identity, record
        self._known = found
        return [record for _, record in found.values()]
