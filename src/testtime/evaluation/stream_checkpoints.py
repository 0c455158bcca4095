"""Checkpoints of online units, which run alone or as parallel streams.

    RUN/underway/KEY.safetensors   the streams' state, and the records of their units so far

Such units are long, and parallel ones finish at the same time, so an interrupted run resumes from their last
checkpoint, bit for bit. A truncated or modified file counts as missing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.adaptation.adapters import Adapter
from testtime.checks import Kind, check_entries, is_integer, is_list_of, is_number, is_text
from testtime.evaluation.columns import check_columns, join_columns
from testtime.evaluation.records import COLUMNS, PROBABILITIES, Columns
from testtime.evaluation.units import Unit
from testtime.storage import FileError, error_text
from testtime.tensorfile import read_description, read_tensors, write_tensors

log = logging.getLogger(__name__)

FOLDER = "underway"
_KEY = "testtime-underway"
_ABOUT: dict[str, Kind] = {
    "units": ("units", lambda value: is_list_of(_is_unit)(value)),
    "seconds": ("a non-negative number", lambda value: is_number(value) and value >= 0),
}


class StreamCheckpoint(NamedTuple):
    """The progress of a unit, or of several that run in parallel.

    Attributes:
        columns: The records of each unit so far.
        state: The state of their `Online` or `Streams`.
        seconds: Seconds spent so far.
    """

    columns: list[Columns]
    state: dict[str, Tensor]
    seconds: float


Save = Callable[[StreamCheckpoint], None]


class PeriodicSaver:
    """Saves checkpoints of units periodically.

    Args:
        save: Called with a checkpoint; None never saves.
        begun: The checkpoint that the units resumed from.
        pause: Minimum seconds between checkpoints; it grows so that saving takes at most 5% of the time.
    """

    def __init__(self, save: Save | None, begun: StreamCheckpoint | None, pause: float) -> None:
        self._save, self._least, self._pause = save, pause, pause
        self._last = time.monotonic()
        self._start = self._last - (begun.seconds if begun else 0)

    def save_if_due(self, parts: Sequence[Sequence[Columns]], adapter: Adapter) -> None:
        """Save the columns of each unit so far and the adapter's state, if enough time has passed."""
        now = time.monotonic()
        if self._save is None or now - self._last < self._pause:
            return
        columns = [join_columns(part) for part in parts]
        self._save(StreamCheckpoint(columns, adapter.state_dict(), now - self._start))
        self._last = time.monotonic()
        self._pause = max(self._least, 20 * (self._last - now))


class StreamCheckpoints:
    """The stream checkpoints in a run's folder.

    Args:
        folder: The run's folder.
        **circumstances: What must match to resume: device, versions.
    """

    def __init__(self, folder: str | Path, **circumstances: str) -> None:
        self.folder = Path(folder) / FOLDER
        self.circumstances = circumstances

    def groups(self, group_keys: Mapping[Unit, Any], finished: Collection[Unit]) -> list[list[Unit]]:
        """Return the groups that can resume; other checkpoints are removed.

        Args:
            group_keys: The group key of each unit of the plan that can resume, see `find_group_key`.
            finished: The finished units. A checkpoint of finished units was left behind by an interrupted process.
        """
        found: list[list[Unit]] = []
        for file in sorted(self.folder.glob("*.safetensors")):
            group = self._read_group(file) or []
            fits = len({group_keys.get(unit, unit) for unit in group}) == 1 and group[0] in group_keys
            once = len({*group, *itertools.chain(*found)}) == len(group) + sum(map(len, found))
            if fits and once and not set(group) <= set(finished):
                found.append(group)
            elif file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink()
        return found

    def save(self, units: Sequence[Unit], checkpoint: StreamCheckpoint) -> None:
        """Write the checkpoint of some units atomically; a failure is logged."""
        tensors = {f"state/{name}": tensor for name, tensor in checkpoint.state.items()}
        for row, columns in enumerate(checkpoint.columns):
            tensors |= {f"{row}/{name}": torch.from_numpy(column) for name, column in columns.items()}
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
            log.warning("%s; these streams would restart after an interruption", FileError(path, fault))

    def load(self, units: Sequence[Unit]) -> StreamCheckpoint | None:
        """Return the checkpoint of some units; None if it is missing or damaged, which is logged."""
        path = self._path(units)
        if not path.exists():
            return None
        try:
            described, tensors = read_tensors(path, _KEY)
            about = _check(described)
            names = [name for name in (*COLUMNS, *PROBABILITIES) if f"0/{name}" in tensors]
            columns = [{name: tensors[f"{row}/{name}"].numpy() for name in names} for row in range(len(units))]
            for part in columns:
                check_columns(part)
            if len({len(part["sample"]) for part in columns}) != 1:
                raise ValueError("its units have different numbers of records")
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
        """Remove all checkpoints of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, units: Sequence[Unit]) -> Path:
        key = hashlib.sha256("\n".join(unit.title for unit in units).encode()).hexdigest()[:16]
        return self.folder / f"{key}.safetensors"

    def _read_group(self, path: Path) -> list[Unit] | None:
        """Return the units of a file if its circumstances match, without reading its tensors."""
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
    log.warning("%s; its streams restart", FileError(path, fault))


def _check(about: dict[str, Any] | None) -> dict[str, Any]:
    """Return a file's description after checking it."""
    if about is None:
        raise ValueError("it has no description")
    check_entries(about, _ABOUT, list(_ABOUT))
    return about


def _is_unit(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_text, value[:2])) and is_integer(value[2])
