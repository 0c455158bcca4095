"""Tensors in one safetensors file, with a description and a checksum of both.

Networks, training checkpoints, states of adapters and stream checkpoints are such files. A flipped bit anywhere is
noticed when the file is read; files from before there were checksums have none, and are read without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from testtime.storage import FileError, PathLike, check_file, error_text, parse_json, whole_file

_CHECKSUM = "sha256"


def write_tensors(path: PathLike, tensors: Mapping[str, Tensor], key: str, about: Mapping[str, Any]) -> None:
    """Write tensors and their description to a file, whole or not at all.

    Args:
        path: The file.
        tensors: By name, on any device; tensors that share memory are written as often as they are named.
        key: What kind of file it is.
        about: The description, as JSON can hold it.

    Raises:
        OSError: It cannot be written; the message names the file.
    """
    plain = json.loads(json.dumps(about, allow_nan=False))
    # Clones, because safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    sealed = plain | {_CHECKSUM: hash_tensors(_canonical(plain), copies)}
    with whole_file(path) as temporary:
        save_file(copies, temporary, metadata={key: json.dumps(sealed)})


def read_tensors(path: PathLike, key: str) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """The description and the tensors of a file.

    Args:
        path: The file.
        key: What kind of file it has to be.

    Returns:
        The description, None where the file has none at all, and the tensors by name.

    Raises:
        FileError: The file is missing, of another kind, cut short, or was altered.
    """
    check_file(path)
    try:
        with torch.device("cpu"), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise FileError(path, f"not a complete safetensors file ({error_text(error)})") from None
    about = _read_description(path, metadata, key)
    checksum = None if about is None else about.pop(_CHECKSUM, None)
    if checksum is not None and checksum != hash_tensors(_canonical(about), tensors):
        raise FileError(path, "damaged: its content does not match its checksum", "restore it from a copy")
    return about, tensors


def read_description(path: PathLike, key: str) -> dict[str, Any] | None:
    """The description of a file, None where it has none at all; the tensors are not read.

    Raises:
        FileError: The file is missing or of another kind.
    """
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise FileError(path, f"not a complete safetensors file ({error_text(error)})") from None
    about = _read_description(path, metadata, key)
    if about is not None:
        about.pop(_CHECKSUM, None)
    return about


def _canonical(about: Mapping[str, Any] | None) -> str:
    return json.dumps(about, sort_keys=True)


def _read_description(path: PathLike, metadata: Mapping[str, str], key: str) -> dict[str, Any] | None:
    if not metadata:
        return None
    if key not in metadata:
        raise FileError(path, f"another kind of safetensors file: it has no {key!r}")
    try:
        about = parse_json(metadata[key])
    except ValueError as error:
        raise FileError(path, f"its description is not JSON ({error})") from None
    if not isinstance(about, dict):
        raise FileError(path, "its description is not a table of names and values")
    return about


def hash_tensors(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The checksum of a description and of tensors on the CPU: sha256 of names, types, shapes and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.hexdigest()


def pack_text(text: str) -> Tensor:
    """A text as a tensor of bytes, which a safetensors file can hold."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def unpack_text(tensor: Tensor) -> str:
    """The text that `pack_text` packed.

    Raises:
        ValueError: The tensor does not hold one.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError("not a text")
    return bytes(tensor.tolist()).decode(errors="replace")
