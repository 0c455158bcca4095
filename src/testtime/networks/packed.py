"""All parameters of some replicas in one tensor, so that one launch moves, copies or restores them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from testtime import kernels


class PackedParameters:
    """The stacked parameters of S replicas as views of one tensor `(S, P)`, in which a row is a replica.

    Args:
        parameters: By name, `(S, ...)` each; their data becomes a view of `numbers`.
        count: S.
        device: Where, should there be no parameters.
    """

    def __init__(self, parameters: Mapping[str, Tensor], count: int, device: torch.device) -> None:
        self.count, self._device = count, device
        # Those of an odd length last: cuDNN wants filters to begin at multiples of 16 bytes.
        self.parameters = dict(sorted(parameters.items(), key=lambda item: item[1][0].numel() % 4 != 0))
        self._innermost = {name for name, tensor in parameters.items() if kernels.has_filters_innermost(tensor)}
        self.numbers = self.pack(self.parameters)
        for name, stored in self.unpack(self.numbers).items():
            self.parameters[name].data = stored
        self._buffer = kernels.take_over("gradient_buffer", self.numbers)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors of the parameters' names and shapes, `(S, ...)` each, as one tensor `(S, P)`; P is rounded up."""
        rows = [self._order(name, tensors[name]).reshape(self.count, -1) for name in self.parameters]
        if not rows:
            return torch.zeros(self.count, 0, dtype=torch.float32, device=self._device)
        missing = -sum(row.shape[1] for row in rows) % 64  # so that every replica's begins as the first one's does
        return torch.cat([*rows, rows[0].new_zeros(self.count, missing)] if missing else rows, dim=1)

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """A loss, as a function that computes it, and its gradient by all parameters, as `pack` puts them.

        The gradient by a parameter that the loss does not depend on is zero.
        """
        if self._buffer is None:
            value = loss()
            gradients = torch.autograd.grad(value, list(self.parameters.values()), materialize_grads=True)
            return value.detach(), self.pack(dict(zip(self.parameters, gradients, strict=True)))
        with self._buffer as buffer:
            value = loss()
            buffer.begin()
            gradients = torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)
            result = buffer.collect()
        for place, gradient in zip(self.unpack(result).values(), gradients, strict=True):
            if gradient is not None:
                place += gradient
        return value.detach(), result

    def unpack(self, numbers: Tensor) -> dict[str, Tensor]:
        """Views into one tensor `(S, P)` by the parameters' names, each of its parameter's shape.

        Filters may be stored with their channels innermost, as kernels read them; the views hide that.
        """
        views, place = {}, 0
        for name, parameter in self.parameters.items():
            shape, size = self._order(name, parameter).shape, parameter[0].numel()
            piece = numbers[:, place : place + size].reshape(shape)
            views[name] = piece.permute(0, 4, 3, 1, 2) if name in self._innermost else piece
            place += size
        return views

    def _order(self, name: str, stacked: Tensor) -> Tensor:
        """Filters `(S, O, I, k, k)` as `(S, k, k, I, O)` where kernels read them so; anything else unchanged."""
        return stacked.permute(0, 3, 4, 2, 1) if name in self._innermost else stacked
