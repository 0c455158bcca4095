"""Parameters outside of layers, as class tokens, positions and layer scales, for concatenated batches of replicas.

Parameters that a part does not depend on are buffers, which never change (parts.py); they are treated alike. A module
adds or multiplies them by broadcasting over images. For replicas, each is replaced during a forward pass by a
tensor with a row per image, that of its replica, which broadcasts in the same way. Whether a module's own code allows
that is tested on an example (replica_parts.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONSTANTS = "_testtime_constants"
"""Attribute of a module: names of its buffers that never change."""


class _Bare(NamedTuple):
    """A bare parameter: where it is registered, and its stacked form `(S, *shape)`, or `(1, *shape)` if shared."""

    tensors: dict[str, Any]
    name: str
    stacked: Tensor


class BareParameters:
    """The bare parameters of a module with stacked layers.

    Args:
        modules: The modules with bare parameters, which are stacked already.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._all = [_Bare(*where) for module in modules for where in list_bare(module)]

    @contextlib.contextmanager
    def expanded(self, images: int, dtype: torch.dtype) -> Iterator[None]:
        """Replace each parameter by one row per image, for batches of as many images per replica."""
        try:
            for tensors, name, stacked in self._all:
                tensors[name] = _expand(stacked.to(dtype), images)
            yield
        finally:
            for tensors, name, stacked in self._all:
                tensors[name] = stacked


def list_bare(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """List a module's own parameters and constants: where each is registered, under which name, and the tensor."""
    constants = getattr(module, CONSTANTS, frozenset())
    places = [(module._parameters, name) for name in module._parameters]
    places += [(module._buffers, name) for name in module._buffers if name in constants]
    return [(tensors, name, tensor) for tensors, name in places if (tensor := tensors[name]) is not None]


def is_bare(parameter: Tensor) -> bool:
    """Whether a parameter could be one that broadcasts over images: `(D,)`, `(1, ...)` or `(C, 1, 1)`."""
    shape = parameter.shape
    return len(shape) == 1 or (len(shape) > 1 and shape[0] == 1) or (len(shape) == 3 and shape[1:] == (1, 1))


def _expand(stacked: Tensor, images: int) -> Tensor:
    """Return a row per image of parameters `(S, D)`, `(S, 1, ...)` or `(S, C, 1, 1)`; one that is shared as it was."""
    if len(stacked) == 1:
        return stacked[0]
    if stacked.dim() == 2:
        rows = stacked.unsqueeze(1)  # (S, 1, D): over tokens
    else:
        rows = stacked.flatten(0, 1) if stacked.shape[1] == 1 else stacked
    return rows.unsqueeze(1).expand(-1, images, *rows.shape[1:]).flatten(0, 1)  # (S·B, ...)
