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
import operator
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from testtime.networks.card import Card, CheckpointError, check_format, check_plain, compare_tensors, read_card, show
from testtime.storage import FileError
from testtime.tensorfile import read_tensors, write_tensors

_KEY = "testtime"
_FORMAT = 1
WEIGHTS = Path(__file__).parent.parent / "weights"


class YNet(nn.Module):
    """A shared encoder with a classifier branch and a self-supervised branch.

    Args:
        encoder: θe, from normalised images `(N, C, H, W)` to features.
        classifier: θm, from features to class logits `(N, K)`.
        ssl: θs, from features to the task's outputs `(N, outputs)`.
        card: What to remember about the network; its `mean` and `std` normalise the images.

    Raises:
        ValueError: The card does not fit the encoder's channels or the classifier's outputs.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, classifier: nn.Module, ssl: nn.Module, card: Card | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier
        self.ssl = ssl
        self.card = card or Card()
        self._check_card(self.card)
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        with torch.inference_mode(False):
            for name in ("mean", "std"):
                numbers = torch.tensor(getattr(self.card, name), dtype=torch.float32, device=device)
                self.register_buffer(name, numbers.view(-1, 1, 1), persistent=False)

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

    def _check_card(self, card: Card) -> None:
        """Check that a card fits this network.

        Raises:
            ValueError: It does not fit the encoder's channels or the classifier's outputs, where those are known.
        """
        for name in ("mean", "std"):
            count = len(getattr(card, name))
            if count != 1 and count != (self.channels or count):
                raise ValueError(f"`{name}` must have a number for each of {self.channels} channels, got {count}.")
        outputs = _count_outputs(self.classifier)
        if card.classes and outputs not in (None, len(card.classes)):
            raise ValueError(f"`classes` must name the network's {outputs} outputs, got {len(card.classes)} names.")

    def describe(self, **changes: Any) -> YNet:
        """Change fields of the card that are not arithmetic (`classes`, `size`, `task`, `augment`, `record`).

        Raises:
            ValueError: A field cannot be changed, is of the wrong type, or does not fit the network.
        """
        fixed = {"mean", "std", "architecture"} & changes.keys()
        if fixed:
            raise ValueError(f"`{sorted(fixed)[0]}` is fixed when a network is made and cannot be described anew.")
        card = replace(self.card, **changes)
        self._check_card(card)
        self.card = card
        return self

    def fingerprint(self) -> str:
        """A short text that tells this network's numbers from any other's."""
        digest = hashlib.sha256(repr((self.card.mean, self.card.std)).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())  # numpy has no bfloat16
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write weights and card to one safetensors file, whole or not at all.

        Raises:
            ValueError: The card has numbers that are not finite.
            OSError: The file cannot be written.
        """
        about = {"format": _FORMAT, **asdict(self.card)}
        check_plain(about)
        write_tensors(path, self.state_dict(), _KEY, about)


def load(source: str | Path, net: YNet | None = None) -> YNet:
    """Read a network from a checkpoint file, or a bundled one by its name.

    Nothing is allocated, and nothing of `net` changed, before the file is known to fit.

    Args:
        source: Path of a file that `YNet.save` wrote, or a name from `testtime.networks.shipped()`.
        net: The network to read the weights into; needed only for one that `split` made of the user's own model.

    Raises:
        CheckpointError: The file is missing, damaged, foreign, or does not fit `net`.
    """
    path = _find(source)
    card, tensors = _read(path)
    if net is None and not card.architecture:
        raise CheckpointError(path, "a network made of a custom model", "build it again as `net` and call load(…, net)")
    try:
        if net is None:
            net = _build(card, tensors)
        else:
            _refuse_lazy_layers(net)
            _compare_cards(card, net.card)
            compare_tensors(tensors, net.state_dict())
        card = replace(card, architecture=net.card.architecture or card.architecture)
        net._check_card(card)
    except ValueError as error:
        raise CheckpointError(path, str(error).rstrip(".")) from None
    net.load_state_dict(tensors)
    net.card = card
    return net.eval()


def shipped() -> tuple[str, ...]:
    """Names of the trained networks that are bundled with the package."""
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def _find(source: str | Path) -> Path:
    if not os.path.isfile(source) and str(source) in shipped():
        return WEIGHTS / f"{source}.safetensors"
    return Path(source)


def _read(path: Path) -> tuple[Card, dict[str, Tensor]]:
    try:
        about, tensors = read_tensors(path, _KEY)
        if about is None:
            raise ValueError("a safetensors file, but not a network of testtime")
        check_format(path, about.pop("format", None), _FORMAT)
        return read_card(about), tensors
    except CheckpointError:
        raise
    except FileError as error:
        known = "" if os.path.exists(path) else f"the bundled networks are {', '.join(shipped()) or 'none'}"
        raise CheckpointError(path, error.fault, error.remedy or known) from None
    except ValueError as error:
        raise CheckpointError(path, str(error).rstrip(".")) from None


def _build(card: Card, tensors: dict[str, Tensor]) -> YNet:
    """The network that a card describes, its weights not yet set, once the tensors are known to be its own.

    Raises:
        ValueError: They are not.
    """
    from testtime.networks.resnet import build  # resnet.py builds YNets, so it imports this module

    depth = card.architecture.get("depth")
    if isinstance(depth, int) and depth > len(tensors):
        raise ValueError(f"the architecture has {show(depth)} layers, the file {len(tensors)} tensors")
    plan = build(card, "meta")
    compare_tensors(tensors, plan.state_dict())
    with torch.inference_mode(False):
        for part in (plan.encoder, plan.classifier, plan.ssl):
            part.to_empty(device="cpu")
    return YNet(plan.encoder, plan.classifier, plan.ssl, plan.card)


def _compare_cards(card: Card, own: Card) -> None:
    """Check that a network's own card does not contradict the card of a file."""
    if (card.mean, card.std) != (own.mean, own.std):
        raise ValueError(
            f"saved with normalisation mean {show(card.mean)}, std {show(card.std)}; "
            f"this network has mean {own.mean}, std {own.std}"
        )
    there, here = ({**one.architecture, "size": None} for one in (card, own))  # the network takes any size
    if card.architecture and own.architecture and there != here:
        raise ValueError(f"its architecture is {show(card.architecture)}, this network's {show(own.architecture)}")


def _count_outputs(classifier: nn.Module) -> int | None:
    """How many classes a classifier distinguishes, None where that cannot be told."""
    last: nn.Module | None = classifier
    while type(last) is nn.Sequential and len(last):
        last = last[-1]
    if isinstance(last, fx.GraphModule):
        (end,) = (node.args[0] for node in last.graph.nodes if node.op == "output")
        is_layer = isinstance(end, fx.Node) and end.op == "call_module"
        last = last.get_submodule(str(end.target)) if is_layer else None
    return last.out_features if isinstance(last, nn.Linear) else None


@torch.inference_mode(False)  # so that the parts can be trained wherever they are made
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
    _refuse_lazy_layers(model)
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
        bias = layer.bias is not None
        fresh = nn.Linear(layer.in_features, outputs, bias, device="cpu", dtype=torch.float32)
    ssl.set_submodule(name, fresh.to(layer.weight.device, layer.weight.dtype))
    ssl.recompile()
    card = Card(classes=tuple(classes), size=size, mean=tuple(mean), std=tuple(std))
    if augment is not None:
        card = replace(card, augment=augment)
    net = YNet(encoder, head, ssl, card).to(layer.weight.device)
    net.mean, net.std = net.mean.to(layer.weight.dtype), net.std.to(layer.weight.dtype)
    return net.train(model.training)


def _refuse_lazy_layers(model: nn.Module) -> None:
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("The model has lazy layers, which have no weights yet: call it on an image first.")


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
