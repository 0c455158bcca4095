"""The files of one stream: its state and some former versions."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from testtime.checks import check_format
from testtime.serve.record import StreamRecord
from testtime.storage import FileError
from testtime.tensorfile import read_description, read_tensors

log = logging.getLogger(__name__)

KEY = "testtime-stream"
"""What the files describe themselves by."""

FORMAT = 1
"""The format of the files."""

_VERSION = re.compile(r"version-(\d{1,18})\.safetensors")


class StreamFiles:
    """The files of a stream.

    Args:
        path: Their folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, path / "state.safetensors"

    def find_version(self, number: int) -> Path:
        """Return the file of a former version."""
        return self.path / f"version-{number}.safetensors"

    def list_versions(self) -> list[int]:
        """Return the former versions that are stored, ascending."""
        if not self.path.is_dir():
            return []
        found = (_VERSION.fullmatch(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in found if match)

    def list_newest(self) -> list[Path]:
        """Return the files that exist, the newest first."""
        return [path for path in (self.state, *map(self.find_version, self.list_versions()[::-1])) if path.exists()]

    def store_version(self, number: int, most: int) -> None:
        """Store the state as a version; the oldest beyond so many are removed."""
        version = self.find_version(number)
        version.unlink(missing_ok=True)
        try:
            os.link(self.state, version)  # the state is replaced, not changed, by the next one
        except OSError:
            shutil.copyfile(self.state, version)
        for old in self.list_versions()[:-most]:
            self.find_version(old).unlink(missing_ok=True)

    def read(self, version: int | None = None) -> tuple[StreamRecord, dict[str, Tensor]]:
        """Read the state, or a former version; a damaged state is replaced by the newest readable version.

        Raises:
            FileError: There is none.
        """
        fault = FileError(self.path, "no such stream")
        for path in self.list_newest() if version is None else [self.find_version(version)]:
            try:
                about, tensors = read_tensors(path, KEY)
                return _parse(path, about), tensors
            except FileError as error:  # noqa: PERF203 (few files)
                log.warning("%s", error)
                fault = error
        raise fault

    def read_record(self, fits: Callable[[StreamRecord], bool] | None = None) -> StreamRecord | None:
        """Return the newest record that is readable and fits, if there is one."""
        for path in self.list_newest():
            try:
                record = _parse(path, read_description(path, KEY))
                if fits is None or fits(record):
                    return record
            except FileError as error:  # noqa: PERF203 (few files)
                log.warning("%s", error)
        return None


def _parse(path: Path, about: dict[str, Any] | None) -> StreamRecord:
    if about is None:
        raise FileError(path, "has no description")
    check_format(path, about.get("format"), FORMAT)
    try:
        return StreamRecord.parse(about.get("record") or {})
    except ValueError as error:
        raise FileError(path, f"its record is malformed: {error}") from None
