"""Parts of a single replica that can be computed in two halves of a batch, in two threads at once.

That takes parts that treat images independently and do not change while they run. Both are tested on an example when
the replicas are made; what may change later, hooks and the mode of layers, is tested at every call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from testtime import kernels
from testtime.networks.replica_parts import DirectPart, PlainPart

_PLAIN = (type(None), bool, int, float, str, torch.Size)
"""Types of attributes that a layer may set to the same value again."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compute_in_halves(parts: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """Compute parts, one after the other, in two halves of a batch; None where that cannot be done, or is no faster.

    Args:
        parts: The parts of a single replica, each of which `is_separable`.
        x: The batch `(1, B, ...)` of the first part.

    Returns:
        The outputs of the last part, `(1, B, ...)`.
    """
    if not torch.is_grad_enabled() or any(_prefers_whole(part) or not _is_undisturbed(part) for part in parts):
        return None
    rows = [row for part in parts for row in _list_rows(part)]
    outputs = kernels.take_over("halves", x.squeeze(0), functools.partial(_bind, parts), rows)
    return None if outputs is None else outputs.unsqueeze(0)


@torch.no_grad()
def is_separable(part: nn.Module, inputs: Tensor) -> bool:
    """Return whether a part computes each image as if it were alone, and does not change while it runs.

    Args:
        part: The part of a single replica.
        inputs: At least two examples of its inputs, `(1, N, ...)`.
    """
    if not isinstance(part, DirectPart | PlainPart) or not _is_undisturbed(part):
        return False
    before, numbers = _read_state(part), torch.get_rng_state()
    try:
        whole = part(inputs)
        alone = torch.cat([part(one) for one in inputs.split(1, dim=1)], dim=1)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # it needs several images
        return False
    if whole.shape != alone.shape or not torch.equal(torch.get_rng_state(), numbers):
        return False
    tolerance = 1e-4 * float(whole.abs().max())
    return torch.allclose(whole, alone, rtol=1e-3, atol=tolerance) and _is_same(_read_state(part), before)


def _prefers_whole(part: nn.Module) -> bool:
    """Whether a part has convolutions with groups: with channels last, those of a whole batch are faster."""
    return isinstance(part, DirectPart) and part.channels_last


def _list_rows(part: nn.Module) -> list[Tensor]:
    return part.list_rows() if isinstance(part, DirectPart) else []


@contextlib.contextmanager
def _bind(parts: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let the parts that are called directly use these tensors as parameters; yields the function of a batch."""
    rest = iter(tensors)

    def run(batch: Tensor) -> Tensor:
        for part in parts:
            batch = part.run(batch)
        return batch

    with contextlib.ExitStack() as stack:
        for part in parts:
            if isinstance(part, DirectPart):
                stack.enter_context(part.bind([next(rest) for _ in part.list_rows()]))
        yield run


def _is_undisturbed(part: nn.Module) -> bool:
    """Whether a part's layers are in evaluation mode, run as Python code and call no hooks that are not ours."""
    if torch_module._has_any_global_hook():
        return False
    for layer in part.modules():
        if layer.training and layer is not part:
            return False
        if layer._compiled_call_impl is not None or isinstance(layer, torch.jit.ScriptModule):
            return False
        hooks = (hook for name in _HOOKS for hook in getattr(layer, name).values())
        if any(not str(getattr(hook, "__module__", "")).startswith("testtime.networks.") for hook in hooks):
            return False
    return True


def _read_state(part: nn.Module) -> list[Any]:
    """Return all attributes of a part's layers, and how often their tensors were changed in place."""
    attributes = [
        (name, list(value.items()) if isinstance(value, dict) else list(value) if _is_container(value) else value)
        for layer in part.modules()
        for name, value in vars(layer).items()
    ]
    versions = [tensor._version for tensor in (*part.parameters(), *part.buffers())]
    return [attributes, versions]


def _is_container(value: Any) -> bool:
    return isinstance(value, list | set | tuple)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states hold the same objects, or plain values that are equal."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)
