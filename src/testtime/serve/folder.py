"""The state folder: for each stream its state and some former versions, every file written whole.

    service.json                        the network and the method that all states belong to
    streams/DIGEST/state.safetensors    the state and the record of a stream
    streams/DIGEST/version-N.safetensors  the same, as it was
    leases, replicas                    if several processes share the folder, see lease.py

Folders have the hash of a stream's name, since file systems differ in the names they accept and tell apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from testtime.checks import check_format, is_table_of, is_text
from testtime.provenance import format_difference
from testtime.serve.lease import Leases, hash_stream
from testtime.serve.record import StreamRecord
from testtime.serve.stream_files import FORMAT, KEY, StreamFiles
from testtime.storage import FileError, clear_parts, hold_folder, read_json, write_atomic
from testtime.tensorfile import write_tensors

_FORMAT = 1


class StateFolder:
    """The states of all streams in a folder.

    Args:
        path: The folder; it is created.
        identity: What all states must have in common, see `Adapter`.
        versions: Number of former versions stored of each stream.
        leases: The leases of streams, if several processes share the folder.

    Raises:
        FileError: Another process uses the folder, or it belongs to another network or method.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], versions: int, leases: Leases | None = None) -> None:
        self.path, self._identity, self._versions, self.leases = path, dict(identity), versions, leases
        self._held = contextlib.ExitStack()
        self._held.enter_context(hold_folder(path, shared=leases is not None))
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
            record = StreamFiles(folder).read_record(
                lambda record, folder=folder: self._files(record.id).path == folder
            )
            if record is not None:
                yield record
            elif any(folder.iterdir()):
                yield folder
            elif self.leases is None:
                folder.rmdir()  # left by a stream that could not be written

    def read(self, stream: str, version: int | None = None) -> tuple[StreamRecord, dict[str, Tensor]]:
        """Read a stream's state, or a former version; see `StreamFiles.read`."""
        return self._files(stream).read(version)

    def list_versions(self, stream: str) -> list[int]:
        """Return the former versions that are stored, ascending."""
        return self._files(stream).list_versions()

    def find_record(self, stream: str) -> StreamRecord | None:
        """Return the record of a stream, if it is stored and readable."""
        return self._files(stream).read_record()

    def write(
        self, stream: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor], store: bool, fence: int = 0
    ) -> None:
        """Write a stream's state.

        Args:
            stream: Its name.
            record: See `StreamRecord.describe`.
            tensors: The state.
            store: Whether it is also stored as a version; the oldest beyond the number of versions is removed.
            fence: The fencing number of the stream's lease, if there are leases.

        Raises:
            LeaseLost: The stream has another owner now.
            OSError: It cannot be written; the former state is still there.
        """
        files = self._files(stream)
        # With leases, the lock is held only while files get their names, not while they are written.
        staged = files.state if self.leases is None else files.path / f".state-{fence}.part"
        try:
            write_tensors(staged, tensors, KEY, {"format": FORMAT, "record": record})
            with self._guard(stream, fence):
                if staged != files.state:
                    os.replace(staged, files.state)
                if store and self._versions:
                    files.store_version(record["version"], self._versions)
        finally:
            if staged != files.state:
                staged.unlink(missing_ok=True)

    def drop_version(self, stream: str, version: int) -> None:
        """Remove a former version."""
        fence = 0 if self.leases is None else self.leases.held.get(stream, 0)
        with contextlib.suppress(TimeoutError), self._guard(stream, fence):
            self._files(stream).find_version(version).unlink(missing_ok=True)

    def delete(self, stream: str, fence: int = 0) -> None:
        """Remove everything of a stream; `fence` as in `write`.

        Raises:
            LeaseLost: The stream has another owner now.
            OSError: Something cannot be removed.
        """
        path = self._files(stream).path
        with self._guard(stream, fence):
            while path.exists():  # `rmtree` stops at a file that another process has removed meanwhile
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path)

    def count(self) -> int:
        """Return the number of streams of all processes that share the folder, stored or not yet."""
        leased = set[str]() if self.leases is None else self.leases.list_digests()
        return len(leased | set(os.listdir(self.path / "streams")))

    def _guard(self, stream: str, fence: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.leases is None else self.leases.guard(stream, fence)

    def _check(self) -> None:
        if self.leases is None:
            clear_parts(self.path)
        path = self.path / "service.json"
        if path.exists():
            found = read_json(path)
            if not (isinstance(found, dict) and is_table_of(is_text)(found.get("identity"))):
                raise FileError(path, "not the description of a state folder")
            check_format(path, found.get("format"), _FORMAT)
            for key, here in self._identity.items():
                there = found["identity"].get(key, "none")
                if there != here:
                    fault = f"its streams have another {key} ({format_difference(there, here)})"
                    raise FileError(self.path, fault, "choose another --state")
        else:
            write_atomic(path, json.dumps({"format": _FORMAT, "identity": self._identity}, indent=1))
        (self.path / "streams").mkdir(exist_ok=True)

    def _files(self, stream: str) -> StreamFiles:
        return StreamFiles(self.path / "streams" / hash_stream(stream))
