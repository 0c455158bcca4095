"""S independent copies of a network as one network.

The input is a batch per replica, `(S, B, C, H, W)`, the output logits per replica, `(S, B, K)`; each replica has its
own parameters. Parameters and buffers are stacked to `(S, *shape)`, so that one optimizer step updates all replicas and
row s of every tensor belongs to replica s.

Internally the batches are concatenated, `(S·B, C, H, W)`, and run through the network's own code, in which layers with
parameters are replaced by ones that apply another set of parameters to every B images (stacked.py); so are parameters
outside of layers that broadcast over images (bare.py). A part with others runs in `torch.func.vmap` instead. Which form
is right is tested on an example. A single replica is called directly, with its own layers, unless there are kernels for
the stacked ones.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from testtime import kernels
from testtime.networks.bare import BareParameters
from testtime.networks.packed import PackedParameters
from testtime.networks.stacked import NORMS, BatchNorm, Stacking, find_unknown_layer, is_accelerated, stack_layers
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic

log = logging.getLogger(__name__)

Part = Literal["encoder", "classifier", "ssl"]
Statistics = Literal["running", "source", "batch"]
PARTS: tuple[Part, ...] = ("encoder", "classifier", "ssl")


class ReplicaError(ValueError):
    """A network of which several replicas cannot be computed together."""


class Replicas:
    """S copies of a `YNet`, computed together.

    Args:
        net: The network to copy; it is not changed. Parts that are not replicated use its parameters.
        count: Number of replicas, S.
        parts: The parts to replicate; the others are shared by all replicas.
        example: At least two images `(N, C, H, W)` of the expected size, to test the replicas against the network.
        dtype: The dtype of the computation; parameters and updates stay float32.
        layers: Names of the layers to replicate in these parts; the others are shared by all replicas. None: all.

    Raises:
        ReplicaError: The network's code cannot compute several replicas together.
    """

    def __init__(
        self,
        net: YNet,
        count: int,
        parts: Sequence[Part] = PARTS,
        example: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        layers: Collection[str] | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"`count` must be at least 1, got {count}.")
        self._given = net, count, parts, example, dtype, layers
        self.net, self.example = net, example
        self.count, self.dtype = count, dtype
        self._mean, self._std = net.mean.clone(), net.std.clone()
        self._channels = net.channels
        self._known = type(net).normalise is YNet.normalise
        self._normalise = (_copy_normalisation(net) if self._known else copy.deepcopy(net)).normalise
        self.parts: dict[Part, _Stacked | _Direct | _Mapped | _Plain] = {}
        inputs = None if example is None else net.normalise(example)
        for name in PARTS:
            own = getattr(net, name)
            if own is None:  # no self-supervised branch
                continue
            module = _copy(own, shares=name not in parts).eval()
            given = inputs
            if name == "encoder" and given is not None:
                inputs = _encode(module, given)  # of the two branches
            if name in parts:
                chosen = None if layers is None else _find_ids(module, name, layers)
                self.parts[name] = _replicate(module, count, given, name, chosen)
            else:
                self.parts[name] = _share(module, count, given, dtype)
        modules = [module for part in self.parts.values() for module in part.modules()]
        self._batch_norms = [m for m in modules if isinstance(m, (BatchNorm, nn.modules.batchnorm._BatchNorm))]
        self.tensors: dict[str, Tensor] = {}
        for name in parts:
            inner = self.parts[name].inner
            for key, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
                if layers is None or f"{name}.{key}".rpartition(".")[0] in layers:
                    self.tensors[f"{name}.{key}"] = tensor
        for name, buffer in net.named_buffers():
            if name in self.tensors:
                self.tensors[name].copy_(buffer)  # the example may have changed it
        parameters = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}
        stacked = tuple(f"{name}." for name, part in self.parts.items() if isinstance(part, _Stacked))
        innermost = {name for name in parameters if name.startswith(stacked)}
        self.packed = PackedParameters(parameters, count, self._mean.device, innermost)
        buffers = [tensor for tensor in self.tensors.values() if not isinstance(tensor, nn.Parameter)]
        self.pieces = [self.packed.numbers, *buffers]
        """Everything that can change, `(S, ...)` each."""
        self.has_statistics = False
        """Whether a forward pass changes statistics, see `learning`."""
        self.use_statistics("running")

    def encode(self, images: Tensor) -> Tensor:
        """Return features `(S, B, ...)` of images `(S, B, C, H, W)`."""
        return self.parts["encoder"](self._prepare(images))

    def _prepare(self, images: Tensor) -> Tensor:
        if self._known and images.shape[2] == (self._channels or images.shape[2]):
            pixels = kernels.take_over("normalise", images.flatten(0, 1), self._mean, self._std, self.dtype)
            if pixels is not None:
                return pixels.unflatten(0, images.shape[:2])
        return self._normalise(images).to(self.dtype)

    def classify(self, features: Tensor) -> Tensor:
        """Return class logits `(S, B, K)` of features `(S, B, ...)`."""
        return self.parts["classifier"](features)

    def supervise(self, features: Tensor) -> Tensor:
        """Return the task's outputs `(S, B, ...)` of features `(S, B, ...)`.

        Raises:
            ValueError: The network has no self-supervised branch.
        """
        if "ssl" not in self.parts:
            raise ValueError("The network has no self-supervised branch.")
        return self.parts["ssl"](features)

    def __call__(self, images: Tensor) -> Tensor:
        """Return class logits `(S, B, K)` of images `(S, B, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """Return the task's outputs `(S, B, ...)` of views `(S, B, C, h, w)`."""
        return self.supervise(self.encode(views))

    def use_statistics(self, statistics: Statistics) -> None:
        """Choose the statistics that BatchNorm uses.

        Args:
            statistics: "running": the running statistics, and inside `learning` those of the batch, which update the
                running ones; "source": always the running ones, unchanged; "batch": always those of the batch.
        """
        self._statistics: Statistics = statistics
        self.has_statistics = statistics == "running" and bool(self._batch_norms)
        for module in self._batch_norms:
            module.training = statistics == "batch"
            module.track_running_stats = statistics != "batch"

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Put BatchNorm in training mode if it uses running statistics.

        Other layers stay in evaluation mode: the noise of dropout would not be a function of the sample.
        """
        if self._statistics != "running":
            yield
            return
        self.train_norms(True)
        try:
            yield
        finally:
            self.train_norms(False)

    def train_norms(self, training: bool) -> None:
        """Set BatchNorm to training or evaluation mode."""
        for module in self._batch_norms:
            module.training = training

    def parameters(self, parts: Iterable[Part], norms_only: bool = False) -> dict[str, Tensor]:
        """Return the stacked parameters `(S, ...)` of some parts by name, optionally only those of norms."""
        prefixes = tuple(f"{part}." for part in parts)
        found = {name: tensor for name, tensor in self.packed.parameters.items() if name.startswith(prefixes)}
        if not norms_only:
            return found
        modules = [module for part in self.parts.values() for module in part.modules() if isinstance(module, NORMS)]
        own = {id(tensor) for module in modules for tensor in module.parameters(recurse=False)}
        return {name: tensor for name, tensor in found.items() if id(tensor) in own}

    def twin(self) -> Replicas:
        """Return as many replicas of the original network, with the same choice of statistics."""
        made = Replicas(*self._given)
        made.use_statistics(self._statistics)
        return made

    def read(self, index: int) -> dict[str, Tensor]:
        """Return a copy of one replica's tensors, by their names in the network."""
        return {name: tensor[index].detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def write(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Set one replica to the tensors of a network; buffers that are not among them stay unchanged."""
        for name, tensor in self.tensors.items():
            if name in state or isinstance(tensor, nn.Parameter):  # non-persistent buffers are in no state
                tensor[index] = state[name]


def put_rows(piece: Tensor, old: Tensor, rows: Tensor) -> None:
    """Overwrite the rows of a tensor `(S, ...)` where `rows`, bool `(S,)`, is true; other rows stay unchanged."""
    if kernels.take_over("put_rows", piece, old, rows) is None:
        piece.copy_(torch.where(rows.view(-1, *[1] * (piece.dim() - 1)), old, piece))


def _copy(module: nn.Module, shares: bool) -> nn.Module:
    """Return a copy without gradients of a module, optionally with parameters in the same memory."""
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()} if shares else {}
    return copy.deepcopy(module, memo).requires_grad_(False)


@torch.no_grad()
def _encode(encoder: nn.Module, images: Tensor) -> Tensor:
    """Return the features of normalised images.

    Raises:
        ValueError: The encoder does not accept images of this size.
    """
    try:
        return encoder(images)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise ValueError(f"The network does not accept images {tuple(images.shape[1:])}: {reason}") from error


def _copy_normalisation(net: YNet) -> YNet:
    """Return a network without layers that normalises as another one does."""
    made = YNet(nn.Identity(), nn.Identity(), nn.Identity(), net.card, channels=net.channels)
    made.mean, made.std = net.mean.clone(), net.std.clone()
    return made


class _Plain(nn.Module):
    """A shared part that runs once per replica."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = module.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.inner(x.squeeze(0)).unsqueeze(0)
        return torch.stack([self.inner(batch.contiguous()) for batch in x])


class _Stacked(nn.Module):
    """A part that processes the concatenated batches of its replicas."""

    def __init__(self, module: nn.Module, count: int, own: Collection[int] | None = None) -> None:
        super().__init__()
        stacking = Stacking(count, own)
        self.inner = stack_layers(module, stacking)
        self.bare = BareParameters(stacking.bare.values())

    def forward(self, x: Tensor) -> Tensor:
        with self.bare.expanded(x.shape[1], x.dtype):
            return self.inner(_join(x)).unflatten(0, x.shape[:2])


def _join(x: Tensor) -> Tensor:
    x = x.flatten(0, 1)  # (S, B, ...) → (S·B, ...)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


class _Direct(nn.Module):
    """A part of a single replica, called directly: its layers get the only row of the stacked tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = _stack_tensors(module, 1)
        self._parameters_of: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        self._buffers_of: list[tuple[dict[str, Any], str, Tensor]] = []
        for layer in module.modules():
            casts = not isinstance(layer, nn.modules.batchnorm._BatchNorm)  # which always computes in float32
            given = ((name, tensor) for name, tensor in layer._parameters.items() if tensor is not None)
            self._parameters_of += [(layer._parameters, name, tensor, casts) for name, tensor in given]
            held = ((name, tensor) for name, tensor in layer._buffers.items() if tensor is not None)
            self._buffers_of += [(layer._buffers, name, tensor) for name, tensor in held]
            if isinstance(layer, nn.GroupNorm):
                layer.register_forward_pre_hook(_make_contiguous)
        convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
        self._channels_last = any(
            kernels.prefers_channels_last(layer.weight.device, layer.groups) for layer in convolutions
        )
        self._caching = _find_caching(module)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.squeeze(0)  # (1, B, ...) → (B, ...)
        if self._channels_last and batch.dim() == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        _clear_caches(self._caching)
        with self._rows(x.dtype):
            return self.inner(batch).unsqueeze(0)

    @contextlib.contextmanager
    def _rows(self, dtype: torch.dtype) -> Iterator[None]:
        """Give the layers rows that are views of the stacked tensors, so that they can also be changed in place."""
        rows = [(tensors, name, stacked, stacked.squeeze(0)) for tensors, name, stacked in self._buffers_of]
        try:
            for tensors, name, stacked, casts in self._parameters_of:
                row = stacked.squeeze(0)
                tensors[name] = row.to(dtype) if casts else row
            for tensors, name, _, row in rows:
                tensors[name] = row
            yield
            for tensors, name, _, row in rows:
                if tensors[name] is not row:  # assigned by the module
                    row.copy_(tensors[name])
        finally:
            for tensors, name, stacked, _ in [*self._parameters_of, *rows]:
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


def _find_ids(module: nn.Module, part: str, layers: Collection[str]) -> set[int]:
    """Return the ids of a part's layers with the given names in the network."""
    return {id(layer) for name, layer in module.named_modules() if (f"{part}.{name}" if name else part) in layers}


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


class _Mapped(nn.Module):
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
                state[f"{owner}.{name}" if owner else name] = tensor if is_norm else tensor.to(x.dtype)

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


def _share(module: nn.Module, count: int, inputs: Tensor | None, dtype: torch.dtype) -> _Stacked | _Plain:
    """Return a part that all replicas share."""
    plain = count == 1 and not is_accelerated(module, inputs)
    if plain or find_unknown_layer(module) or (inputs is not None and _find_difference(module, inputs, count=1)):
        return _Plain(module, dtype)
    return _Stacked(module, 1)


def _replicate(
    module: nn.Module, count: int, inputs: Tensor | None, name: str, own: Collection[int] | None
) -> _Stacked | _Direct | _Mapped:
    if count == 1 and not is_accelerated(module, inputs):
        return _Direct(module)
    reason = find_unknown_layer(module)
    if reason is None and inputs is not None:
        reason = _find_difference(module, inputs, count=2)
    if reason is None:
        return _Stacked(module, count, own)
    if count == 1:
        return _Direct(module)
    log.info("replicas of the %s go through vmap: %s", name, reason)
    if inputs is not None:
        _check_mapped(module, inputs, name)
    return _Mapped(module, count, own)


@torch.no_grad()
def _check_mapped(module: nn.Module, inputs: Tensor, name: str) -> None:
    try:
        _Mapped(copy.deepcopy(module), 1)(inputs[None])
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise ReplicaError(
            f"Several replicas of the network's {name} cannot be computed together, for instance because its code "
            "branches on values of a tensor. Compute them one by one: Episodic(…, parallel=1), "
            f"Streams(…, together=1), or an Online for each stream. torch reports: {reason}"
        ) from error


@torch.no_grad()
def _find_difference(module: nn.Module, inputs: Tensor, count: int) -> str | None:
    """Return how the stacked form of `count` replicas, 1 or 2, differs from the module; None if it does not.

    It is tested on two batches of different scale and order; of two replicas, the second has other weights.
    """
    stacked = _Stacked(copy.deepcopy(module), count)
    other = copy.deepcopy(module)
    if count == 2:
        for name, parameter in stacked.inner.named_parameters():
            parameter[1].mul_(0.5)  # different, but numerically stable
            other.get_parameter(name).mul_(0.5)
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
