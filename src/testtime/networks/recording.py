"""Where a model can be cut in two: a forward pass is recorded, layer by layer, with the graph of its gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from testtime.networks.outputs import run
from testtime.networks.parts import Back, Front, Stub, Template, disable_inplace, make_constants, replace_layers

_GOAL = 2 / 3
"""Share of the layers before the cut that is chosen."""
_OTHER_LAYER, _INNERMOST_LAYER = 0.2, 0.4
"""By how much of the layers a cut may be further away to be preferred, if it is at a block of a long sequence."""
_SMALLEST_CHAIN = 1 / 8
"""Share of the layers that a sequence of blocks must have; shorter sequences lie within a block."""
Edge = tuple[Any, int]
"""A tensor in the graph of gradients: the node that made it, and which of its outputs it is."""


@dataclass
class _Call:
    """One call of a layer: when it began and ended, its output, and that output's tensors in the graph."""

    begin: int
    end: int = -1
    output: Any = None
    edges: list[Edge] = field(default_factory=list)


@dataclass(frozen=True)
class _Cut:
    """A layer whose output alone feeds the rest of the model.

    Attributes:
        front: Names of the parameters that its output depends on.
        back: Names of the parameters that the logits depend on otherwise.
    """

    front: frozenset[str]
    back: frozenset[str]


class Recording:
    """Forward passes of a model for two and for three images, and the cuts that they show to be possible.

    Args:
        model: In evaluation mode; it is not changed.
        images: Three images that it accepts, `(3, C, H, W)`.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model, self.image = model, tuple(images.shape[1:])
        probe = copy.deepcopy(model)
        for parameter in probe.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        self._pixels = images[:2].clone().requires_grad_(True)
        with torch.enable_grad():
            self._calls, logits = _record(probe, self._pixels * 1)  # not a leaf, which cannot be changed in place
        with torch.no_grad():
            self._calls_of_three, _ = _record(copy.deepcopy(model), images)
        self._end: Edge = logits.grad_fn, logits.output_nr
        self.outputs = logits.shape[1]
        self._names: dict[int, list[str]] = {}
        for name, parameter in probe.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._probe = probe  # holds the parameters, so that their ids stay theirs
        leaves = {name for name, module in probe.named_modules() if next(module.children(), None) is None}
        self._layers = sorted(
            call.end
            for name in leaves
            for call in self._calls.get(name, [])
            if next(probe.get_submodule(name).parameters(), None) is not None
        )

    def find_cuts(self) -> list[str]:
        """Return the names of all layers after which the model can probably be cut, in the order of their calls."""
        return [name for name in sorted(self._list_layers(), key=self._find_end) if self.find_cut(name)]

    def rank(self) -> Iterator[str]:
        """Yield the names of such layers, the best first: blocks of a long sequence, at about two thirds."""

        def cost(name: str) -> tuple[float, int]:
            distance = abs(self._share(self._find_end(name)) - _GOAL)
            return distance + self._penalty(name), name.count(".")

        return (name for name in sorted(self._list_layers(), key=cost) if self.find_cut(name))

    def find_cut(self, at: str) -> _Cut | None:
        """Return a cut if, as far as gradients show, nothing but one tensor `(N, ...)` crosses it; otherwise None."""
        template = self._read(at)
        if not at or template is None or len(template.shapes) != 1:
            return None
        (shape,) = template.shapes
        (edge,) = self._calls[at][0].edges or [None]
        if len(self._calls[at]) != 1 or shape.dtype is not None or edge is None:
            return None
        if not shape.follows or shape.sides[0] != 1 or shape.follows != (True, *[False] * (len(shape.follows) - 1)):
            return None
        before, after = _collect_leaves(edge), _collect_leaves(self._end, edge)
        if before & after or id(self._pixels) not in before:
            return None
        front, back = ({name for leaf in leaves for name in self._names.get(leaf, [])} for leaves in (before, after))
        return _Cut(frozenset(front), frozenset(back)) if front and back else None

    def cut(self, at: str) -> tuple[Front, Back]:
        """Return the part up to a layer, for which `find_cut` returned a cut, and the part after it."""
        found, template = self.find_cut(at), self._read(at)
        if found is None or template is None:
            raise ValueError(f"The model cannot be cut after {at!r}.")
        (call,) = self._calls[at]
        unused = [
            name
            for name, module in self.model.named_modules()
            if name and name not in self._calls and self._is_unused(name, module, found)
        ]
        front, back = copy.deepcopy(self.model), copy.deepcopy(self.model)
        later = [name for name, calls in self._calls.items() if calls[0].begin > call.end]
        replace_layers(front, {name: Stub(front.get_submodule(name)) for name in _find_outermost([*later, *unused])})
        make_constants(front, found.front)
        earlier = [
            name
            for name, calls in self._calls.items()
            # An output without gradient depends on shapes alone, as that of a position embedding: let it run.
            if calls[-1].end < call.end and any(one.edges for one in calls) and self._read(name) is not None
        ]
        stubs = {
            name: Stub(back.get_submodule(name), None if name in unused else self._read(name), is_cut=name == at)
            for name in _find_outermost([at, *earlier, *unused])
        }
        replace_layers(back, stubs)
        make_constants(back, found.back)
        disable_inplace(back)
        return Front(front, at), Back(back, self.image, template.shapes[0].sides[1:], self.outputs)

    def _list_layers(self) -> list[str]:
        return [name for name, calls in self._calls.items() if name and len(calls) == 1]

    def _find_end(self, name: str) -> int:
        return self._calls[name][0].end

    def _share(self, end: int) -> float:
        return sum(one <= end for one in self._layers) / max(1, len(self._layers))

    def _penalty(self, name: str) -> float:
        """Return how much worse a layer is than a block of a long sequence."""
        parent, _, _ = name.rpartition(".")
        layer, chain = self._probe.get_submodule(name), self._probe.get_submodule(parent)
        if next(layer.children(), None) is None:
            return _INNERMOST_LAYER
        if not isinstance(chain, nn.Sequential | nn.ModuleList):
            return _OTHER_LAYER
        children = [f"{parent}.{child}".lstrip(".") for child, _ in chain.named_children()]
        calls = [call for child in children for call in self._calls.get(child, [])]
        inside = sum(any(call.begin < end <= call.end for call in calls) for end in self._layers)
        return 0.0 if inside >= _SMALLEST_CHAIN * len(self._layers) else _OTHER_LAYER

    def _read(self, name: str) -> Template | None:
        """Return what a layer returns, if that is the same in all of its calls but for the values."""
        calls, others = self._calls.get(name, []), self._calls_of_three.get(name, [])
        if not calls or len(calls) != len(others):
            return None
        templates = [Template.read(a.output, b.output) for a, b in zip(calls, others, strict=True)]
        shapes = [None if one is None else one.shapes for one in templates]
        return templates[0] if all(one == shapes[0] for one in shapes) else None

    def _is_unused(self, name: str, module: nn.Module, found: _Cut) -> bool:
        names = {f"{name}.{inner}" for inner, _ in module.named_parameters(remove_duplicate=False)}
        called = any(other.startswith(f"{name}.") for other in self._calls)
        return bool(names) and not called and names.isdisjoint(found.front | found.back)


def _find_outermost(names: list[str]) -> list[str]:
    """Return the names of the layers that lie in no other of them."""
    known = set(names)
    parents = {name: [name[:index] for index, char in enumerate(name) if char == "."] for name in known}
    return [name for name in dict.fromkeys(names) if known.isdisjoint(parents[name])]


def _record(model: nn.Module, images: Tensor) -> tuple[dict[str, list[_Call]], Tensor]:
    """Run a model and return the calls of its layers by name, and the logits."""
    calls: dict[str, list[_Call]] = {}
    open_calls: dict[str, list[_Call]] = {}
    clock = 0

    def tick() -> int:
        nonlocal clock
        clock += 1
        return clock

    def register(name: str, module: nn.Module) -> None:
        def begin(*_: Any) -> None:
            call = _Call(tick())
            calls.setdefault(name, []).append(call)
            open_calls.setdefault(name, []).append(call)

        def end(_module: nn.Module, _inputs: Any, output: Any) -> None:
            call = open_calls[name].pop()
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            call.end, call.output = tick(), output
            call.edges = [(one.grad_fn, one.output_nr) for one in tensors if one.grad_fn is not None]

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    for name, module in model.named_modules():
        register(name, module)
    logits = run(model, images)
    return {name: found for name, found in calls.items() if all(call.end >= 0 for call in found)}, logits


def _collect_leaves(start: Edge, stop: Edge | None = None) -> set[int]:
    """Return the ids of the leaf tensors that a tensor depends on, other than through `stop`."""
    stack, seen, found = [start], set(), set()
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None or node in seen or (stop is not None and edge == stop):
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(node.next_functions)
    return found
