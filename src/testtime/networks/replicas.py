"""S independent copies of a network as one network.

A batch for each replica goes in, `(S, B, C, H, W)`, an answer for each comes out, `(S, B, K)`; replica s sees and
changes its own parameters only. Every parameter and buffer of the network is held once, stacked to `(S, *shape)`, so
one optimizer step moves all replicas and a row of the tensors is one replica.

Inside, the replicas' batches are concatenated, `(S·B, C, H, W)`, and run through the network's own code: what a network
does to each image by itself needs no change. Only layers with parameters are replaced by forms that use another set of
them for each B images (stacked.py). A part with parameters anywhere else goes through `torch.func.vmap` instead. Which
of the two is right is tried out on real numbers.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from testtime import kernels
from testtime.networks.packed import PackedParameters
from testtime.networks.stacked import NORMS, BatchNorm, Stacking, find_unknown_layer, stack_layers
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic

log = logging.getLogger(__name__)

Part = Literal["encoder", "classifier", "ssl"]
Statistics = Literal["running", "source", "batch"]
PARTS: tuple[Part, ...] = ("encoder", "classifier", "ssl")


class Replicas:
    """`count` copies of a `YNet` that answer, learn and are reset together.

    Args:
        net: The network to copy; it is not changed and shares no memory with the copies.
        count: How many copies, S.
        parts: Which parts each replica has for itself. The others are held once and serve all: adaptation never
            changes the classifier, so a copy of it for each replica would be waste.
        example: Two images or more `(N, C, H, W)` of the size to come, for trying the copies out against the network.
        dtype: What the layers compute in. Parameters, and so updates, stay float32.
    """

    def __init__(
        self,
        net: YNet,
        count: int,
        parts: Sequence[Part] = PARTS,
        example: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if count < 1:
            raise ValueError(f"`count` must be at least 1, got {count}.")
        self._given = net, count, parts, example, dtype
        self.count, self.dtype = count, dtype
        self._normalise = copy.deepcopy(net).normalise
        self._mean, self._std = net.mean.clone(), net.std.clone()
        self._known = type(net).normalise is YNet.normalise
        self.parts: dict[Part, _Stacked | _Mapped | _Plain] = {}
        inputs = None if example is None else net.normalise(example)
        for name in PARTS:
            module = copy.deepcopy(getattr(net, name)).eval().requires_grad_(False)
            given = inputs
            if name == "encoder" and given is not None:
                with torch.no_grad():
                    inputs = module(given)  # what the two branches will see
            if name in parts:
                self.parts[name] = _replicate(module, count, given, name)
            else:
                self.parts[name] = _share(module, given, dtype)
        modules = [module for part in self.parts.values() for module in part.modules()]
        self._batch_norms = [m for m in modules if isinstance(m, (BatchNorm, nn.modules.batchnorm._BatchNorm))]
        self.tensors: dict[str, Tensor] = {}
        for name in parts:
            inner = self.parts[name].inner
            for key, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
                self.tensors[f"{name}.{key}"] = tensor
        parameters = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}
        self.packed = PackedParameters(parameters, count, self._mean.device)
        buffers = [tensor for tensor in self.tensors.values() if not isinstance(tensor, nn.Parameter)]
        self.pieces = [self.packed.numbers, *buffers]
        """Everything that can change, `(S, ...)` each."""
        self.has_statistics = False
        """Whether some of it changes as images go through, see `learning`."""
        self.use_statistics("running")

    def encode(self, images: Tensor) -> Tensor:
        """Features `(S, B, ...)` of images `(S, B, C, H, W)`."""
        return self.parts["encoder"](self._prepare(images))

    def _prepare(self, images: Tensor) -> Tensor:
        if self._known:
            pixels = kernels.take_over("normalise", images.flatten(0, 1), self._mean, self._std, self.dtype)
            if pixels is not None:
                return pixels.unflatten(0, images.shape[:2])
        return self._normalise(images).to(self.dtype)

    def classify(self, features: Tensor) -> Tensor:
        """Class logits `(S, B, K)` of features `(S, B, ...)`."""
        return self.parts["classifier"](features)

    def supervise(self, features: Tensor) -> Tensor:
        """The task's outputs `(S, B, outputs)` of features `(S, B, ...)`."""
        return self.parts["ssl"](features)

    def __call__(self, images: Tensor) -> Tensor:
        """Class logits `(S, B, K)` of images `(S, B, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """The task's outputs `(S, B, outputs)` of views `(S, B, C, H, W)`."""
        return self.supervise(self.encode(views))

    def use_statistics(self, statistics: Statistics) -> None:
        """Choose what BatchNorm normalises with.

        Args:
            statistics: "running": the tracked ones, and within `learning` those of the images at hand, which the
                tracked ones follow; "source": always the tracked ones, which stay; "batch": always those of the images.
        """
        self._statistics: Statistics = statistics
        self.has_statistics = statistics == "running" and len(self.pieces) > 1
        for module in self._batch_norms:
            module.training = statistics == "batch"
            module.track_running_stats = statistics != "batch"

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Within it, BatchNorm uses and tracks the statistics of what it sees, if it is to.

        Nothing else has a mode here: dropout, whose noise would not be a function of the sample, stays off.
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
        """Let BatchNorm use and track the statistics of what it sees (True), or only the tracked ones (False)."""
        for module in self._batch_norms:
            module.training = training

    def parameters(self, parts: Iterable[Part], norms_only: bool = False) -> dict[str, Tensor]:
        """The stacked parameters `(S, ...)` of some parts by name, without buffers; or those of their norms alone."""
        prefixes = tuple(f"{part}." for part in parts)
        found = {name: tensor for name, tensor in self.packed.parameters.items() if name.startswith(prefixes)}
        if not norms_only:
            return found
        modules = [module for part in self.parts.values() for module in part.modules() if isinstance(module, NORMS)]
        own = {id(tensor) for module in modules for tensor in module.parameters(recurse=False)}
        return {name: tensor for name, tensor in found.items() if id(tensor) in own}

    def twin(self) -> Replicas:
        """As many replicas of the network as it was given, normalising as these do."""
        made = Replicas(*self._given)
        made.use_statistics(self._statistics)
        return made

    def read(self, index: int) -> dict[str, Tensor]:
        """A copy of one replica's tensors, by their names in the network."""
        return {name: tensor[index].detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def write(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Set one replica to tensors of a network, by their names."""
        for name, tensor in self.tensors.items():
            tensor[index] = state[name]


def put_rows(piece: Tensor, old: Tensor, rows: Tensor) -> None:
    """Where `rows`, bool `(S,)`, is true, set a tensor `(S, ...)` to an old one; the others keep every bit."""
    if kernels.take_over("put_rows", piece, old, rows) is None:
        piece.copy_(torch.where(rows.view(-1, *[1] * (piece.dim() - 1)), old, piece))


class _Plain(nn.Module):
    """A part that is held once and serves the replicas one after another, where it cannot serve them at once."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = module.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(batch.contiguous()) for batch in x])


class _Stacked(nn.Module):
    """A part whose replicas' batches are concatenated."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.inner = stack_layers(module, Stacking(count))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(_join(x)).unflatten(0, x.shape[:2])


def _join(x: Tensor) -> Tensor:
    x = x.flatten(0, 1)  # (S, B, ...) → (S·B, ...)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


class _Mapped(nn.Module):
    """A part whose replicas go through `torch.func.vmap`."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.template = [module]  # in a list: its own tensors are only placeholders and not part of the state
        self.inner = copy.deepcopy(module)
        stack = Stacking(count)
        for owner in self.inner.modules():
            for tensors in (owner._parameters, owner._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = stack(tensor)

    def forward(self, x: Tensor) -> Tensor:
        for own, inner in zip(self.template[0].modules(), self.inner.modules(), strict=True):
            own.training = inner.training
        state = dict(self.inner.named_buffers())
        for owner, module in self.inner.named_modules():
            keeps = isinstance(module, nn.modules.batchnorm._BatchNorm)  # it computes in float32 whatever comes in
            for name, tensor in module.named_parameters(recurse=False):
                state[f"{owner}.{name}" if owner else name] = tensor if keeps else tensor.to(x.dtype)

        def one(tensors: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(self.template[0], tensors, batch)

        with _plain_attention():
            return vmap(one, randomness="different")(state, x.contiguous())


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention step by step: the fused forms have no rule for mapping, or no gradient."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _share(module: nn.Module, inputs: Tensor | None, dtype: torch.dtype) -> _Stacked | _Plain:
    """A part held once for all replicas: one replica that all their images go through."""
    unfit = find_unknown_layer(module) or (inputs is not None and _find_difference(module, inputs, count=1))
    return _Plain(module, dtype) if unfit else _Stacked(module, 1)


def _replicate(module: nn.Module, count: int, inputs: Tensor | None, name: str) -> _Stacked | _Mapped:
    reason = find_unknown_layer(module)
    if reason is None and inputs is not None:
        reason = _find_difference(module, inputs, count=2)
    if reason is None:
        return _Stacked(module, count)
    log.info("replicas of the %s go through vmap: %s", name, reason)
    return _Mapped(module, count)


@torch.no_grad()
def _find_difference(module: nn.Module, inputs: Tensor, count: int) -> str | None:
    """What differs between the stacked form of `count` replicas, 1 or 2, and the module itself; None: nothing does.

    Two batches go through it, different in scale and order; with two replicas the second has other weights as well.
    """
    stacked = _Stacked(copy.deepcopy(module), count)
    other = copy.deepcopy(module)
    if count == 2:
        for name, parameter in stacked.inner.named_parameters():
            parameter[1].mul_(0.5)  # different but tame
            other.get_parameter(name).mul_(0.5)
    second = inputs.flip(0) * 0.5 + 0.25
    try:
        with arithmetic("fp32", inputs.device):  # rounding must not look like a fault
            # forward, since a traced model that is called prints where it fails, besides raising
            together = stacked.inner.forward(_join(torch.stack([inputs, second]))).unflatten(0, (2, -1))
            alone = torch.stack([module(inputs), other(second)])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"concatenated, it fails with {error}"
    if together.shape != alone.shape:
        return f"concatenated, its shape is {tuple(together.shape)}, not {tuple(alone.shape)}"
    if not torch.allclose(together, alone, rtol=1e-2, atol=1e-3 * float(alone.abs().max() + 1e-6)):
        return "concatenated, its replicas affect each other"
    return None
