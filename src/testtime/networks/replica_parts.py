"""A part of a network in the forms in which replicas compute it: stacked, called directly, mapped or shared."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from testtime import kernels
from testtime.networks.bare import BareParameters
from testtime.networks.stacked import find_unknown_layer, is_accelerated, stack_layers
from testtime.networks.stacking import Stacking
from testtime.precision import arithmetic

log = logging.getLogger(__name__)


class ReplicaError(ValueError):
    """A network of which several replicas cannot be computed together."""


class PlainPart(nn.Module):
    """A shared part that runs once per replica."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        # Not `to`, which drops the imaginary part of complex buffers.
        self.inner = module._apply(lambda tensor: _cast(tensor, dtype))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.run(x.squeeze(0)).unsqueeze(0)
        return torch.stack([self.inner(batch.contiguous()) for batch in x])

    def run(self, batch: Tensor) -> Tensor:
        """Return the outputs of a batch `(B, ...)`."""
        return self.inner(batch)


class StackedPart(nn.Module):
    """A part that processes the concatenated batches of its replicas.

    Args:
        module: The part.
        count: Number of replicas.
        own: The ids of the layers to replicate; None for all.
        accelerated: Whether a single replica would be stacked too. Only then may filters be stored as kernels read
            them, because the parameters of a replica must not depend on how many are computed together.
    """

    def __init__(
        self, module: nn.Module, count: int, own: Collection[int] | None = None, accelerated: bool = False
    ) -> None:
        super().__init__()
        self.accelerated = accelerated
        stacking = Stacking(count, own)
        self.inner = stack_layers(module, stacking)
        self.bare = BareParameters(stacking.bare.values())

    def forward(self, x: Tensor) -> Tensor:
        with self.bare.expanded(x.shape[1], x.dtype):
            return self.inner(_join(x)).unflatten(0, x.shape[:2])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _join(x: Tensor) -> Tensor:
    x = x.flatten(0, 1)  # (S, B, ...) → (S·B, ...)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


class DirectPart(nn.Module):
    """A part of a single replica, called directly: its layers get the only row of the stacked tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
        self.channels_last = any(  # before stacking, since reading a parametrized weight computes it
            kernels.prefers_channels_last(layer.weight.device, layer.groups) for layer in convolutions
        )
        self.inner = _stack_tensors(module, 1)
        self._parameters_of: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        self._buffers_of: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        for layer in module.modules():
            casts = not isinstance(layer, nn.modules.batchnorm._BatchNorm)  # which always computes in float32
            given = ((name, tensor) for name, tensor in layer._parameters.items() if tensor is not None)
            self._parameters_of += [(layer._parameters, name, tensor, casts) for name, tensor in given]
            held = ((name, tensor) for name, tensor in layer._buffers.items() if tensor is not None)
            self._buffers_of += [(layer._buffers, name, tensor, casts) for name, tensor in held]
            if isinstance(layer, nn.GroupNorm):
                layer.register_forward_pre_hook(_make_contiguous)
        self._caching = _find_caching(module)

    def forward(self, x: Tensor) -> Tensor:
        _clear_caches(self._caching)
        casts = (casts for *_, casts in self._parameters_of)
        given = [_cast(row, x.dtype) if cast else row for row, cast in zip(self.list_rows(), casts, strict=True)]
        with self.bind(given, x.dtype):
            return self.run(x.squeeze(0)).unsqueeze(0)  # (1, B, ...) → (B, ...) → (1, B, ...)

    def list_rows(self) -> list[Tensor]:
        """Return the parameters of the replica, as views of the stacked ones."""
        return [stacked.squeeze(0) for _, _, stacked, _ in self._parameters_of]

    def run(self, batch: Tensor) -> Tensor:
        """Return the outputs of a batch `(B, ...)`, within `bind`."""
        if self.channels_last and batch.dim() == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        return self.inner(batch)

    @contextlib.contextmanager
    def bind(self, given: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Iterator[None]:
        """Let the layers use these tensors as parameters, and rows of the stacked buffers, which they may change.

        Args:
            given: The parameters.
            dtype: Of the images; buffers in float32 get it, too.
        """
        rows = []
        for tensors, name, stacked, casts in self._buffers_of:
            row = stacked.squeeze(0)
            used = row.to(dtype) if casts and row.dtype == torch.float32 else row
            rows.append((tensors, name, stacked, row, used, used._version))
        try:
            for (tensors, name, _, _), row in zip(self._parameters_of, given, strict=True):
                tensors[name] = row
            for tensors, name, _, _, used, _ in rows:
                tensors[name] = used
            yield
            for tensors, name, _, row, used, version in rows:
                # Assigned by the module, or a copy that it changed.
                if tensors[name] is not row and (tensors[name] is not used or used._version != version):
                    row.copy_(tensors[name])
        finally:
            for tensors, name, stacked, *_ in [*self._parameters_of, *rows]:
                tensors[name] = stacked


def _make_contiguous(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """With channels last, torch crashes in the backward pass of a GroupNorm whose input needs no gradient."""
    return None if inputs[0].requires_grad else (inputs[0].contiguous(), *inputs[1:])


def _stack_tensors(module: nn.Module, count: int, layers: Collection[str] | None = None) -> nn.Module:
    """Stack the parameters and buffers of a module, or of some of its layers, in place."""
    stack = Stacking(count)
    for owner, layer in module.named_modules():
        if layers is not None and owner not in layers:
            continue
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                tensors[name] = stack(tensor)
    return module


def _find_caching(module: nn.Module) -> list[nn.Module]:
    """Return the layers with a `train` of their own: some cache functions of their parameters in evaluation mode."""
    return [layer for layer in module.modules() if getattr(type(layer), "train", None) is not nn.Module.train]


def _clear_caches(layers: list[nn.Module]) -> None:
    """Switch layers to training mode and back, upon which they drop what they cached."""
    for layer in layers:
        modes = [(part, part.training) for part in layer.modules()]
        layer.train(True)
        layer.train(False)
        for part, training in modes:
            part.training = training


class MappedPart(nn.Module):
    """A part whose replicas run in `torch.func.vmap`."""

    def __init__(self, module: nn.Module, count: int, own: Collection[int] | None = None) -> None:
        super().__init__()
        self.template = [module]  # in a list, to hide it from nn.Module: its tensors are placeholders
        layers = [name for name, layer in module.named_modules() if own is None or id(layer) in own]
        self.inner = _stack_tensors(copy.deepcopy(module), count, layers)
        self._axes = {
            f"{owner}.{name}" if owner else name: 0 if owner in layers else None
            for owner, layer in module.named_modules()
            for name in (*layer._parameters, *layer._buffers)
        }
        self._caching = _find_caching(module)

    def forward(self, x: Tensor) -> Tensor:
        for own, inner in zip(self.template[0].modules(), self.inner.modules(), strict=True):
            own.training = inner.training
            norms = nn.modules.batchnorm._BatchNorm
            if isinstance(own, norms) and isinstance(inner, norms):
                own.track_running_stats = inner.track_running_stats
        state = dict(self.inner.named_buffers())
        for owner, module in self.inner.named_modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # always computes in float32
            for name, tensor in module.named_parameters(recurse=False):
                state[f"{owner}.{name}" if owner else name] = tensor if is_norm else _cast(tensor, x.dtype)
            for name, tensor in module.named_buffers(recurse=False):
                if tensor.dtype == torch.float32 and not is_norm:
                    state[f"{owner}.{name}" if owner else name] = tensor.to(x.dtype)

        def one(tensors: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(self.template[0], tensors, batch)

        _clear_caches(self._caching)
        with plain_attention():
            axes = {name: self._axes[name] for name in state}
            return vmap(one, in_dims=(axes, 0), randomness="different")(state, x.contiguous())


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Disable fused attention, which lacks a batching rule or a gradient."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def share(module: nn.Module, count: int, inputs: Tensor | None, dtype: torch.dtype) -> StackedPart | PlainPart:
    """Return a part that all replicas share."""
    plain = count == 1 and not is_accelerated(module, inputs)
    if plain or find_unknown_layer(module) or (inputs is not None and _find_difference(module, inputs, count=1)):
        return PlainPart(module, dtype)
    return StackedPart(module, 1)


def replicate(
    module: nn.Module, count: int, inputs: Tensor | None, name: str, own: Collection[int] | None
) -> StackedPart | DirectPart | MappedPart:
    """Return a part with a set of parameters for each replica, in the fastest form that is right on an example.

    Args:
        module: The part, which is used up.
        count: Number of replicas.
        inputs: Inputs of the part, to test it on.
        name: Its name, for messages.
        own: The ids of the layers to replicate; None for all.

    Raises:
        ReplicaError: Its code cannot compute several replicas together.
    """
    accelerated = is_accelerated(module, inputs)
    if count == 1 and not accelerated:
        return DirectPart(module)
    reason = find_unknown_layer(module)
    if reason is None and inputs is not None:
        reason = _find_difference(module, inputs, count=2)
    if reason is None:
        return StackedPart(module, count, own, accelerated)
    if count == 1:
        return DirectPart(module)
    log.info("replicas of the %s go through vmap: %s", name, reason)
    if inputs is not None:
        _check_mapped(module, inputs, name)
    return MappedPart(module, count, own)


@torch.no_grad()
def _check_mapped(module: nn.Module, inputs: Tensor, name: str) -> None:
    try:
        MappedPart(copy.deepcopy(module), 1)(inputs[None])
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise ReplicaError(
            f"Several replicas of the network's {name} cannot be computed together, for instance because its code "
            "branches on values of a tensor. Compute them one by one: Episodic(…, parallel=1), "
            f"Streams(…, together=1), or an Online for each stream. torch reports: {reason}"
        ) from error


def _vary(parameter: Tensor) -> Tensor:
    """Return other values of a parameter: each by a factor of its own, which no norm removes, and none zero."""
    if not parameter.is_floating_point():
        return parameter
    waves = torch.arange(parameter.numel(), dtype=torch.float32, device=parameter.device).mul(2.4).cos() / 4
    waves = waves.view(parameter.shape)
    return torch.where(parameter == 0, waves, parameter * (0.75 - waves))


@torch.no_grad()
def _find_difference(module: nn.Module, inputs: Tensor, count: int) -> str | None:
    """Return how the stacked form of `count` replicas, 1 or 2, differs from the module; None if it does not.

    It is tested on two batches of different scale and order; of two replicas, the second has other weights.
    """
    stacked = StackedPart(copy.deepcopy(module), count)
    other = copy.deepcopy(module)
    if count == 2:
        for name, parameter in stacked.inner.named_parameters():
            changed = _vary(parameter[1])
            parameter[1].copy_(changed)
            other.get_parameter(name).copy_(changed)
    second = inputs.flip(0) * 0.5 + 0.25
    try:
        # So that rounding does not count as a difference.
        with arithmetic("fp32", inputs.device), stacked.bare.expanded(len(inputs), inputs.dtype):
            # `forward`, since calling a traced model also prints the location of an error
            together = stacked.inner.forward(_join(torch.stack([inputs, second]))).unflatten(0, (2, -1))
            alone = torch.stack([module(inputs), other(second)])
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        return f"concatenated, it fails with {error}"
    if together.shape != alone.shape:
        return f"concatenated, its shape is {tuple(together.shape)}, not {tuple(alone.shape)}"
    if not torch.allclose(together, alone, rtol=1e-2, atol=1e-3 * float(alone.abs().max() + 1e-6)):
        return "concatenated, its replicas affect each other"
    return None
