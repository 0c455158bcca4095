"""Wrap any model as a `YNet`, by splitting it after one of its layers and adding a second branch."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from testtime.networks.card import Card
from testtime.networks.ynet import YNet, check_no_lazy_layers


@torch.inference_mode(False)  # so that the parts can be trained
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
    """Make a `YNet` from any model, split after one of its layers.

    The model is not changed. The classifier branch is everything after the split; the self-supervised branch is a copy
    of it with a new last layer, which is initialised at random: train the network jointly before adapting it.

    Args:
        model: A classifier that `torch.fx` can trace, and in which a single tensor crosses the split.
        at: Name of the last layer of the shared encoder, as in `model.named_modules()`.
        outputs: Outputs of the self-supervised task (4 for rotation).
        mean: Channel means that the model's input is normalised with, on pixels in [0, 1].
        std: Channel standard deviations, likewise. The default leaves images unchanged.
        classes: Class names.
        size: Side of the images.
        augment: Training augmentation, see `testtime.augment.make`.
        seed: Seed of the new last layer.

    Raises:
        ValueError: The model cannot be split there; the message names the layers where it can.
    """
    check_no_lazy_layers(model)
    graph = _trace(model)
    cuts = _possible_cuts(graph)
    if at not in cuts:
        if not cuts:
            raise ValueError("This model cannot be split: there is no layer whose output alone feeds the rest.")
        known = "cannot be split after" if at in dict(model.named_modules()) else "has no layer"
        raise ValueError(f"The model {known} {at!r}. It can be split at: {', '.join(cuts)}.")
    encoder, head = _cut(model, graph, cuts[at])
    last = _last_layer(head)
    if last is None:
        raise ValueError(f"There is no linear layer after {at!r} to replace in the self-supervised branch.")
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
            "The code of this model computes differently in training mode, so one trace cannot serve both modes. "
            "Build YNet(encoder, classifier, ssl) from its parts instead."
        )
    return graphs[0]


def _possible_cuts(graph: fx.Graph) -> dict[str, fx.Node]:
    """Map the name of each layer whose output alone feeds the rest of the model to its last node."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    computed = [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    last_use = {node: max((order[user] for user in node.users), default=-1) for node in graph.nodes}
    ends: dict[str, fx.Node] = {}
    for node in computed:
        # The stack lists every module that contains the node, from the model ("") to the layer.
        for name in node.meta.get("nn_module_stack") or {}:
            ends[name] = node
    linear = [node for node in computed if node.op == "call_module"]
    cuts = {}
    for name, end in ends.items():
        # Weights that the model reads directly (get_attr) may come before the split; both parts can read them.
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
    return _extract(model, front), _extract(model, back)


def _extract(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    whole = fx.GraphModule(model, graph)
    whole.graph.eliminate_dead_code()  # weights that only the other part reads
    return fx.GraphModule(whole, whole.graph)  # copies only the submodules that the graph uses


def _last_layer(head: fx.GraphModule) -> tuple[str, nn.Linear] | None:
    for node in reversed(list(head.graph.nodes)):
        if node.op == "call_module" and isinstance(layer := operator.attrgetter(node.target)(head), nn.Linear):
            return node.target, layer
    return None
