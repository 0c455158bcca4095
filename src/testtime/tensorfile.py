"""Safetensors files with a description and a checksum of both.

Networks, training checkpoints, adapter states and stream checkpoints are stored this way. Any flipped bit is detected
on reading; files written before checksums were introduced are read without one.
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

from testtime.storage import FileError, PathLike, atomic_file, check_file, error_text, parse_json

_CHECKSUM = "sha256"


def write_tensors(path: PathLike, tensors: Mapping[str, Tensor], key: str, about: Mapping[str, Any]) -> None:
    """Write tensors and their description to a file atomically.

    Args:
        path: The file.
        tensors: By name, on any device; tensors that share memory are written once per name.
        key: The kind of file.
        about: The description; must be JSON-serialisable.

    Raises:
        OSError: The file cannot be written; the message names it.
    """
    plain = json.loads(json.dumps(about, allow_nan=False))
    # Clones, because safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    sealed = plain | {_CHECKSUM: hash_tensors(_canonical(plain), copies)}
    with atomic_file(path) as temporary:
        save_file(copies, temporary, metadata={key: json.dumps(sealed)})


def read_tensors(path: PathLike, key: str) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Read the description and the tensors of a file.

    Args:
        path: The file.
        key: The expected kind of file.

    Returns:
        The description, or None if the file has no metadata, and the tensors by name.

    Raises:
        FileError: The file is missing, of another kind, truncated or corrupted.
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
    """Read the description of a file without its tensors; None if it has no metadata.

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
        raise FileError(path, "its description is not a JSON object")
    return about


def hash_tensors(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a description and of the names, dtypes, shapes and bytes of CPU tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.hexdigest()


def pack_text(text: str) -> Tensor:
    """Encode text as a tensor of bytes."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def unpack_text(tensor: Tensor) -> str:
    """Decode the text that `pack_text` encoded.

    Raises:
        ValueError: The tensor is not one of bytes.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError("not a text")
    return bytes(tensor.tolist()).decode(errors="replace")
