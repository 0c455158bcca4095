"""Optimizers of stacked parameters: how they treat rows, determined by trying them, and their state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.adaptation.settings import Settings
from testtime.networks.packed import PackedParameters
from testtime.randomness import Draws


def is_rowwise(settings: Settings) -> bool:
    """Return whether the optimizer updates each row of stacked parameters as it would update the row alone.

    Zeroed state must also be equivalent to no state, since that is how a row is reset.
    """
    numbers = Draws.of(0, torch.arange(2, device="cpu")).normal(4, 3, 3)  # two rows: a start and three gradients
    ends = []
    for rows, from_zeros in (([slice(0, 1), slice(1, 2)], False), ([slice(0, 2)], False), ([slice(0, 2)], True)):
        parts = []
        for row in rows:
            parameter = nn.Parameter(numbers[row, 0].clone())
            optimizer = settings.optimizer([parameter], lr=settings.lr)
            try:
                if from_zeros:
                    _step(optimizer, parameter, numbers[row, 1])
                    for value in optimizer.state[parameter].values():
                        if isinstance(value, Tensor):
                            value.zero_()
                    parameter.data.copy_(numbers[row, 0])
                for step in (1, 2, 3):
                    _step(optimizer, parameter, numbers[row, step])
            except TypeError:  # it needs a closure
                return False
            parts.append(parameter.detach())
        ends.append(torch.cat(parts))
    return all(torch.allclose(end, ends[0], rtol=1e-6, atol=0) for end in ends)


def is_still(settings: Settings) -> bool:
    """Return whether the optimizer leaves parameters alone whose gradient is always zero."""
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.float32, device="cpu"))
    optimizer = settings.optimizer([parameter], lr=settings.lr)
    for _ in range(2):
        _step(optimizer, parameter, torch.zeros_like(parameter))
    return bool((parameter == 1).all())


def has_rows(settings: Settings) -> bool:
    """Return whether the optimizer's state has a row per replica, so that rows can be updated independently."""
    held = find_memory(settings).values()
    return all(value is None or (isinstance(value, Tensor) and value.shape in ((2, 3), (2,))) for value in held)


def find_memory(settings: Settings) -> dict[str, Any]:
    """Return the optimizer's state of a parameter `(2, 3)` after a step, by name."""
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.float32, device="cpu"))
    optimizer = settings.optimizer([parameter], lr=settings.lr)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)  # some need a closure
    return optimizer.state[parameter]


def _step(optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()
    optimizer.step()


class StackedOptimizer:
    """An optimizer of stacked parameters, whose state can be read, reset and restored by replica.

    On a GPU, an elementwise optimizer updates all parameters as one tensor, in one launch.

    Args:
        settings: The settings.
        packed: All parameters of the replicas.
        moving: The parameters that learn, by name, `(S, ...)` each.
    """

    def __init__(self, settings: Settings, packed: PackedParameters, moving: dict[str, Tensor]) -> None:
        self._settings, self._packed, self._moving = settings, packed, moving
        self.rowwise = is_rowwise(settings)
        self._learns_all = self.rowwise and len(moving) == len(packed.parameters)
        self._fits_whole = self._learns_all or (self.rowwise and bool(moving) and is_still(settings))
        self.flat = self._fits_whole and kernels.tuning(packed.numbers.device).waits
        """Whether all parameters are updated as one tensor; elsewhere, that would only take memory for a gradient."""
        self._targets = {"numbers": packed.numbers} if self.flat or not moving else moving
        self._optimizer = self._make()

    def step(self, loss: Callable[[], Tensor], wait: Callable[[], None]) -> None:
        """Take one step on the loss that `loss` computes; `wait` is called between gradient and update."""

        def evaluate() -> Tensor:
            if self.flat:
                value, self._packed.numbers.grad = self._packed.gradient(loss)
            else:
                total = loss()
                gradients = torch.autograd.grad(
                    total,
                    list(self._moving.values()),
                    allow_unused=True,
                    materialize_grads=self._fits_whole,  # as a packed gradient: results must not depend on the device
                )
                for parameter, gradient in zip(self._moving.values(), gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.contiguous()
                value = total.detach()
            wait()
            return value

        with torch.enable_grad():
            self._optimizer.step(evaluate)  # type: ignore[arg-type]  # torch types the closure as returning a float
        if not self.flat:
            self._optimizer.zero_grad()  # frees the memory

    def reset(self, rows: Tensor | None) -> None:
        """Forget the state of all replicas, or of those where `rows`, bool `(S,)`, is true."""
        if not self.rowwise and (rows is None or rows.all()):
            self._optimizer = self._make()
        for tensor in self._memory().values():
            tensor.zero_() if rows is None else tensor.masked_fill_(_mask(rows, tensor), 0)

    def snapshot(self) -> Any:
        """Return a copy of the state: tensors by parameter and key; or a `state_dict`, if the optimizer mixes rows."""
        if not self.rowwise:
            return copy.deepcopy(self._optimizer.state_dict())
        return {entry: tensor.clone() for entry, tensor in self._memory().items()}

    def restore(self, snapshot: Any, rows: Tensor) -> None:
        """Restore the state of the replicas where `rows`, bool `(S,)`, is true, from a snapshot."""
        if not self.rowwise:
            if rows.all():
                # A copy, since the optimizer continues in the tensors that it is given.
                self._optimizer.load_state_dict(copy.deepcopy(snapshot))
            return
        own = self._memory()
        for entry, old in snapshot.items():
            if entry not in own:  # from another optimizer, which has taken a step
                name, key = entry
                self._optimizer.state[self._targets[name]][key] = own[entry] = torch.zeros_like(old)
        for entry, tensor in own.items():
            # State that did not exist yet at the time of the snapshot was zero, see is_rowwise.
            old = snapshot.get(entry, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
            tensor.copy_(torch.where(_mask(rows, tensor), old, tensor))

    def state(self) -> dict[str, Tensor]:
        """Return the state by key and parameter, in the shapes of the network.

        Raises:
            ValueError: The state is not made up of tensors.
        """
        state: dict[str, Tensor] = {}
        for target, parameter in self._targets.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise ValueError(f"The optimizer's {key!r} is not a tensor, so this state cannot be saved.")
                if self.flat and value.shape == parameter.shape:
                    views = self._packed.unpack(value)
                    state |= {f"{key}/{name}": views[name] for name in self._moving}
                else:
                    # Step counts have torch's default dtype, which the state must not depend on.
                    state[f"{key}/{target}"] = value if value.dim() else value.float()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of an optimizer with the same parameters and settings.

        Raises:
            ValueError: A tensor is missing, unknown, or has another shape or type; nothing was changed.
        """
        known = {key: value for key, value in find_memory(self._settings).items() if isinstance(value, Tensor)}
        parameters, device = self._moving | self._targets, self._packed.numbers.device
        memory: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._convert_counts(state, known).items():
            key, _, target = name.partition("/")
            if key not in known or target not in parameters or not _fits(tensor, known[key], parameters[target]):
                raise ValueError(
                    f"The state does not fit: {key!r} of {target!r} is unknown, or has another shape or type."
                )
            # torch stores step counts on the CPU, everything else on the parameter's device
            own = tensor.detach().to(device, copy=True) if tensor.dim() else tensor.detach().clone()
            memory.setdefault(key, {})[target] = own
        held: dict[str, dict[str, Tensor]] = {}
        for key, tensors in memory.items():
            if self.flat and tensors.keys() == self._moving.keys():
                zeros = {name: torch.zeros_like(parameter) for name, parameter in self._packed.parameters.items()}
                tensors = {"numbers": self._packed.pack(zeros | tensors)}
            for target, tensor in tensors.items():
                held.setdefault(target, {})[key] = tensor
        whole = all(target in self._targets and found.keys() == known.keys() for target, found in held.items())
        if not whole or (self._learns_all and held and held.keys() != self._targets.keys()):
            raise ValueError("The state does not fit: the optimizer's state is incomplete.")
        self._optimizer = self._make()
        for target, found in held.items():
            self._optimizer.state[self._targets[target]].update(found)

    def _convert_counts(self, state: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state with step counts as on this device: one of the packed tensor, or one per parameter."""
        converted: dict[str, Tensor] = {}
        for name, tensor in state.items():
            key, _, target = name.partition("/")
            is_count = key in known and known[key].dim() < 2
            if is_count and self.flat and target in self._moving:
                converted[f"{key}/numbers"] = tensor
            elif is_count and not self.flat and target == "numbers":
                converted |= {f"{key}/{parameter}": tensor for parameter in self._moving}
            else:
                converted[name] = tensor
        return converted

    def _make(self) -> torch.optim.Optimizer:
        optimizer = self._settings.optimizer(list(self._targets.values()), lr=self._settings.lr)
        for group in optimizer.param_groups:
            if self.flat and group.get("foreach", True) is None:
                group["foreach"] = False  # foreach splits a single tensor into a few large pieces
        return optimizer

    def _memory(self) -> dict[tuple[str, str], Tensor]:
        """Return the optimizer's state tensors, by the name of the updated tensor and the key."""
        held = {name: self._optimizer.state.get(tensor, {}) for name, tensor in self._targets.items()}
        items = ((name, key, value) for name, memory in held.items() for key, value in memory.items())
        return {(name, key): value for name, key, value in items if isinstance(value, Tensor)}


def _fits(tensor: Tensor, example: Tensor, parameter: Tensor) -> bool:
    """Return whether a saved tensor can be a parameter's state, of which there is an example."""
    if example.dim() < 2:  # a count, of the parameter or of each row
        return tensor.shape == parameter.shape[: example.dim()] and tensor.dtype == torch.float32
    dtype = parameter.dtype if example.is_floating_point() else example.dtype
    return tensor.shape == parameter.shape and tensor.dtype == dtype


def _mask(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return a mask of rows that broadcasts to a stacked tensor; for a shared scalar, whether all rows are set."""
    return rows.view(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() else rows.all().to(tensor.device)
