"""All parameters of replicas in one tensor, so that one launch updates, copies or restores them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from testtime import kernels


class PackedParameters:
    """The stacked parameters of S replicas as views of one tensor `(S, P)` with a row per replica.

    Args:
        parameters: Parameters by name, `(S, ...)` each; their data becomes a view of `numbers`.
        count: Number of replicas, S.
        device: The device of `numbers` if there are no parameters.
        stacked: Names of the parameters of stacked layers, whose filters may be stored as the kernels read them.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], count: int, device: torch.device, stacked: Collection[str]
    ) -> None:
        self.count, self._device = count, device
        # Lengths that are no multiple of 4 last, since cuDNN needs filters aligned to 16 bytes.
        self.parameters = dict(sorted(parameters.items(), key=lambda item: item[1][0].numel() % 4 != 0))
        self._innermost = {name for name in stacked if kernels.has_filters_innermost(parameters[name])}
        self.numbers = self.pack(self.parameters)
        for name, stored in self.unpack(self.numbers).items():
            self.parameters[name].data = stored
        self._buffer = kernels.take_over("gradient_buffer", self.numbers)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Pack tensors with the names and shapes of the parameters into one tensor `(S, P)`; P is padded."""
        rows = [self._order(name, tensors[name]).reshape(self.count, -1) for name in self.parameters]
        if not rows:
            return torch.zeros(self.count, 0, dtype=torch.float32, device=self._device)
        padding = -sum(row.shape[1] for row in rows) % 64  # aligns the row of every replica
        return torch.cat([*rows, rows[0].new_zeros(self.count, padding)] if padding else rows, dim=1)

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss that a function computes and its gradient for all parameters, packed as by `pack`.

        The gradient of a parameter that the loss does not depend on, or that needs none, is zero.
        """
        wanted = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        if self._buffer is None:
            value = loss()
            found = zip(wanted, torch.autograd.grad(value, list(wanted.values()), allow_unused=True), strict=True)
            return value.detach(), self._collect(dict(found))
        with self._buffer as buffer:
            value = loss()
            buffer.begin()
            gradients = torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
            result = buffer.collect()
        known = dict(zip(wanted, gradients, strict=True))
        for name, view in self.unpack(result).items():
            if name not in wanted:
                view.zero_()  # kernels also write the gradients of parameters that need none
            elif (gradient := known[name]) is not None:
                view += gradient
        return value.detach(), result

    def _collect(self, gradients: dict[str, Tensor | None]) -> Tensor:
        """Pack gradients; each is released once it is copied, so that their memory is not needed twice."""
        result = torch.empty_like(self.numbers)
        result[:, sum(parameter[0].numel() for parameter in self.parameters.values()) :].zero_()  # padding
        for name, view in self.unpack(result).items():
            gradient = gradients.pop(name, None)
            view.zero_() if gradient is None else view.copy_(gradient)
        return result

    def unpack(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return views of a packed tensor `(S, P)`, with the names and shapes of the parameters.

        Filters may be stored with channels innermost, as the kernels read them; the views are permuted back.
        """
        views, start = {}, 0
        for name, parameter in self.parameters.items():
            shape, size = self._order(name, parameter).shape, parameter[0].numel()
            piece = numbers[:, start : start + size].reshape(shape)
            views[name] = piece.permute(0, 4, 3, 1, 2) if name in self._innermost else piece
            start += size
        return views

    def _order(self, name: str, stacked: Tensor) -> Tensor:
        """Permute filters `(S, O, I, k, k)` to `(S, k, k, I, O)` if they are stored so; return others unchanged."""
        return stacked.permute(0, 3, 4, 2, 1) if name in self._innermost else stacked
