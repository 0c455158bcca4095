"""The folder of a training run: its state after every epoch, and its record for readers."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed

from testtime.machine import describe_machine
from testtime.networks.ynet import CheckpointError
from testtime.storage import find_differences, flatten, whole_file, write_whole
from testtime.training.processes import rank, world
from testtime.training.single import Training

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
        """Take up the run if there is one: the entries of the epochs it has behind it."""
        if self.checkpoint.exists():
            found, state = _read_checkpoint(self.checkpoint)
            self._compare(found["configuration"])
            try:
                training.load(state)
            except ValueError as error:
                raise CheckpointError(f"{self.checkpoint}: {error}.") from None
            log.info("%s: going on after epoch %d", self.checkpoint, len(found["history"]))
            return found["history"]
        if self.record.exists():
            try:
                found = json.loads(self.record.read_text())
                configuration = found["configuration"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{self.record}: not the record of a training ({error}).") from None
            self._compare(configuration)
        return []

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
        tensors = {name: tensor.cpu().contiguous() for name, tensor in training.state().items()}
        with whole_file(self.checkpoint) as temporary:
            save_file(tensors, temporary, metadata={_KEY: json.dumps(about)})
        self._write_record(history, training.device)

    def _write_record(self, history: list[dict[str, Any]], device: torch.device) -> None:
        write_whole(self.record, json.dumps(make_record(self.configuration, history, device), indent=1) + "\n")

    def _compare(self, found: dict[str, Any]) -> None:
        different = find_differences(found, self.configuration)
        if different:
            raise ValueError(
                f"{self.record.parent} holds a run of another configuration ({'; '.join(different)}). "
                "Choose another folder."
            )


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_KEY])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if about["format"] != _FORMAT or not isinstance(about["history"], list):
            raise ValueError(f"format {about['format']}")
        flatten(about["configuration"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a complete training checkpoint ({error}). Delete it to start anew."
        ) from None
    return about, state


def make_record(configuration: dict[str, Any], history: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """How a network was trained, as plain text and numbers."""
    return {
        "configuration": configuration,
        "epochs": copy.deepcopy(history),
        "seconds": round(sum(entry["seconds"] for entry in history), 3),
        **describe_machine(device),
    }
