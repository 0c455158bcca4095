"""How tensors of a module are stacked for its replicas."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from testtime.networks.resnet import PreActivationBlock


class Stacking:
    """Stacks tensors of a module to `(S, *shape)`; a shared tensor stays shared.

    Args:
        count: Number of replicas, S.
        own: Ids of the layers of which every replica has its own; the others have a single row. None: all.
    """

    def __init__(self, count: int, own: Collection[int] | None = None) -> None:
        self.count, self._own = count, own
        self._shared = self if own is None else Stacking(1)
        self.made: dict[int, tuple[Tensor, Any]] = {}
        self.layers: dict[int, tuple[nn.Module, nn.Module]] = {}
        self.bare: dict[int, nn.Module] = {}
        """Modules with parameters outside of layers, by id."""

    def choose(self, layer: nn.Module) -> Stacking:
        """Return the stacking of a layer's tensors."""
        if self._own is None or type(layer) is PreActivationBlock:  # a block chooses for each of its layers
            return self
        return self if any(id(part) in self._own for part in layer.modules()) else self._shared

    def choose_bare(self, module: nn.Module) -> Stacking:
        """Return the stacking of a module's own tensors, whatever its layers have."""
        return self if self._own is None or id(module) in self._own else self._shared

    def __call__(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in self.made:
            stacked = tensor.detach().unsqueeze(0).repeat(self.count, *[1] * tensor.dim())
            if isinstance(tensor, nn.Parameter):
                stacked = nn.Parameter(stacked, requires_grad=False)
            self.made[id(tensor)] = tensor, stacked  # the original too, so that its id is not reused
        return self.made[id(tensor)][1]
