"""Streams that are underway: what units that advance together have so far, kept from time to time.

    RUN/underway/KEY.safetensors   the streams' state, and the records of their units so far

Such units are all unfinished until their last image, and a kill would cost everything they did. So they go on where
they were last kept, bit for bit. A file that is truncated or was altered counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from testtime.evaluate import COLUMNS, Columns
from testtime.runs.units import Unit
from testtime.storage import write_whole

log = logging.getLogger(__name__)

FOLDER = "underway"
_KEY = "testtime-underway"


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

    def groups(self, units: Collection[Unit], finished: Collection[Unit]) -> list[list[Unit]]:
        """The groups that can go on; what cannot is removed.

        Args:
            units: Those of the plan.
            finished: Those of them that are finished. A group of finished units is one that was to be removed when the
                process was killed.
        """
        found: list[list[Unit]] = []
        for file in sorted(self.folder.glob("*.safetensors")):
            group = self._read_group(file)
            if group and set(group) <= set(units) and not set(group) <= set(finished):
                found.append(group)
            else:
                file.unlink()
        return found

    def keep(self, units: Sequence[Unit], underway: Underway) -> None:
        """Write how far units are, whole or not at all; where that cannot be, they go on without."""
        tensors = {f"state/{name}": tensor.cpu().contiguous() for name, tensor in underway.state.items()}
        for row, columns in enumerate(underway.columns):
            tensors |= {f"{row}/{name}": torch.from_numpy(columns[name]) for name in COLUMNS}
        about = {
            "units": [[unit.method, unit.set_name, unit.seed] for unit in units],
            "seconds": underway.seconds,
            **self.circumstances,
        }
        text = json.dumps(about)
        path = self._path(units)
        try:
            write_whole(path, save(tensors, {_KEY: text, "sha256": _hash(text, tensors)}))
        except OSError as error:
            log.warning("%s: cannot be written (%s). A kill would cost these streams' work.", path, error)

    def take(self, units: Sequence[Unit]) -> Underway | None:
        """How far units are; None if they have not begun or their file is damaged, which is logged."""
        path = self._path(units)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["sha256"] != _hash(about[_KEY], tensors):
                raise ValueError("it was altered")
            columns = [{name: tensors[f"{row}/{name}"].numpy() for name in COLUMNS} for row in range(len(units))]
            seconds = float(json.loads(about[_KEY])["seconds"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: not what is left of streams (%s). They begin anew.", path, error)
            return None
        state = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        return Underway(columns, state, seconds)

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
            with safe_open(path, framework="pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {})[_KEY])
            group = [Unit.of(*key) for key in about["units"]]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: not what is left of streams (%s). They begin anew.", path, error)
            return None
        same = all(about.get(name) == value for name, value in self.circumstances.items())
        return group if same and self._path(group) == path else None


def _hash(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
