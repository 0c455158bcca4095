"""Streams that are underway: what units that advance together have so far, kept from time to time.

    RUN/underway/KEY.safetensors   the streams' state, and the records of their units so far

Such units are all unfinished until their last image, and a kill would cost everything they did. So they go on where
they were last kept, bit for bit. A file that is truncated or was altered counts as missing.
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
from testtime.evaluate import COLUMNS, Columns
from testtime.runs.units import Unit, check_columns
from testtime.storage import FileError, error_text
from testtime.tensorfile import read_description, read_tensors, write_tensors

log = logging.getLogger(__name__)

FOLDER = "underway"
_KEY = "testtime-underway"
_ABOUT: dict[str, Kind] = {
    "units": ("units", lambda value: is_list_of(_is_unit)(value)),
    "seconds": ("a number from 0 on", lambda value: is_number(value) and value >= 0),
}


class Underway(NamedTuple):
    """How far units are that advance together.

    Attributes:
        columns: The records of each so far.
        state: That of their `Streams`.
        seconds: How long it took so far.
    """

    columns: list[Columns]
    state: dict[str, Tensor]
    seconds: float


class Shelf:
    """The place in a run's folder for units that are underway.

    Args:
        folder: The run's folder.
        **circumstances: What must be the same for them to go on: the device, versions.
    """

    def __init__(self, folder: str | Path, **circumstances: str) -> None:
        self.folder = Path(folder) / FOLDER
        self.circumstances = circumstances

    def groups(self, company: Mapping[Unit, Any], finished: Collection[Unit]) -> list[list[Unit]]:
        """The groups that can go on; what cannot is removed.

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

    def keep(self, units: Sequence[Unit], underway: Underway) -> None:
        """Write how far units are, whole or not at all; where that cannot be, they go on without."""
        tensors = {f"state/{name}": tensor for name, tensor in underway.state.items()}
        for row, columns in enumerate(underway.columns):
            tensors |= {f"{row}/{name}": torch.from_numpy(columns[name]) for name in COLUMNS}
        about = {
            "units": [[unit.method, unit.set_name, unit.seed] for unit in units],
            "seconds": underway.seconds,
            **self.circumstances,
        }
        path = self._path(units)
        try:
            write_tensors(path, tensors, _KEY, about)
        except OSError as error:
            fault = f"cannot be written ({error_text(error)})"
            log.warning("%s; a kill would cost these streams' work", FileError(path, fault))

    def take(self, units: Sequence[Unit]) -> Underway | None:
        """How far units are; None if they have not begun or their file is damaged, which is logged."""
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
            _refuse(path, error)
            return None
        state = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        return Underway(columns, state, float(about["seconds"]))

    def refuse(self, units: Sequence[Unit], error: Exception) -> None:
        """Say why units cannot go on from where they were, and forget it."""
        _refuse(self._path(units), error)
        self.clear(units)

    def clear(self, units: Sequence[Unit]) -> None:
        """Forget units: they are finished, or go on otherwise."""
        self._path(units).unlink(missing_ok=True)

    def remove(self) -> None:
        """Leave nothing behind: the run is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, units: Sequence[Unit]) -> Path:
        key = hashlib.sha256("\n".join(unit.title for unit in units).encode()).hexdigest()[:16]
        return self.folder / f"{key}.safetensors"

    def _read_group(self, path: Path) -> list[Unit] | None:
        """The units of a file, if it was made under these circumstances; its tensors are not looked at."""
        try:
            about = _check(read_description(path, _KEY))
            group = [Unit.of(*key) for key in about["units"]]
        except ValueError as error:
            _refuse(path, error)
            return None
        same = all(about.get(name) == value for name, value in self.circumstances.items())
        return group if same and self._path(group) == path else None


def _refuse(path: Path, error: Exception) -> None:
    fault = error.fault if isinstance(error, FileError) else f"not what is left of streams ({error_text(error)})"
    log.warning("%s; they begin anew", FileError(path, fault))


def _check(about: dict[str, Any] | None) -> dict[str, Any]:
    """The description of a file, if it is one."""
    if about is None:
        raise ValueError("it has no description")
    check_entries(about, _ABOUT, list(_ABOUT))
    return about


def _is_unit(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_text, value[:2])) and is_integer(value[2])
