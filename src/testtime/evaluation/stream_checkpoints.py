"""Checkpoints of streams: the state and the records so far of online units that advance together.

    RUN/underway/KEY.safetensors   the streams' state, and the records of their units so far

Such units are all unfinished until their last image. A run that was killed continues from their last checkpoint, bit
for bit. A file that is truncated or was altered counts as missing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.checks import Kind, check_entries, is_integer, is_list_of, is_number, is_text
from testtime.evaluation.records import COLUMNS, Columns
from testtime.evaluation.units import Unit, check_columns
from testtime.storage import FileError, error_text
from testtime.tensorfile import read_description, read_tensors, write_tensors

log = logging.getLogger(__name__)

FOLDER = "underway"
_KEY = "testtime-underway"
_ABOUT: dict[str, Kind] = {
    "units": ("units", lambda value: is_list_of(_is_unit)(value)),
    "seconds": ("a number from 0 on", lambda value: is_number(value) and value >= 0),
}


class StreamCheckpoint(NamedTuple):
    """How far units are that advance together.

    Attributes:
        columns: The records of each so far.
        state: That of their `Streams`.
        seconds: How long it took so far.
    """

    columns: list[Columns]
    state: dict[str, Tensor]
    seconds: float


class StreamCheckpoints:
    """The checkpoints in a run's folder.

    Args:
        folder: The run's folder.
        **circumstances: What must be the same to continue from them: the device, versions.
    """

    def __init__(self, folder: str | Path, **circumstances: str) -> None:
        self.folder = Path(folder) / FOLDER
        self.circumstances = circumstances

    def groups(self, company: Mapping[Unit, Any], finished: Collection[Unit]) -> list[list[Unit]]:
        """The groups that can continue; checkpoints of others are removed.

        Args:
            company: For the units of the plan that can advance with others, what those must have in common.
            finished: The units that are finished. A group of finished units is one that was to be removed when the
                process was killed.
        """
        found: list[list[Unit]] = []
        for file in sorted(self.folder.glob("*.safetensors")):
            group = self._read_group(file) or []
            fits = len({company.get(unit, unit) for unit in group}) == 1 and group[0] in company
            once = len({*group, *itertools.chain(*found)}) == len(group) + sum(map(len, found))
            if fits and once and not set(group) <= set(finished):
                found.append(group)
            elif file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink()
        return found

    def save(self, units: Sequence[Unit], checkpoint: StreamCheckpoint) -> None:
        """Write the checkpoint of some units, whole or not at all; a failure is logged, and the units go on."""
        tensors = {f"state/{name}": tensor for name, tensor in checkpoint.state.items()}
        for row, columns in enumerate(checkpoint.columns):
            tensors |= {f"{row}/{name}": torch.from_numpy(columns[name]) for name in COLUMNS}
        about = {
            "units": [[unit.method, unit.set_name, unit.seed] for unit in units],
            "seconds": checkpoint.seconds,
            **self.circumstances,
        }
        path = self._path(units)
        try:
            write_tensors(path, tensors, _KEY, about)
        except OSError as error:
            fault = f"cannot be written ({error_text(error)})"
            log.warning("%s; a kill would cost these streams' work", FileError(path, fault))

    def load(self, units: Sequence[Unit]) -> StreamCheckpoint | None:
        """The checkpoint of some units; None if there is none or it is damaged, which is logged."""
        path = self._path(units)
        if not path.exists():
            return None
        try:
            described, tensors = read_tensors(path, _KEY)
            about = _check(described)
            columns = [{name: tensors[f"{row}/{name}"].numpy() for name in COLUMNS} for row in range(len(units))]
            for own in columns:
                check_columns(own)
            if len({len(own["sample"]) for own in columns}) != 1:
                raise ValueError("its units are not equally far")
        except (ValueError, KeyError) as error:
            _log_fault(path, error)
            return None
        state = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        return StreamCheckpoint(columns, state, float(about["seconds"]))

    def discard(self, units: Sequence[Unit], error: Exception) -> None:
        """Remove a checkpoint that cannot be used, and log why."""
        _log_fault(self._path(units), error)
        self.clear(units)

    def clear(self, units: Sequence[Unit]) -> None:
        """Remove the checkpoint of some units."""
        self._path(units).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all checkpoints: the run is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, units: Sequence[Unit]) -> Path:
        key = hashlib.sha256("\n".join(unit.title for unit in units).encode()).hexdigest()[:16]
        return self.folder / f"{key}.safetensors"

    def _read_group(self, path: Path) -> list[Unit] | None:
        """The units of a file, if it was written under these circumstances; its tensors are not read."""
        try:
            about = _check(read_description(path, _KEY))
            group = [Unit.of(*key) for key in about["units"]]
        except ValueError as error:
            _log_fault(path, error)
            return None
        same = all(about.get(name) == value for name, value in self.circumstances.items())
        return group if same and self._path(group) == path else None


def _log_fault(path: Path, error: Exception) -> None:
    fault = error.fault if isinstance(error, FileError) else f"not a checkpoint of streams ({error_text(error)})"
    log.warning("%s; they start again", FileError(path, fault))


def _check(about: dict[str, Any] | None) -> dict[str, Any]:
    """The description of a file, if it is one."""
    if about is None:
        raise ValueError("it has no description")
    check_entries(about, _ABOUT, list(_ABOUT))
    return about


def _is_unit(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_text, value[:2])) and is_integer(value[2])
