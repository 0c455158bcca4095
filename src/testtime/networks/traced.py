"""Cut a model in two by its graph, where `torch.fx` can trace it: the parts accept images of any size."""

from __future__ import annotations

import copy
import operator

from torch import fx, nn

from testtime.networks.parts import disable_inplace


class Trace:
    """The graph of a model and the layers after which it can be cut.

    Args:
        model: The model, which is not changed.

    Attributes:
        cuts: Name of each layer whose output alone feeds the rest → its last node.

    Raises:
        ValueError: It cannot be traced, or computes differently in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        graphs = []
        for mode in (True, False):
            self.model = copy.deepcopy(model)  # tracing adds attributes to it
            for module in self.model.modules():  # not .train(mode): models may override it
                module.training = mode
            try:
                graphs.append(_Tracer().trace(self.model))
            except Exception as error:
                raise ValueError(f"torch.fx cannot trace it ({type(error).__name__})") from None
        if str(graphs[0]) != str(graphs[1]):
            raise ValueError("its code computes differently in training mode")
        for own, module in zip(model.modules(), self.model.modules(), strict=True):
            module.training = own.training
        self.graph = graphs[1]
        self.cuts = _find_cuts(self.graph)

    def cut(self, at: str) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the part up to a layer, which is one of `cuts`, and the part after it."""
        end, model = self.cuts[at], copy.deepcopy(self.model)
        front, back = fx.Graph(), fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op != "output":
                copied[node] = front.node_copy(node, lambda old: copied[old])
            if node is end:
                break
        front.output(copied[end])
        copied = {end: back.placeholder("features")}
        for node in self.graph.nodes:
            if node.op == "get_attr" or (node > end and node not in copied):
                copied[node] = back.node_copy(node, lambda old: copied[old])
                if copied[node].kwargs.get("inplace"):
                    copied[node].update_kwarg("inplace", False)
        encoder, classifier = _extract(model, front), _extract(model, back)
        disable_inplace(classifier)
        return encoder, classifier


class _Tracer(fx.Tracer):
    """Does not trace into layers that are the same in a graph of any mode: those without inner layers, and norms."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_norm = isinstance(m, nn.modules.batchnorm._BatchNorm)
        return is_norm or next(m.children(), None) is None or super().is_leaf_module(m, module_qualified_name)


def _find_cuts(graph: fx.Graph) -> dict[str, fx.Node]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    computed = [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    last_use = {node: max((order[user] for user in node.users), default=-1) for node in graph.nodes}
    ends: dict[str, fx.Node] = {}
    for node in computed:
        # The stack lists every module that contains the node, from the model ("") to the layer.
        for name in node.meta.get("nn_module_stack") or {}:
            ends[name] = node
    layers = [node for node in computed if node.op == "call_module"]
    cuts = {}
    for name, end in ends.items():
        # Weights that the model reads directly (get_attr) may come before the split; both parts can read them.
        alive = [node for node in graph.nodes if node.op != "get_attr" and order[node] <= order[end] < last_use[node]]
        if name and alive == [end] and any(order[node] > order[end] for node in layers):
            cuts[name] = end
    return cuts


def _extract(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    whole = fx.GraphModule(model, graph)
    whole.graph.eliminate_dead_code()  # weights that only the other part reads
    return fx.GraphModule(whole, whole.graph)  # copies only the submodules that the graph uses


def find_last_layer(part: fx.GraphModule) -> str | None:
    """Return the name of the last linear layer or 1×1 convolution that a part calls."""
    for node in reversed(list(part.graph.nodes)):
        if node.op == "call_module" and is_last_layer(operator.attrgetter(node.target)(part)):
            return node.target
    return None


def is_last_layer(layer: nn.Module) -> bool:
    """Return whether a layer can be replaced by one with another number of outputs."""
    if isinstance(layer, nn.Conv2d):
        return layer.kernel_size == (1, 1) and layer.groups == 1
    return isinstance(layer, nn.Linear)
