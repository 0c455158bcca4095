"""The state folder: for each stream its state and some former versions, every file written whole.

    service.json                        the network and the method that all states belong to
    streams/DIGEST/state.safetensors    the state and the record of a stream
    streams/DIGEST/version-N.safetensors  the same, as it was

Folders have the hash of a stream's name, since file systems differ in the names they accept and tell apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from testtime.checks import check_format, is_table_of, is_text
from testtime.serve.record import StreamRecord
from testtime.storage import FileError, clear_parts, hold_folder, read_json, write_atomic
from testtime.tensorfile import read_description, read_tensors, write_tensors

log = logging.getLogger(__name__)

_KEY = "testtime-stream"
_FORMAT = 1
_VERSION = re.compile(r"version-(\d{1,18})\.safetensors")


class StateFolder:
    """The states of all streams in a folder.

    Args:
        path: The folder; it is created.
        identity: What all states must have in common, see `Adapter`.
        versions: Number of former versions stored of each stream.

    Raises:
        FileError: Another process uses the folder, or it belongs to another network or method.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], versions: int) -> None:
        self.path, self._identity, self._versions = path, dict(identity), versions
        self._held = contextlib.ExitStack()
        self._held.enter_context(hold_folder(path))
        try:
            self._check()
        except BaseException:
            self._held.close()
            raise

    def close(self) -> None:
        """Release the folder."""
        self._held.close()

    def list_streams(self) -> Iterator[StreamRecord | Path]:
        """Yield the record of each stored stream; for a stream none of whose files is readable, its folder."""
        for folder in sorted((self.path / "streams").iterdir()):
            if not folder.is_dir():
                continue
            for path in self._list_files(folder):
                try:
                    record = self._read_record(path, read_description(path, _KEY))
                except FileError as error:
                    log.warning("%s", error)
                    continue
                if self._folder(record.id) == folder:
                    yield record
                    break
            else:
                if any(folder.iterdir()):
                    yield folder
                else:
                    folder.rmdir()  # left by a stream that could not be written

    def read(self, stream: str, version: int | None = None) -> tuple[StreamRecord, dict[str, Tensor]]:
        """Read a stream's state, or a former version; a damaged state is replaced by the newest readable version.

        Raises:
            FileError: There is none.
        """
        folder = self._folder(stream)
        files = self._list_files(folder) if version is None else [folder / f"version-{version}.safetensors"]
        fault = FileError(folder, "no such stream")
        for path in files:
            try:
                about, tensors = read_tensors(path, _KEY)
                return self._read_record(path, about), tensors
            except FileError as error:  # noqa: PERF203 (few files)
                log.warning("%s", error)
                fault = error
        raise fault

    def list_versions(self, stream: str) -> list[int]:
        """Return the former versions that are stored, ascending."""
        folder = self._folder(stream)
        if not folder.is_dir():
            return []
        found = (_VERSION.fullmatch(name) for name in os.listdir(folder))
        return sorted(int(match[1]) for match in found if match)

    def write(self, stream: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor], store: bool) -> None:
        """Write a stream's state.

        Args:
            stream: Its name.
            record: See `StreamRecord.describe`.
            tensors: The state.
            store: Whether it is also stored as a version; the oldest beyond the number of versions is removed.

        Raises:
            OSError: It cannot be written; the former state is still there.
        """
        folder = self._folder(stream)
        state = folder / "state.safetensors"
        write_tensors(state, tensors, _KEY, {"format": _FORMAT, "record": record})
        if not (store and self._versions):
            return
        version = folder / f"version-{record['version']}.safetensors"
        version.unlink(missing_ok=True)
        try:
            os.link(state, version)  # the state is replaced, not changed, by the next one
        except OSError:
            shutil.copyfile(state, version)
        for number in self.list_versions(stream)[: -self._versions]:
            (folder / f"version-{number}.safetensors").unlink(missing_ok=True)

    def drop_version(self, stream: str, version: int) -> None:
        """Remove a former version."""
        (self._folder(stream) / f"version-{version}.safetensors").unlink(missing_ok=True)

    def delete(self, stream: str) -> None:
        """Remove everything of a stream."""
        shutil.rmtree(self._folder(stream), ignore_errors=True)

    def _check(self) -> None:
        clear_parts(self.path)
        path = self.path / "service.json"
        if path.exists():
            found = read_json(path)
            if not (isinstance(found, dict) and is_table_of(is_text)(found.get("identity"))):
                raise FileError(path, "not the description of a state folder")
            check_format(path, found.get("format"), _FORMAT)
            for key, here in self._identity.items():
                if found["identity"].get(key) != here:
                    raise FileError(self.path, f"its streams have another {key}", "choose another --state")
        else:
            write_atomic(path, json.dumps({"format": _FORMAT, "identity": self._identity}, indent=1))
        (self.path / "streams").mkdir(exist_ok=True)

    def _folder(self, stream: str) -> Path:
        return self.path / "streams" / hashlib.sha256(stream.encode()).hexdigest()[:32]

    def _list_files(self, folder: Path) -> list[Path]:
        """Return the files of a stream that exist, the newest first."""
        if not folder.is_dir():
            return []
        numbers = sorted((int(m[1]) for m in map(_VERSION.fullmatch, os.listdir(folder)) if m), reverse=True)
        files = [folder / "state.safetensors", *(folder / f"version-{number}.safetensors" for number in numbers)]
        return [path for path in files if path.exists()]

    def _read_record(self, path: Path, about: dict[str, Any] | None) -> StreamRecord:
        if about is None:
            raise FileError(path, "has no description")
        check_format(path, about.get("format"), _FORMAT)
        try:
            return StreamRecord.parse(about.get("record") or {})
        except ValueError as error:
            raise FileError(path, f"its record is malformed: {error}") from None
