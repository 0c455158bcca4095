"""S independent copies of a network as one network.

The input is a batch per replica, `(S, B, C, H, W)`, the output logits per replica, `(S, B, K)`; each replica has its
own parameters. Parameters and buffers are stacked to `(S, *shape)`, so that one optimizer step updates all replicas and
row s of every tensor belongs to replica s.

Internally the batches are concatenated, `(S·B, C, H, W)`, and run through the network's own code, in which layers with
parameters are replaced by ones that apply another set of parameters to every B images (stacked.py); so are parameters
outside of layers that broadcast over images (bare.py). A part with others runs in `torch.func.vmap` instead. A single
replica is called directly, with its own layers, unless there are kernels for the stacked ones. Which form is right is
tested on an example (replica_parts.py).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.networks.batch_norms import BatchNorms
from testtime.networks.packed import PackedParameters
from testtime.networks.replica_parts import DirectPart, MappedPart, PlainPart, StackedPart, replicate, share
from testtime.networks.separable import compute_in_halves, is_separable
from testtime.networks.stacked_norms import NORMS
from testtime.networks.ynet import YNet

Part = Literal["encoder", "classifier", "ssl"]
PARTS: tuple[Part, ...] = ("encoder", "classifier", "ssl")


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
        self.parts: dict[Part, StackedPart | DirectPart | MappedPart | PlainPart] = {}
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
                self.parts[name] = replicate(module, count, given, name, chosen)
            else:
                self.parts[name] = share(module, count, given, dtype)
        self._separable: set[Part] = set()
        if example is not None and count == 1 and not kernels.tuning(example.device).waits:
            self._separable = _find_separable(self.parts, self._prepare(example[None]))
        self.batch_norms = BatchNorms(module for part in self.parts.values() for module in part.modules())
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
        stacked = [name for name, part in self.parts.items() if isinstance(part, StackedPart) and part.accelerated]
        innermost = {name for name in parameters if name.partition(".")[0] in stacked}
        self.packed = PackedParameters(parameters, count, self._mean.device, innermost)
        buffers = [tensor for tensor in self.tensors.values() if not isinstance(tensor, nn.Parameter)]
        self.pieces = [self.packed.numbers, *buffers]
        """Everything that can change, `(S, ...)` each."""

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
        outputs = self._compute_in_halves(images, "classifier")
        return self.classify(self.encode(images)) if outputs is None else outputs

    def self_supervise(self, views: Tensor) -> Tensor:
        """Return the task's outputs `(S, B, ...)` of views `(S, B, C, h, w)`."""
        outputs = self._compute_in_halves(views, "ssl")
        return self.supervise(self.encode(views)) if outputs is None else outputs

    def encode_both(self, views: Tensor, images: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the features of views and of images from one pass; None where that cannot be done."""
        encoder = self.parts["encoder"]  # stacked, it is known to treat images independently, but for their statistics
        independent = isinstance(encoder, StackedPart) and self.batch_norms.statistics != "batch"
        if not independent or views.shape[2:] != images.shape[2:]:
            return None
        features = encoder(torch.cat([self._prepare(views), self._prepare(images)], dim=1))
        first, second = features.split([views.shape[1], images.shape[1]], dim=1)
        return first, second

    def _compute_in_halves(self, images: Tensor, branch: Part) -> Tensor | None:
        chain: tuple[Part, ...] = ("encoder", branch)
        if not (torch.is_grad_enabled() and self._separable.issuperset(chain)):
            return None
        return compute_in_halves([self.parts[name] for name in chain], self._prepare(images))

    def is_separable(self, *parts: Part) -> bool:
        """Whether parts compute each image as if it were alone, except within `learning` of `batch_norms`."""
        return self._separable.issuperset(parts) and self.batch_norms.statistics != "batch"

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
        made.batch_norms.use(self.batch_norms.statistics)
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


def compute_both(replicas: Replicas, views: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the task's outputs of views and the class logits of images, encoded in one pass if possible."""
    features = replicas.encode_both(views, images)
    if features is None:
        return replicas.self_supervise(views), replicas(images)
    return replicas.supervise(features[0]), replicas.classify(features[1])


def put_rows(piece: Tensor, old: Tensor, rows: Tensor) -> None:
    """Overwrite the rows of a tensor `(S, ...)` where `rows`, bool `(S,)`, is true; other rows stay unchanged."""
    if kernels.take_over("put_rows", piece, old, rows) is None:
        torch.where(rows.view(-1, *[1] * (piece.dim() - 1)), old, piece, out=piece)


@torch.no_grad()
def _find_separable(parts: Mapping[Part, nn.Module], pixels: Tensor) -> set[Part]:
    """Return the parts of a single replica whose batches may be split or joined."""
    features = parts["encoder"](pixels)
    inputs = {name: pixels if name == "encoder" else features for name in parts}
    return {name for name, part in parts.items() if is_separable(part, inputs[name])}


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


def _find_ids(module: nn.Module, part: str, layers: Collection[str]) -> set[int]:
    """Return the ids of a part's layers with the given names in the network."""
    return {id(layer) for name, layer in module.named_modules() if (f"{part}.{name}" if name else part) in layers}
