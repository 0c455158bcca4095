"""The Y-shaped network of Test-Time Training: one encoder, two branches (paper, section 2).

`YNet` holds the shared feature extractor θe (`encoder`), the main branch θm (`classifier`) and the self-supervised
branch θs (`ssl`). It takes images as they come, uint8 or floats in [0, 1], and normalises them itself: the
normalisation is part of what was learned, so it travels with the weights.

`split` makes a `YNet` of a model the user has; `YNet.save` and `load` keep one in a single safetensors file together
with its `Card`: architecture, classes, normalisation, task and training record.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from testtime.storage import whole_file

_KEY = "testtime"
_FORMAT = 1
WEIGHTS = Path(__file__).parent.parent / "weights"


class CheckpointError(ValueError):
    """A file that is not a testtime checkpoint, or not one for this network; the message says what is wrong."""


@dataclass(frozen=True)
class Card:
    """What a checkpoint says of its network besides the weights.

    Attributes:
        architecture: The builder's name and arguments; empty for a network that only its owner can build.
        classes: Names of the classes, in the order of the logits; empty if they were never named.
        size: Side of the images it was trained on, in pixels.
        mean: Mean of each channel, on pixels in [0, 1].
        std: Standard deviation of each channel, on pixels in [0, 1].
        task: Name of the self-supervised task.
        augment: Name and arguments of the training augmentation, which is also the test-time one.
        record: How it was trained: settings, data, seeds, loss and error by epoch.
    """

    architecture: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    size: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    task: str = "rotation"
    augment: dict[str, Any] = field(default_factory=lambda: {"name": "crop-flip"})
    record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise ValueError(f"`std` must be positive, got {self.std}.")


class YNet(nn.Module):
    """A shared encoder with a classifier branch and a self-supervised branch.

    Args:
        encoder: θe, from normalised images `(N, C, H, W)` to features.
        classifier: θm, from features to class logits `(N, K)`.
        ssl: θs, from features to the task's outputs `(N, outputs)`.
        card: What to remember about the network; its `mean` and `std` normalise the images.

    Raises:
        ValueError: `mean` or `std` do not fit the encoder's channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, classifier: nn.Module, ssl: nn.Module, card: Card | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier
        self.ssl = ssl
        self.card = card or Card()
        for name in ("mean", "std"):
            count = len(getattr(self.card, name))
            if count != 1 and count != (self.channels or count):
                raise ValueError(f"`{name}` must have a number for each of {self.channels} channels, got {count}.")
        self.register_buffer("mean", torch.tensor(self.card.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(self.card.std).view(-1, 1, 1), persistent=False)

    @property
    def channels(self) -> int | None:
        """Channels of the images it takes, or None where that cannot be told."""
        first = next((module for module in self.encoder.modules() if isinstance(module, nn.Conv2d)), None)
        return None if first is None else first.in_channels

    def normalise(self, images: Tensor) -> Tensor:
        """Images `(..., C, H, W)`, uint8 or floats in [0, 1], as the encoder expects them."""
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        return (images - self.mean) / self.std

    def forward(self, images: Tensor) -> Tensor:
        """Class logits `(N, K)` of images `(N, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """The self-supervised task's outputs `(N, outputs)` of views `(N, C, H, W)`."""
        return self.supervise(self.encode(views))

    def encode(self, images: Tensor) -> Tensor:
        """Features of images `(N, C, H, W)`, uint8 or floats in [0, 1]."""
        return self.encoder(self.normalise(images))

    def classify(self, features: Tensor) -> Tensor:
        """Class logits `(N, K)` of features."""
        return self.classifier(features)

    def supervise(self, features: Tensor) -> Tensor:
        """The self-supervised task's outputs `(N, outputs)` of features."""
        return self.ssl(features)

    def describe(self, **changes: Any) -> YNet:
        """Change fields of the card that are not arithmetic (`classes`, `size`, `task`, `augment`, `record`)."""
        fixed = {"mean", "std", "architecture"} & changes.keys()
        if fixed:
            raise ValueError(f"`{sorted(fixed)[0]}` is fixed when a network is made and cannot be described anew.")
        self.card = replace(self.card, **changes)
        return self

    def fingerprint(self) -> str:
        """A short text that tells this network's numbers from any other's."""
        digest = hashlib.sha256(repr((self.card.mean, self.card.std)).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write weights and card to one safetensors file, whole or not at all."""
        metadata = {_KEY: json.dumps({"format": _FORMAT, **asdict(self.card)})}
        # Clones, because safetensors refuses tensors that share memory, as tied weights do.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.state_dict().items()}
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)


def load(source: str | Path, net: YNet | None = None) -> YNet:
    """Read a network from a checkpoint file, or one that ships with the package by its name.

    Args:
        source: Path of a file that `YNet.save` wrote, or a name from `testtime.networks.shipped()`.
        net: The network to read the weights into; needed only for one that `split` made of the user's own model.

    Raises:
        CheckpointError: The file is missing, truncated, foreign, or does not fit `net`.
    """
    path = _find(source)
    card, tensors = _read(path)
    if net is None:
        if not card.architecture:
            raise CheckpointError(
                f"{path}: this network was made of a custom model. Build it again and call load({str(source)!r}, net)."
            )
        from testtime.networks.resnet import build  # resnet.py builds YNets, so it imports this module

        try:
            net = build(card)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: unknown architecture {card.architecture}: {error}") from None
    elif (card.mean, card.std) != (net.card.mean, net.card.std):
        raise CheckpointError(
            f"{path}: saved with normalisation mean {card.mean}, std {card.std}; "
            f"this network has mean {net.card.mean}, std {net.card.std}."
        )
    wanted = net.state_dict()
    for name in wanted.keys() | tensors.keys():
        if name not in tensors:
            raise CheckpointError(f"{path}: tensor {name!r} is missing.")
        if name not in wanted:
            raise CheckpointError(f"{path}: tensor {name!r} does not belong to this network.")
        if wanted[name].shape != tensors[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {tuple(tensors[name].shape)}, "
                f"the network needs {tuple(wanted[name].shape)}."
            )
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(f"{path}: tensor {name!r} has values that are not finite.")
    net.load_state_dict(tensors)
    net.card = replace(card, architecture=net.card.architecture or card.architecture)
    return net.eval()


def shipped() -> tuple[str, ...]:
    """Names of the trained networks that ship with the package."""
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if str(source) in shipped():
        return WEIGHTS / f"{source}.safetensors"
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a checkpoint file.")
    names = ", ".join(shipped()) or "none"
    raise CheckpointError(f"No file and no shipped network is called {str(source)!r} (shipped: {names}).")


def _read(path: Path) -> tuple[Card, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file ({error}).") from None
    if _KEY not in metadata:
        raise CheckpointError(f"{path}: a safetensors file, but not one that testtime wrote.")
    try:
        fields = json.loads(metadata[_KEY])
        version = fields.pop("format")
        if version != _FORMAT:
            raise CheckpointError(f"{path}: format {version}; this version of testtime reads format {_FORMAT}.")
        fields |= {name: tuple(fields[name]) for name in ("classes", "mean", "std")}
        card = Card(**fields)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its testtime description cannot be read ({error!r}).") from None
    return card, tensors


def split(
    model: nn.Module,
    at: str,
    outputs: int = 4,
    *,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    classes: Sequence[str] = (),
    size: int | None = None,
    augment: dict[str, Any] | None = None,
    seed: int = 0,
) -> YNet:
    """Make a `YNet` of a model the user has, cut behind one of its layers.

    The model itself is left as it is. The classifier branch is everything behind the cut; the self-supervised branch
    is a copy of that with a new last layer. The new layer is random: train the network jointly before adapting it.

    Args:
        model: A classifier whose computation `torch.fx` can trace, and in which one tensor crosses the cut.
        at: Name of the layer (as in `model.named_modules()`) that ends the shared encoder.
        outputs: Outputs of the self-supervised task (4 for rotation).
        mean: Channel means the model expects its input to be normalised with, on pixels in [0, 1].
        std: Channel standard deviations, likewise. The default passes images through unchanged.
        classes: Names of the classes.
        size: Side of the images the model is made for.
        augment: Training augmentation, see `testtime.augment.make`.
        seed: Seed of the new last layer.

    Raises:
        ValueError: The cut is not possible; the message names the layers where it is.
    """
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("The model has lazy layers, which have no weights yet: call it on an image first.")
    graph = _trace(model)
    cuts = _possible_cuts(graph)
    if at not in cuts:
        if not cuts:
            raise ValueError("This model has no layer to split at: no single tensor carries everything on.")
        known = "cannot be split behind" if at in dict(model.named_modules()) else "has no layer"
        raise ValueError(f"The model {known} {at!r}. It can be split at: {', '.join(cuts)}.")
    encoder, head = _cut(model, graph, cuts[at])
    last = _last_layer(head)
    if last is None:
        raise ValueError(f"There is no linear layer behind {at!r} to replace in the self-supervised branch.")
    ssl = copy.deepcopy(head)
    name, layer = last
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = nn.Linear(layer.in_features, outputs, bias=layer.bias is not None)
    ssl.set_submodule(name, fresh.to(layer.weight.device, layer.weight.dtype))
    ssl.recompile()
    card = Card(classes=tuple(classes), size=size, mean=tuple(mean), std=tuple(std))
    if augment is not None:
        card = replace(card, augment=augment)
    net = YNet(encoder, head, ssl, card).to(layer.weight.device)
    net.mean, net.std = net.mean.to(layer.weight.dtype), net.std.to(layer.weight.dtype)
    return net.train(model.training)


def _trace(model: nn.Module) -> fx.Graph:
    modes = [(module, module.training) for module in model.modules()]
    try:
        graphs = []
        for mode in (False, True):
            for module, _ in modes:  # not .train(mode): models may override it
                module.training = mode
            graphs.append(fx.Tracer().trace(model))
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace this model ({type(error).__name__}: {error}). "
            "Build YNet(encoder, classifier, ssl) from its parts instead."
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode
    if str(graphs[0]) != str(graphs[1]):
        raise ValueError(
            "This model computes differently in training mode by its own code, so it cannot be traced once for both. "
            "Build YNet(encoder, classifier, ssl) from its parts instead."
        )
    return graphs[0]


def _possible_cuts(graph: fx.Graph) -> dict[str, fx.Node]:
    """Layer name → the node that ends it, for every layer whose output alone feeds all that follows."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    computed = [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    last_use = {node: max((order[user] for user in node.users), default=-1) for node in graph.nodes}
    ends: dict[str, fx.Node] = {}
    for node in computed:
        # The stack lists every module the node lies in, from the model itself ("") to the layer.
        for name in node.meta.get("nn_module_stack") or {}:
            ends[name] = node
    linear = [node for node in computed if node.op == "call_module"]
    cuts = {}
    for name, end in ends.items():
        # Weights that the model reads directly (get_attr) may stand anywhere; they are fetched where they are used.
        alive = [node for node in graph.nodes if node.op != "get_attr" and order[node] <= order[end] < last_use[node]]
        if name and alive == [end] and any(order[node] > order[end] for node in linear):
            cuts[name] = end
    return cuts


def _cut(model: nn.Module, graph: fx.Graph, end: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    model = copy.deepcopy(model)
    front, back = fx.Graph(), fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            copied[node] = front.node_copy(node, lambda old: copied[old])
        if node is end:
            break
    front.output(copied[end])
    copied = {end: back.placeholder("features")}
    for node in graph.nodes:
        if node.op == "get_attr" or (node > end and node not in copied):
            copied[node] = back.node_copy(node, lambda old: copied[old])
    return _with_what_it_uses(model, front), _with_what_it_uses(model, back)


def _with_what_it_uses(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    whole = fx.GraphModule(model, graph)
    whole.graph.eliminate_dead_code()  # weights that only the other part reads
    return fx.GraphModule(whole, whole.graph)  # takes along what the graph still names


def _last_layer(head: fx.GraphModule) -> tuple[str, nn.Linear] | None:
    for node in reversed(list(head.graph.nodes)):
        if node.op == "call_module" and isinstance(layer := operator.attrgetter(node.target)(head), nn.Linear):
            return node.target, layer
    return None
