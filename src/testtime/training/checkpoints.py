"""The folder of a training run: its state after each epoch, and a readable record."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from testtime.checks import check_format
from testtime.networks.card import CheckpointError, check_plain
from testtime.provenance import describe_machine, find_differences
from testtime.storage import FileError, read_json, write_atomic
from testtime.tensorfile import read_tensors, write_tensors
from testtime.training.processes import rank, world

log = logging.getLogger(__name__)

_KEY = "testtime-training"
_FORMAT = 1


class Resumable(Protocol):
    """A training whose state can be saved and loaded."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return everything that changes during the training, by name."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a state; raises a `ValueError`, and modifies nothing, if it does not fit."""
        ...


class Folder:
    """The files of a training run: `checkpoint.safetensors`, `record.json` and, at the end, `network.safetensors`.

    Each file is written atomically, by the first process. The record is regenerated from the checkpoint.
    """

    def __init__(self, path: Path, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.checkpoint = path / "checkpoint.safetensors"
        self.record = path / "record.json"
        self.network = path / "network.safetensors"

    def load(self, training: Resumable) -> list[dict[str, Any]]:
        """Resume the run, if there is one; returns the entries of its finished epochs.

        Raises:
            CheckpointError: The checkpoint, or the record if there is none, is damaged or belongs to another run; the
                training is not modified.
        """
        path = self.checkpoint if self.checkpoint.exists() else self.record
        if not path.exists():
            return []
        try:
            if path == self.record:
                self._compare(path, read_json(path))
                return []
            about, state = read_tensors(path, _KEY)
            history = self._check_history(self._compare(path, about))
            training.load(state)
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(path, error.fault, "delete it to start over") from None
        except ValueError as error:
            raise CheckpointError(path, str(error), "delete it to start over") from None
        log.info("%s: resuming after epoch %d", path, len(history))
        return history

    def begin(self, history: list[dict[str, Any]], device: torch.device) -> None:
        """Remove partial files of an interrupted process, and write the record."""
        if world() > 1:
            distributed.barrier()  # all have read before the first process writes
        if rank() == 0:
            for part in self.record.parent.glob(".*.part"):  # partial files of an interrupted process
                part.unlink(missing_ok=True)
            self._write_record(history, device)

    def save(self, training: Resumable, history: list[dict[str, Any]]) -> None:
        """Write the state after an epoch."""
        if rank() != 0:
            return
        about = {"format": _FORMAT, "configuration": self.configuration, "history": history}
        write_tensors(self.checkpoint, training.state(), _KEY, about)
        self._write_record(history, training.device)

    def _write_record(self, history: list[dict[str, Any]], device: torch.device) -> None:
        write_atomic(self.record, json.dumps(make_record(self.configuration, history, device), indent=1) + "\n")

    def _compare(self, path: Path, about: Any) -> dict[str, Any]:
        """Return the metadata of a file after checking that it belongs to this run."""
        if not isinstance(about, dict) or not isinstance(about.get("configuration"), dict):
            raise ValueError("it does not describe a training")
        check_plain(about)
        if path == self.checkpoint:
            check_format(path, about.get("format"), _FORMAT)
        different = [text[:200] for text in find_differences(about["configuration"], self.configuration)]
        if different:
            more = f"; and {len(different) - 4} more" if len(different) > 4 else ""
            fault = f"a run with another configuration ({'; '.join(different[:4])}{more})"
            raise CheckpointError(path, fault, "choose another folder")
        return about

    def _check_history(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the entries of a checkpoint's finished epochs after checking them."""
        history, epochs = about.get("history"), self.configuration["recipe"]["epochs"]
        if not isinstance(history, list) or not 1 <= len(history) <= epochs:
            raise ValueError(f"its history does not have 1 to {epochs} epochs")
        for number, entry in enumerate(history, start=1):
            if not _is_entry(entry, number):
                raise ValueError(f"its history has no valid entry for epoch {number}")
        return history


def _is_entry(entry: Any, epoch: int) -> bool:
    """Whether a value is a valid entry for an epoch."""
    if not isinstance(entry, dict):
        return False
    numbers: list[Any] = [entry.get(name) for name in ("loss", "train_error", "seconds")]
    numbers.extend(entry.get(name, 0.0) for name in ("test_error", "held_out_error"))
    numbered = type(entry.get("epoch")) is int and entry["epoch"] == epoch
    return numbered and all(type(number) in (int, float) and -1e300 < number < 1e300 for number in numbers)


def make_record(configuration: dict[str, Any], history: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the record of a training, JSON-serializable."""
    return {
        "configuration": configuration,
        "epochs": copy.deepcopy(history),
        "seconds": round(sum(entry["seconds"] for entry in history), 3),
        **describe_machine(device),
    }
