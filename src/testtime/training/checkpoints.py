"""The folder of a training run: its state after every epoch, and its record for readers."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from testtime.networks.card import CheckpointError, check_format, check_plain
from testtime.provenance import describe_machine, find_differences
from testtime.storage import FileError, read_json, write_whole
from testtime.tensorfile import read_tensors, write_tensors
from testtime.training.processes import rank, world
from testtime.training.training import Training

log = logging.getLogger(__name__)

_KEY = "testtime-training"
_FORMAT = 1


class Folder:
    """Where a run keeps its state: `checkpoint.safetensors`, `record.json` and, at the end, `network.safetensors`.

    Every file is written whole or not at all, by the first process. The checkpoint is the truth; the record is for
    readers and is made anew from it.
    """

    def __init__(self, path: Path, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.checkpoint = path / "checkpoint.safetensors"
        self.record = path / "record.json"
        self.network = path / "network.safetensors"

    def load(self, training: Training) -> list[dict[str, Any]]:
        """Take up the run if there is one: the entries of the epochs it has behind it.

        Raises:
            CheckpointError: The checkpoint, or the record where there is none, is damaged or of another run; the
                training was not changed.
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
            raise CheckpointError(path, error.fault, "delete it to start anew") from None
        except ValueError as error:
            raise CheckpointError(path, str(error), "delete it to start anew") from None
        log.info("%s: going on after epoch %d", path, len(history))
        return history

    def begin(self, history: list[dict[str, Any]], device: torch.device) -> None:
        """Clear up what a killed process left, and write the record as it is now."""
        if world() > 1:
            distributed.barrier()  # all have read before the first process writes
        if rank() == 0:
            for part in self.record.parent.glob(".*.part"):  # what a killed process was writing
                part.unlink(missing_ok=True)
            self._write_record(history, device)

    def save(self, training: Training, history: list[dict[str, Any]]) -> None:
        """Write the state after an epoch."""
        if rank() != 0:
            return
        about = {"format": _FORMAT, "configuration": self.configuration, "history": history}
        write_tensors(self.checkpoint, training.state(), _KEY, about)
        self._write_record(history, training.device)

    def _write_record(self, history: list[dict[str, Any]], device: torch.device) -> None:
        write_whole(self.record, json.dumps(make_record(self.configuration, history, device), indent=1) + "\n")

    def _compare(self, path: Path, about: Any) -> dict[str, Any]:
        """What a file says, once that is known to be of this run."""
        if not isinstance(about, dict) or not isinstance(about.get("configuration"), dict):
            raise ValueError("it does not describe a training")
        check_plain(about)
        if path == self.checkpoint:
            check_format(path, about.get("format"), _FORMAT)
        different = [text[:200] for text in find_differences(about["configuration"], self.configuration)]
        if different:
            more = f"; and {len(different) - 4} more" if len(different) > 4 else ""
            fault = f"a run of another configuration ({'; '.join(different[:4])}{more})"
            raise CheckpointError(path, fault, "choose another folder")
        return about

    def _check_history(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        """The entries of the epochs that a checkpoint has behind it."""
        history, epochs = about.get("history"), self.configuration["recipe"]["epochs"]
        if not isinstance(history, list) or not 1 <= len(history) <= epochs:
            raise ValueError(f"its history is not one of 1 to {epochs} epochs")
        for number, entry in enumerate(history, start=1):
            if not _is_entry(entry, number):
                raise ValueError(f"its history has no proper entry of epoch {number}")
        return history


def _is_entry(entry: Any, epoch: int) -> bool:
    """Whether something is what a history says of an epoch."""
    if not isinstance(entry, dict):
        return False
    numbers: list[Any] = [entry.get(name) for name in ("loss", "train_error", "seconds")]
    numbers.append(entry.get("test_error", 0.0))
    numbered = type(entry.get("epoch")) is int and entry["epoch"] == epoch
    return numbered and all(type(number) in (int, float) and -1e300 < number < 1e300 for number in numbers)


def make_record(configuration: dict[str, Any], history: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """How a network was trained, as plain text and numbers."""
    return {
        "configuration": configuration,
        "epochs": copy.deepcopy(history),
        "seconds": round(sum(entry["seconds"] for entry in history), 3),
        **describe_machine(device),
    }
