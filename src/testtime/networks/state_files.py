"""Files with the weights of other libraries' models: safetensors, or `torch.save` without code."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from testtime.checks import format_value
from testtime.networks.card import FLOATS, KEY
from testtime.storage import FileError, check_file, error_text

_CONTAINERS = ("state_dict", "model_state_dict", "model")  # entries of training checkpoints
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and Lightning
_OPTIONAL = "num_batches_tracked"  # older versions of torch did not save it
_SHOWN = 3
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_DTYPES = (*FLOATS, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, *_UNSIGNED)


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name, also from a training checkpoint that contains them; no code is run.

    Raises:
        FileError: The file is missing or damaged, has no tensors, or one of an unusual kind; the message names it.
    """
    check_file(path)
    state = _read_safetensors(path) if _is_safetensors(path) else _read_archive(path)
    for name, tensor in state.items():
        fault = _find_fault(tensor)
        if fault is not None:
            raise FileError(path, f"tensor {format_value(name)} {fault}")
    return state


def _read_safetensors(path: str | Path) -> dict[str, Tensor]:
    try:
        with torch.device("cpu"), safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise FileError(path, f"not a complete safetensors file ({error_text(error)})") from None


def _read_archive(path: str | Path) -> dict[str, Tensor]:
    """Read a file of `torch.save`."""
    try:
        _check_entries(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise many kinds
        reason = f"{type(error).__name__}: {error_text(error)}".split("\n")[0].split(". ")[0]
        raise FileError(path, f"neither safetensors nor weights of torch.save ({reason})") from None
    for name in _CONTAINERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise FileError(
            path, "not a state: it has no tensors by name", "save it with torch.save(model.state_dict(), …)"
        )
    return {str(name): tensor for name, tensor in found.items()}


def _check_entries(path: str | Path) -> None:
    """Raise a ValueError if an archive would be larger in memory than on disk: torch.save does not compress."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        if total > os.path.getsize(path):
            raise ValueError(f"its entries have {total:,} bytes, the file {os.path.getsize(path):,}")


def _find_fault(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be a weight or a buffer, whatever its shape and values; None if it can."""
    if tensor.device.type != "cpu":  # as on the meta device
        return "has no values"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "is not dense"
    if tensor.dtype not in _DTYPES:
        return f"has dtype {tensor.dtype}"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "is larger than its data: save a contiguous copy"
    return None


def is_network_file(path: str | Path) -> bool:
    """Return whether a file was written by `YNet.save`."""
    check_file(path)
    if not _is_safetensors(path):
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return KEY in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return False


def _is_safetensors(path: str | Path) -> bool:
    """Return whether a file begins like a safetensors file: the length of a JSON header, and the header."""
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def fit_state(path: str | Path, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state under the names of a model; the prefixes of wrappers are removed.

    Args:
        path: Its file, for messages.
        model: The model; it is not changed.
        state: The tensors of the file by name.

    Raises:
        FileError: Tensors are missing, unexpected, of another shape, or not finite; the message names the first.
    """
    own = model.state_dict()
    state = _remove_prefixes(state, own)
    missing = [name for name in own if name not in state and not name.endswith(_OPTIONAL)]
    faults = [f"missing {_shorten(missing)}"] if missing else []
    unexpected = [name for name in state if name not in own]
    faults += [f"unexpected {_shorten(unexpected)}"] if unexpected else []
    shapes = [
        f"{name} {tuple(tensor.shape)}, the model has {tuple(own[name].shape)}"
        for name, tensor in find_misshapen(own, state).items()
    ]
    faults += [f"other shapes: {_shorten(shapes)}"] if shapes else []
    if faults:
        raise FileError(path, f"does not fit the model: {'; '.join(faults)}")
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise FileError(path, f"has values that are not finite: {_shorten(broken)}")
    return {name: state.get(name, tensor) for name, tensor in own.items()}


def find_outputs(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes of a state, if the model differs from it only in that; else None."""
    own = model.state_dict()
    found = find_misshapen(own, _remove_prefixes(state, own))
    pairs = {(own[name].shape[:1], tensor.shape[:1]) for name, tensor in found.items()}
    if len(pairs) != 1 or any(own[name].shape[1:] != tensor.shape[1:] for name, tensor in found.items()):
        return None
    ((_, outputs),) = pairs
    return outputs[0] if outputs else None


def find_misshapen(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state whose shape differs from that of a model's tensor of that name."""
    return {name: tensor for name, tensor in state.items() if name in own and tensor.shape != own[name].shape}


def _remove_prefixes(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
